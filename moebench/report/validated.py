"""The tables of a validation: modeled beside measured, cell by cell, and the bars. Knows cells; runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from moebench.report.plain import Plain
from moebench.report.table import number
from moebench.validation import HELD, MOST, TIMES, Bar, Compared, deviations, quantile

HEADS = {"decode_tok_s": "tok/s", "stall_ms_per_token": "stall ms", "ttft_s": "TTFT s"}
NOTES = (
    "error: (modeled - measured) / measured, of a stall over 5 % of the token's time at least; noise: highest less "
    "lowest repeat, on the same scale",
    "tok/s of a replay, which only reads: tokens over the seconds of its steps",
)


def tables(cells: Sequence[Compared], bars: Sequence[Bar]) -> list[Plain]:
    """One table for each kind of cell, one of errors by kind, and one of the bars."""
    made = [_cells(kind, [cell for cell in cells if cell.workload == kind]) for kind in _kinds(cells)]
    return [*made, _errors(cells), _bars(bars)]


def _kinds(cells: Sequence[Compared]) -> list[str]:
    return list(dict.fromkeys(cell.workload for cell in cells))


def _cells(kind: str, cells: Sequence[Compared]) -> Plain:
    shown = [name for name in TIMES if any(cell.ratio(name) is not None for cell in cells)]
    header = ["system", "budget"]
    for name in shown:
        header += [f"{HEADS[name]} measured", "modeled", "error", "noise"]
    header += ["hits measured", "modeled", "MiB/tok measured", "modeled"]
    lines = []
    for cell in cells:
        line = [cell.system, cell.budget]
        if cell.error:
            lines.append((*line, "failed", *["-"] * (len(header) - 3)))
            continue
        for name in shown:
            line += [_number(cell.value(name)), _number(cell.modeled.get(name))]
            line += [_percent(cell.deviation(name), "+"), _percent(cell.noise(name))]
        for name in ("hit_rate", "ssd_mib_per_token"):
            line += [_number(cell.value(name)), _number(cell.modeled.get(name))]
        lines.append(tuple(line))
    notes = [f"page cache: {state}" for state in dict.fromkeys(cell.page_cache for cell in cells if cell.page_cache)]
    failed = [f"failed {cell.system} {cell.budget}: {cell.error}" for cell in cells if cell.error]
    repeats = max((len(values) for cell in cells for values in cell.measured.values()), default=0)
    title = f"{kind}: measured is the median of {repeats}"
    return Plain(title, tuple(header), tuple(lines), (*NOTES, *notes, *failed), labels=2)


def _errors(cells: Sequence[Compared]) -> Plain:
    lines = []
    for kind in (*_kinds(cells), "all"):
        own = [cell for cell in cells if kind in (cell.workload, "all") and not cell.error]
        for name in TIMES:
            if found := [value for _, value in deviations(own, name)]:
                sizes = [abs(value) for value in found]
                noises = [one for cell in own if (one := cell.noise(name)) is not None]
                noise = _percent(median(noises) if noises else None)
                most = _percent(quantile(sizes, MOST))
                lines.append(
                    (kind, HEADS[name], str(len(found)), _percent(median(sizes)), most, _percent(median(found), "+"),
                     noise)
                )  # fmt: skip
    head = ("cells", "metric", "n", "median error", f"{MOST:.0%} of errors", "median bias", "median noise")
    return Plain("Forecast errors", head, tuple(lines), labels=2)


def _bars(bars: Sequence[Bar]) -> Plain:
    lines, notes = [], []
    for bar in bars:
        share = bar.limit <= 1 and bar.limit > 0
        value, limit = (_percent(x) if share else f"{x:g}" for x in (bar.value, bar.limit))
        sign = "at least" if bar.least else "at most"
        lines.append((bar.name, value, f"{sign} {limit}", str(bar.n), "met" if bar.met else "missed"))
        notes += [f"{bar.name}: {miss}" for miss in bar.misses[:40]]
        notes += [f"{bar.name}: and {len(bar.misses) - 40} more"] * (len(bar.misses) > 40)
    return Plain("Bars", ("bar", "reached", "wanted", "n", "verdict"), tuple(lines), tuple(notes))


def _number(value: float | None) -> str:
    return "-" if value is None else number(value, 4)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1%}"


def failed(bars: Sequence[Bar]) -> bool:
    """Whether a bar is missed."""
    return any(not bar.met for bar in bars)


def band(cells: Sequence[Compared]) -> dict[str, dict[str, list[float]]]:
    """Errors by metric and kind of cell, as a record of forecasts holds them."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in HELD:
        for kind in _kinds(cells):
            own = [cell for cell in cells if cell.workload == kind and not cell.error]
            if values := [round(value, 4) for _, value in deviations(own, name)]:
                found.setdefault(name, {})[kind] = values
    return found
