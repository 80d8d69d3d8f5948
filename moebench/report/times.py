"""Figures of time: the parts of a token, the spread of steps, the tail by misses, a few tokens on a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moebench.report.figure import Figure, Looks, axis, bars, layout, scale, words
from moebench.report.groups import Named
from moebench.report.table import number
from moebench.report.tables import PARTS
from moebench.report.tail import Tail, tail

PATTERNS = ("", "/", "x", ".", "-", "+", "|", "\\")  # so that parts are told apart without colour
PATTERN = {"fillmode": "overlay", "fgcolor": "var(--panel)", "size": 6}
PERCENTILES = (("p50", "circle"), ("p95", "diamond"), ("p99", "x"))


def split(rows: Sequence[Named], slug: str) -> Figure | None:
    """Stacked bars of the time of an emitted token."""
    found = [named for named in rows if named.row.details.get("split_ms_per_token")]
    if not found:
        return None
    names = [words(named.name) for named in found]
    data = [
        {
            "type": "bar", "orientation": "h", "name": part, "y": names,
            "x": [float(named.row.details["split_ms_per_token"].get(part, 0)) for named in found],
            "marker": {"color": f"var(--c{at + 1})", "pattern": {**PATTERN, "shape": PATTERNS[at]}},
            "hovertemplate": f"{part}: %{{x:.3g}} ms<extra></extra>",
        }
        for at, part in enumerate(PARTS)
    ]  # fmt: skip
    caption = (
        "One bar is the mean time of an emitted token. A long compute bar is bound by the model itself, a long stall "
        "bar by storage; what overhead grows to is the price of moving experts at all."
    )
    shape = layout(axis("ms per token"), _names(), barmode="stack", bargap=0.3)
    alt = "Stacked bars of compute, stall, copy, decode and overhead per token, one bar for each row."
    return Figure(f"{slug}-split", "Where the time of a token goes", caption, alt, data, shape, bars(names))


def spread(rows: Sequence[Named], slug: str) -> Figure | None:
    """Median, 95th and 99th percentile of the step times."""
    found = _tails(rows)
    if not found:
        return None
    data: list[dict[str, Any]] = []
    for name, symbol in PERCENTILES:
        points = [(named, getattr(told.whole, name)) for named, told in found]
        points = [(named, value) for named, value in points if value is not None]
        if points:
            data.append({
                "type": "scatter", "mode": "markers", "name": name, "x": [value for _, value in points],
                "y": [words(named.name) for named, _ in points],
                "marker": {"symbol": symbol, "size": 10, "color": f"var(--c{len(data) + 1})"},
                "hovertemplate": f"{name}: %{{x:.4g}} ms<extra></extra>",
            })  # fmt: skip
    values = [value for trace in data for value in trace["x"]]
    caption = (
        "The further the marks of a row lie apart, the less even its tokens come. A row without a cross has fewer than "
        "100 timed steps, too few for a 99th percentile."
    )
    alt = "Percentiles of the step time in ms, one line of marks for each row."
    shape = layout(axis("ms per step", type=scale(values)), _names())
    return Figure(f"{slug}-spread", "How even the steps are", caption, alt, data, shape, bars(found))  # type: ignore[arg-type]


def by_misses(rows: Sequence[Named], slug: str, looks: Looks) -> Figure | None:
    """The 95th percentile of steps against the experts that missed in them."""
    found = [(named, told) for named, told in _tails(rows) if len(told.buckets) > 1]
    if not found:
        return None
    order = sorted({(bucket.low, bucket.label) for _, told in found for bucket in told.buckets})
    data = []
    for named, told in found:
        whole, buckets = told.whole.n, told.buckets
        text = [
            f"<b>{words(named.name)}</b><br>{b.label} missed: {b.n} of {whole} steps<br>"
            f"p50 {number(b.p50)} ms, p95 {number(b.p95)} ms" + ("" if b.p99 is None else f", p99 {number(b.p99)} ms")
            for b in buckets
        ]
        colour = looks.colour(named.row.system)
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": words(named.name),
            "x": [b.label for b in buckets], "y": [b.p95 for b in buckets],
            "hovertext": text, "hoverinfo": "text", "line": {"color": colour, "dash": looks.dash(named.row.system)},
            "marker": {"symbol": looks.symbol(named.row.system), "size": [7 + 9 * b.n / whole for b in buckets]},
        })  # fmt: skip
    caption = (
        "Each mark is the 95th percentile of the steps with so many misses; the larger, the more of the steps. "
        "A line that climbs says that the tail is made of misses; a flat one, that it comes from elsewhere."
    )
    alt = "Lines of the 95th percentile of step time over the number of missed experts, one for each row."
    x = axis(
        "experts missed in the step",
        type="category",
        categoryorder="array",
        categoryarray=[label for _, label in order],
    )
    values = [bucket.p95 for _, told in found for bucket in told.buckets]
    shape = layout(x, axis("p95, ms per step", type=scale(values)))
    return Figure(f"{slug}-misses", "The tail by misses", caption, alt, data, shape, 360)


def timeline(named: Named, slug: str) -> Figure | None:
    """A few tokens of one row: what each lane did when."""
    drawn = named.row.details.get("timeline")
    if not drawn or not drawn.get("events"):
        return None
    lanes = [str(lane) for lane in drawn["lanes"]]
    data = []
    for at, lane in enumerate(lanes):
        events = [event for event in drawn["events"] if event[0] == at]
        if not events:
            continue
        colour = f"var(--c{at + 1})"
        text = [
            f"{words(str(label))}<br>{number(start / 1e3)} ms, for {number(length / 1e3)} ms"
            for _, label, start, length in events
        ]
        data.append({
            "type": "bar", "orientation": "h", "name": words(lane), "y": [words(lane)] * len(events),
            "base": [event[2] / 1e3 for event in events], "x": [event[3] / 1e3 for event in events],
            "hovertext": text, "hoverinfo": "text", "showlegend": False,
            "marker": {"color": colour, "opacity": 0.75, "line": {"width": 0.5, "color": colour}},
        })  # fmt: skip
    edges = [start / 1e3 for start, _ in drawn["steps"]] + [sum(drawn["steps"][-1]) / 1e3] * bool(drawn["steps"])
    line = {"color": "var(--faint)", "dash": "dot"}
    shapes = [
        {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line} for at in edges
    ]  # fmt: skip
    present = [str(trace["name"]) for trace in data]
    y = axis("", type="category", categoryorder="array", categoryarray=present[::-1])
    shape = layout(axis("ms"), y, barmode="overlay", bargap=0.25, shapes=shapes, showlegend=False)
    tokens = len(drawn["steps"])
    caption = (
        f"{tokens} decode steps of {named.name}, between the dotted lines. Where compute stands still while storage "
        "works, the loop waits for experts; where both work, reads are hidden."
    )
    alt = f"Gantt chart of {tokens} decode steps: lanes {', '.join(present)}."
    return Figure(f"{slug}-timeline", f"Timeline: {named.name}", caption, alt, data, shape, 90 + 34 * len(data), True)


def _names() -> dict[str, Any]:
    """An axis of names, the first on top."""
    return axis("", autorange="reversed", type="category")


def _tails(rows: Sequence[Named]) -> list[tuple[Named, Tail]]:
    found = [(named, tail(named.row.details.get("steps", {}))) for named in rows]
    return [(named, told) for named, told in found if told is not None]
