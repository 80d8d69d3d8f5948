"""Figures of what is traded for what: speed, memory and quality; hits and bytes against the budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from moebench.budget import parse_bytes
from moebench.errors import UsageError
from moebench.report.figure import Figure, Looks, axis, layout, scale, words
from moebench.report.groups import Named
from moebench.report.pareto import front
from moebench.report.table import number
from moebench.units import GIB

SPEED, MEMORY, QUALITY = "decode_tok_s", "peak_active_gib", "quality_delta"
CURVES = {"hit_rate": "Hit rate", "ssd_mib_per_token": "MiB from storage per token"}
BOUND = (
    "Among systems that read on demand and keep what they read none can stand above Belady, the dashed oracle, in "
    "hits, or below it in bytes. One that reads ahead hits what it has just read: judge it by the bytes."
)
Point = tuple[Named, float, float]


def pareto(rows: Sequence[Named], slug: str, looks: Looks) -> Figure | None:
    """Speed against memory with the front drawn, and again among the rows that keep the model's own routing."""
    points = _points(rows, MEMORY, SPEED)
    if len(points) < 2:
        return None
    real = [point for point in points if point[0].role != "oracle"]
    best = _front(real)
    own = _front([point for point in real if point[0].row.fidelity != "altered"])
    fronts = [_steps(best, "solid")] + [_steps(own, "dot")] * (own != best)
    data = _marks(points, {named.name for named, _, _ in [*best, *own]}, looks, "GiB", "tok/s")
    dotted = "" if own == best else " The dotted line is the same among rows that keep the model's own routing."
    caption = (
        f"Up is faster, left is smaller. The line joins the rows that no other beats in both.{dotted} An open mark is "
        "an oracle, which no system reaches; it is not on a line. Beaten by none, quality counted too: "
        f"{', '.join(named.name for named in _unbeaten(real))}."
    )
    alt = "Scatter of decode tokens per second over peak active GiB, one mark for each row, with its Pareto front."
    xs, ys = [x for _, x, _ in points], [y for _, _, y in points]
    shape = layout(axis("peak active GiB", type=scale(xs)), axis("decode tok/s", type=scale(ys)))
    return Figure(f"{slug}-pareto", "Speed against memory", caption, alt, [*fronts, *data], shape, 400)


def quality(rows: Sequence[Named], slug: str, looks: Looks) -> Figure | None:
    """Quality against speed, where quality was measured."""
    points = _points(rows, SPEED, QUALITY)
    if len(points) < 2:
        return None
    altered = {named.name for named, _, _ in points if named.row.fidelity == "altered"}
    data = _marks(points, altered, looks, "tok/s", "points")
    for trace in data:
        rows_of = [named for named, _, _ in points if words(named.row.system) == trace["name"]]
        spans = [named.row.metrics[QUALITY].ci or (y, y) for named, y in zip(rows_of, trace["y"], strict=True)]
        above = [high - y for (_, high), y in zip(spans, trace["y"], strict=True)]
        below = [y - low for (low, _), y in zip(spans, trace["y"], strict=True)]
        trace["error_y"] = {"array": above, "arrayminus": below, "color": trace["marker"]["color"], "thickness": 1}
    caption = (
        "Right is faster, up is better; 0 is the unmodified model. Bars are 95 % intervals over the same items: where "
        "a bar crosses 0, the loss is within what so few items can tell. Systems that alter the routing are named."
    )
    alt = "Scatter of the quality delta in points over decode tokens per second, one mark for each row."
    zero = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": {"color": "var(--faint)"}}
    shape = layout(axis("decode tok/s"), axis("quality delta, points"), shapes=[zero])
    return Figure(f"{slug}-quality", "Quality against speed", caption, alt, data, shape, 400)


def curves(rows: Sequence[Named], slug: str, looks: Looks) -> list[Figure]:
    """Hit rate and bytes against the budget: a line joins rows that differ in the budget only."""
    figures: list[Figure] = []
    for unit in ("share of the routed experts' bytes", "GiB"):
        lines: dict[str, list[tuple[float, Named]]] = {}
        for named in rows:
            amount, of = _budget(str(named.row.config.get("budget", "")))
            if of == unit and named.role not in ("floor", "ceiling"):  # these hold nothing and all, whatever the budget
                lines.setdefault(_without_budget(named.name), []).append((amount, named))
        if not any(len({amount for amount, _ in line}) > 1 for line in lines.values()):
            continue
        for name, title in CURVES.items():
            data = [_curve(label, line, name, looks) for label, line in lines.items()]
            data = [trace for trace in data if trace["x"]]
            if data:
                alt = f"Lines of {title} over the budget, one for each system, with Belady as the bound."
                shape = layout(axis(f"budget, {unit}"), axis(title, rangemode="tozero"))
                at = f"{slug}-{name.replace('_', '-')}-{len(figures)}"
                figures.append(Figure(at, f"{title} against budget", BOUND, alt, data, shape, 360))
    return figures


def _points(rows: Sequence[Named], x: str, y: str) -> list[Point]:
    """Rows that have both metrics, with their values."""
    found = []
    for named in rows:
        a, b = (named.row.metrics[name].value if name in named.row.metrics else None for name in (x, y))
        if a is not None and b is not None:
            found.append((named, a, b))
    return found


def _front(points: Sequence[Point]) -> list[Point]:
    """The points that none beats in small x and large y, from left to right."""
    return sorted(front([(point, (-point[1], point[2])) for point in points]), key=lambda point: point[1:])


def _unbeaten(points: Sequence[Point]) -> list[Named]:
    """The front over speed, memory and quality: the delta where every row has one, else whether routing is altered."""
    deltas = [named.row.metrics[QUALITY].value if QUALITY in named.row.metrics else None for named, _, _ in points]
    told = [delta for delta in deltas if delta is not None]
    if len(told) < len(deltas):
        told = [-float(named.row.fidelity == "altered") for named, _, _ in points]
    return front([(named, (y, -x, q)) for (named, x, y), q in zip(points, told, strict=True)])


def _marks(points: Sequence[Point], named: Collection[str], looks: Looks, x: str, y: str) -> list[dict[str, Any]]:
    """A trace for each system, joined where it has several rows; those ``named`` have their name beside them."""
    ends = min(at for _, at, _ in points), max(at for _, at, _ in points)
    middle = math.sqrt(ends[0] * ends[1]) if scale(ends) == "log" else sum(ends) / 2
    data = []
    for system in dict.fromkeys(found.row.system for found, _, _ in points):
        mine = [point for point in points if point[0].row.system == system]
        oracle = mine[0][0].role == "oracle"
        data.append({
            "type": "scatter", "mode": "lines+markers+text", "name": words(system),
            "x": [at for _, at, _ in mine], "y": [at for _, _, at in mine],
            "text": [words(row.name.replace("budget=", "")) if row.name in named else "" for row, _, _ in mine],
            "textposition": ["bottom right" if at <= middle else "top left" for _, at, _ in mine],
            "textfont": {"size": 12}, "cliponaxis": False, "hoverinfo": "text",
            "hovertext": [_hover(point, x, y) for point in mine],
            "line": {"width": 1, "dash": "dot", "color": looks.colour(system)},
            "marker": {
                "size": 11, "symbol": looks.symbol(system) + ("-open" if oracle else ""),
                "color": looks.colour(system), "line": {"width": 1, "color": "var(--ink)"},
            },
        })  # fmt: skip
    return data


def _hover(point: Point, x_unit: str, y_unit: str) -> str:
    named, x, y = point
    quality = named.row.metrics.get(QUALITY)
    told = "" if quality is None or quality.value is None else f"<br>{number(quality.value)} points"
    about = f"<b>{words(named.name)}</b> ({words(named.row.fidelity)})"
    return f"{about}<br>{number(x)} {x_unit}, {number(y)} {y_unit}{told}"


def _steps(points: Sequence[Point], dash: str) -> dict[str, Any]:
    """A front as steps: nothing stands above and to the left of it."""
    line = {"color": "var(--faint)", "width": 2, "dash": dash, "shape": "hv"}
    xs, ys = [x for _, x, _ in points], [y for _, _, y in points]
    quiet = {"hoverinfo": "skip", "showlegend": False}
    return {"type": "scatter", "mode": "lines", "name": "front", "x": xs, "y": ys, "line": line, **quiet}


def _without_budget(name: str) -> str:
    return " ".join(part for part in name.split(" ") if not part.startswith("budget="))


def _budget(text: str) -> tuple[float, str]:
    """The amount and what it is counted in; ``(0, "")`` where there is none."""
    try:
        return float(text), "share of the routed experts' bytes"
    except ValueError:
        try:
            return parse_bytes(text) / GIB, "GiB"
        except UsageError:
            return 0.0, ""


def _curve(label: str, line: Sequence[tuple[float, Named]], name: str, looks: Looks) -> dict[str, Any]:
    """One system's line through its budgets."""
    named = line[0][1]
    oracle, system = named.role == "oracle", named.row.system
    points = [(at, row.row.metrics[name].value) for at, row in line if name in row.row.metrics]
    found = sorted((at, value) for at, value in points if value is not None)
    return {
        "type": "scatter", "mode": "lines+markers", "name": words(label),
        "x": [at for at, _ in found], "y": [value for _, value in found],
        "line": {"color": looks.colour(system), "dash": "dash" if oracle else "solid", "width": 3 if oracle else 2},
        "marker": {"symbol": looks.symbol(system), "size": 8},
    }  # fmt: skip
