"""The table for people: rows of results with a mark on every number that says where it comes from.

One line per row where the terminal is wide enough; otherwise metrics become lines and rows columns. What is the same
for all rows stands above the table once. Knows rows, no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moebench.result import METRICS, Metric, Row

MARKS = {"measured": "m", "modeled": "~", "published": "†"}
LEGEND = "m measured   ~ modeled   † published   - no value, reason below"
HEADINGS = {
    "decode_tok_s": "decode tok/s",
    "ttft_s": "TTFT s",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p95_ms": "TPOT p95 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "peak_active_gib": "peak active GiB",
    "allocator_peak_gib": "allocator peak GiB",
    "process_peak_gib": "process peak GiB",
    "hit_rate": "hit rate",
    "late_rate": "late rate",
    "host_rate": "host rate",
    "ssd_mib_per_token": "SSD MiB/token",
    "reads_per_token": "reads/token",
    "storage_requests_per_token": "storage requests/token",
    "stall_ms_per_token": "stall ms/token",
    "effective_gb_s": "effective GB/s",
    "accepted_per_round": "accepted/round",
    "verified_per_token": "verified/token",
    "token_agreement": "token agreement",
    "kl_median_nats": "KL median nats",
    "kl_p99_nats": "KL p99 nats",
    "perplexity": "perplexity",
    "quality_delta": "quality delta pt",
}
OF_SOME = ("host_rate", "accepted_per_round", "verified_per_token")  # lines that only appear where they mean something
NOTHING: Mapping[str, str] = MappingProxyType({})
LABELS = ("system", "fidelity", "model", "workload")


def print_table(
    rows: Sequence[Row], stream: TextIO, width: int | None = None, forecasts: Mapping[str, str] = NOTHING
) -> None:
    """Print rows for people, then the legend, the reasons for missing values, failures and assumptions. ``forecasts``
    says of machines what modeled numbers of theirs are off by.
    """
    console = Console(file=stream, width=width, highlight=False, soft_wrap=False)
    if not rows:
        console.print("no rows")
        return
    names = [name for name in METRICS if any(name in row.metrics for row in rows)]
    names = [name for name in names if name not in OF_SOME or any(_has(row, name) for row in rows)]
    labels = [label for label in LABELS if label == "system" or len({_label(row, label) for row in rows}) > 1]
    labels += _varied(rows)
    common = [f"{label} {_label(rows[0], label)}" for label in ("hw", *LABELS) if label not in labels]
    console.print(Text("   ".join(common)))
    wide = _wide(rows, labels, names)
    if _natural_width(wide) <= console.width:
        console.print(wide)
    else:
        for part in _chunks(rows, labels, names, console.width):
            console.print(_tall(part, labels, names))
    console.print(Text(LEGEND))
    for line in (*forecasts.values(), *_notes(rows, names)):
        console.print(Text(line))


def number(value: float, decimals: int = 9) -> str:
    """A value for people: three significant digits below a thousand, never an exponent. Of more than ``decimals``
    decimals those are left out that only follow the first digit.
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    if size >= 1:
        return f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    first = -math.floor(math.log10(size))
    return f"{value:.{max(first, min(first + 2, decimals))}f}"


def cell(row: Row, name: str) -> str:
    """One metric of one row: the number and its mark, or ``-``."""
    metric = row.metrics.get(name)
    if metric is None or metric.value is None:
        return "-"
    return f"{number(metric.value)} {MARKS[str(metric.provenance)]}"


def _has(row: Row, name: str) -> bool:
    return name in row.metrics and row.metrics[name].value is not None


def _label(row: Row, label: str) -> str:
    if label not in LABELS and label != "hw":
        return str(row.options.get(label, ""))
    return str(getattr(row, "workload_name" if label == "workload" else label))


def _varied(rows: Sequence[Row]) -> list[str]:
    """Options that tell apart the rows of one system on one model, as a sweep has them."""
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row.config:
            seen.setdefault((row.system, row.model), []).append(row.options)
    names = dict.fromkeys(name for configs in seen.values() for config in configs for name in config)
    return [n for n in names if any(len({str(c.get(n)) for c in configs}) > 1 for configs in seen.values())]


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _natural_width(table: Table) -> int:
    return Console(width=10_000).measure(table).maximum


def _wide(rows: Sequence[Row], labels: Sequence[str], names: Sequence[str]) -> Table:
    table = _table()
    for label in labels:
        table.add_column(Text(label), no_wrap=True)
    for name in names:
        table.add_column(
            Text(HEADINGS[name].replace(" ", "\n").replace("/token", "/\ntoken")), justify="right", no_wrap=True
        )
    for row in rows:
        table.add_row(*(Text(_label(row, label)) for label in labels), *(Text(cell(row, name)) for name in names))
    return table


def _tall(rows: Sequence[Row], labels: Sequence[str], names: Sequence[str]) -> Table:
    table = _table()
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(Text(row.system), justify="right", overflow="fold")
    for label in labels[1:]:
        table.add_row(label, *(Text(_label(row, label)) for row in rows))
    for name in names:
        table.add_row(HEADINGS[name], *(Text(cell(row, name)) for row in rows))
    return table


def _chunks(rows: Sequence[Row], labels: Sequence[str], names: Sequence[str], width: int) -> list[list[Row]]:
    """Rows side by side, as many as fit whole beside the column of names; at least one."""
    chunks: list[list[Row]] = [[]]
    for row in rows:
        if chunks[-1] and _natural_width(_tall([*chunks[-1], row], labels, names)) > width:
            chunks.append([])
        chunks[-1].append(row)
    return chunks


def _notes(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Reasons of missing values (each once, with where it holds), sources, failures and assumptions."""
    missing: dict[str, dict[str, list[str]]] = {}
    sources: dict[str, None] = {}
    by = "system" if len({row.system for row in rows}) > 1 else "model"
    published = [row for row in rows if row.workload["kind"] == "published"]
    for row in rows:
        for name in names:
            metric = row.metrics.get(name, Metric(None, "", None, reason="this kind of run does not report it"))
            if metric.value is None and row not in published:
                missing.setdefault(metric.reason, {}).setdefault(HEADINGS[name], []).append(getattr(row, by))
            elif metric.provenance == "published":
                sources[f"† {row.system}, {HEADINGS[name]}: {metric.source}"] = None
    lines = []
    for reason, where in missing.items():
        rows_of = {name for found in where.values() for name in found}
        who = "" if rows_of == {getattr(row, by) for row in rows} else f" ({', '.join(sorted(rows_of))})"
        lines.append(f"- {', '.join(where)}{who}: {reason}")
    lines += ["- elsewhere in a published row: the publication does not report it"] * bool(published)
    lines += list(sources)
    lines += [f"failed {row.system}, {row.model}: {row.error}" for row in rows if row.status == "failed"]
    if taken := {(row.system, row.model): us for row in rows if (us := row.volatile.get("hook_us_per_token"))}:
        said = ", ".join(f"{system}, {model} {number(us)}" for (system, model), us in taken.items())
        lines.append(f"hooks and policy, us/token on this machine: {said}")
    lines += list(dict.fromkeys(assumption for row in rows for assumption in row.assumptions))
    return lines
