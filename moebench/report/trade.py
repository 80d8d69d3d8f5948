"""Figures of what is traded for what: speed, memory and quality; hits and bytes against the budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moebench.report.figure import Figure, Looks, axis, layout, scale, words
from moebench.report.groups import Named
from moebench.report.pareto import front
from moebench.report.table import number

SPEED, MEMORY, QUALITY = "decode_tok_s", "peak_active_gib", "quality_delta"
CURVES = {"hit_rate": "hit rate", "ssd_mib_per_token": "MiB from storage per token"}

BOUND = (
    "Among systems that read on demand and keep what they read none can stand above Belady, the dashed oracle, in "
    "hits, or below it in bytes. One that reads ahead hits what it has just read: judge it by the bytes."
)


def pareto(rows: Sequence[Named], slug: str, looks: Looks) -> Figure | None:
    """Speed against memory with the front drawn, and again among the rows that keep the model's own routing."""
    points = _points(rows, MEMORY, SPEED)
    if len(points) < 2:
        return None
    real = [(named, x, y) for named, x, y in points if named.role != "oracle"]
    best = {named.name: named for named in front([(named, (y, -x)) for named, x, y in real])}
    own = [point for point in real if point[0].row.fidelity != "altered"]
    kept = {named.name for named in front([(named, (y, -x)) for named, x, y in own])}
    data = [
        _mark(named, x, y, looks, named.name in best or named.name in kept, "GiB", "tok/s") for named, x, y in points
    ]
    lines = [_front([p for p in real if p[0].name in best], "front", "solid")]
    if kept != set(best):
        lines.append(_front([p for p in own if p[0].name in kept], "front, the model's own routing", "dot"))
    all_three = ", ".join(named.name for named in _unbeaten(real))
    caption = (
        "Up is faster, left is smaller. The line joins the rows that no other beats in both; an open mark is an "
        f"oracle, which no system reaches and which is not on the line. Beaten in nothing, "
        f"quality counted too: {all_three}."
    )
    return Figure(
        f"{slug}-pareto", "Speed against memory", caption,
        "Scatter of decode tokens per second over peak active GiB, one mark for each row, with its Pareto front.",
        [*lines, *data],
        layout(axis("peak active GiB"), axis("decode tok/s", type=scale([y for _, _, y in points]))), 400,
    )  # fmt: skip


def quality(rows: Sequence[Named], slug: str, looks: Looks) -> Figure | None:
    """Quality against speed, where quality was measured."""
    points = _points(rows, SPEED, QUALITY)
    if len(points) < 2:
        return None
    best = {named.name for named in front([(named, (x, y)) for named, x, y in points if named.role != "oracle"])}
    data = []
    for named, x, y in points:
        mark = _mark(named, x, y, looks, named.name in best, "tok/s", "points")
        if (ci := named.row.metrics[QUALITY].ci) is not None:
            colour = looks.colour(named.row.system)
            mark["error_y"] = {"array": [ci[1] - y], "arrayminus": [y - ci[0]], "color": colour, "thickness": 1}
        data.append(mark)
    caption = (
        "Right is faster, up is better; 0 is the unmodified model. Bars are 95 % intervals over the same items: where "
        "a bar crosses 0, the loss is within what so few items can tell."
    )
    alt = "Scatter of the quality delta in points over decode tokens per second, one mark for each row."
    zero = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": {"color": "var(--faint)"}}
    shape = layout(axis("decode tok/s"), axis("quality delta, points"), shapes=[zero])
    return Figure(f"{slug}-quality", "Quality against speed", caption, alt, data, shape, 400)


def curves(rows: Sequence[Named], slug: str, looks: Looks) -> list[Figure]:
    """Hit rate and bytes against the budget, from rows that differ in budget and system only."""
    figures: list[Figure] = []
    for sweep in _sweeps(rows):
        unit = "GiB" if sweep[0][1] == "size" else "share of the routed experts' bytes"
        for name, title in CURVES.items():
            data: list[dict[str, Any]] = []
            for system in dict.fromkeys(named.row.system for named, _, _ in sweep):
                found = [(at, named.row.metrics[name].value) for named, _, at in sweep if named.row.system == system]
                line = [(x, y) for x, y in sorted(found) if y is not None]
                if line:
                    data.append(
                        _line(
                            system,
                            line,
                            looks,
                            oracle=any(n.role == "oracle" for n, _, _ in sweep if n.row.system == system),
                        )
                    )
            if not data:
                continue
            figures.append(
                Figure(
                    f"{slug}-{name.replace('_', '-')}-{len(figures)}", f"{title[0].upper()}{title[1:]} against budget",
                    BOUND, f"Lines of {title} over the budget, one for each system, with Belady as the bound.",
                    data, layout(axis(f"budget, {unit}"), axis(title, rangemode="tozero")), 360,
                )
            )  # fmt: skip
    return figures


def _points(rows: Sequence[Named], x: str, y: str) -> list[tuple[Named, float, float]]:
    """Rows that have both metrics, with their values."""
    found = []
    for named in rows:
        a, b = (named.row.metrics[name].value if name in named.row.metrics else None for name in (x, y))
        if a is not None and b is not None:
            found.append((named, a, b))
    return found


def _unbeaten(points: Sequence[tuple[Named, float, float]]) -> list[Named]:
    """The front over speed, memory and quality: the delta where every row has one, else whether routing is altered."""
    deltas = [named.row.metrics[QUALITY].value if QUALITY in named.row.metrics else None for named, _, _ in points]
    told = [d for d in deltas if d is not None]
    if len(told) < len(deltas):
        told = [-float(named.row.fidelity == "altered") for named, _, _ in points]
    return front([(named, (y, -x, q)) for (named, x, y), q in zip(points, told, strict=True)])


def _mark(named: Named, x: float, y: float, looks: Looks, label: bool, x_unit: str, y_unit: str) -> dict[str, Any]:
    """One row as one mark, labelled where it stands on the front."""
    symbol = looks.symbol(named.row.system) + ("-open" if named.role == "oracle" else "")
    name = words(named.name)
    quality = named.row.metrics.get(QUALITY)
    told = f"<br>{number(quality.value)} points" if quality is not None and quality.value is not None else ""
    text = f"<b>{name}</b> ({words(named.row.fidelity)})<br>{number(x)} {x_unit}, {number(y)} {y_unit}{told}"
    return {
        "type": "scatter", "mode": "markers+text" if label else "markers", "name": name, "x": [x], "y": [y],
        "text": [name] if label else [""], "textposition": "top center", "cliponaxis": False,
        "textfont": {"size": 12}, "hovertext": [text], "hoverinfo": "text",
        "marker": {
            "size": 11, "symbol": symbol, "color": looks.colour(named.row.system),
            "line": {"width": 1, "color": "var(--ink)"},
        },
    }  # fmt: skip


def _front(points: Sequence[tuple[Named, float, float]], name: str, dash: str) -> dict[str, Any]:
    """The front as steps: nothing above and to the left of it."""
    ordered = sorted((x, y) for _, x, y in points)
    line = {"color": "var(--faint)", "width": 2, "dash": dash, "shape": "hv"}
    xs, ys = [x for x, _ in ordered], [y for _, y in ordered]
    return {"type": "scatter", "mode": "lines", "name": name, "x": xs, "y": ys, "line": line, "hoverinfo": "skip"}


def _sweeps(rows: Sequence[Named]) -> list[list[tuple[Named, str, float]]]:
    """Rows by everything but budget and system, as (row, kind of budget, amount), where a system has two budgets."""
    found: dict[str, list[tuple[Named, str, float]]] = {}
    for named in rows:
        kind, amount = _budget(str(named.row.config.get("budget", "")))
        if not kind or "hit_rate" not in named.row.metrics:
            continue
        rest = {key: value for key, value in named.row.config.items() if key not in ("budget", "system")}
        found.setdefault(json.dumps([kind, rest], sort_keys=True), []).append((named, kind, amount))
    return [part for part in found.values() if _swept(part)]


def _swept(part: Sequence[tuple[Named, str, float]]) -> bool:
    amounts: dict[str, set[float]] = {}
    for named, _, amount in part:
        amounts.setdefault(named.row.system, set()).add(amount)
    return any(len(several) > 1 for several in amounts.values())


def _budget(text: str) -> tuple[str, float]:
    """``("share", 0.25)``, ``("size", 3.0)`` in GiB, or nothing."""
    from moebench.budget import parse_bytes
    from moebench.errors import UsageError
    from moebench.units import GIB

    try:
        return "share", float(text)
    except ValueError:
        try:
            return "size", parse_bytes(text) / GIB
        except UsageError:
            return "", 0.0


def _line(system: str, line: Sequence[tuple[float, float]], looks: Looks, oracle: bool) -> dict[str, Any]:
    style = {"color": looks.colour(system), "dash": "dash" if oracle else "solid", "width": 3 if oracle else 2}
    marker = {"symbol": looks.symbol(system), "size": 8}
    xs, ys = [x for x, _ in line], [y for _, y in line]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": words(system),
        "x": xs,
        "y": ys,
        "line": style,
        "marker": marker,
    }
