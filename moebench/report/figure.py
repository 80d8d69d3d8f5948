"""One figure as plain data for plotly, with a caption that says what to see. Knows no rows and no files.

Colours are names of the page's own variables, such as ``var(--c1)``: the page fills them in, for a light
or a dark screen. Words that come from a configuration, a model or a plugin go through ``words``, since plotly reads
tags in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebench.report.grid import escape

COLOURS = 10  # var(--c1) to var(--c10) of the page
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "pentagon", "triangle-down", "cross", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True)
class Figure:
    """``data`` and ``layout`` are plotly's; ``height`` is the drawing's own in pixels, the legend comes below it.

    ``alt`` says in one sentence what is drawn, ``caption`` what to see in it; ``folded``: shown when opened.
    """

    slug: str
    title: str
    caption: str
    alt: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    height: int = 380
    folded: bool = False

    @property
    def json(self) -> str:
        """What a script in the page reads; nothing in it ends the script."""
        legend = sum(bool(trace.get("showlegend", True)) for trace in self.data)
        legend = 0 if self.layout.get("showlegend") is False else legend
        plain = {"data": self.data, "layout": self.layout, "height": self.height, "legend": legend}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Looks:
    """A colour, a symbol and a dash for each system, the same ones in every figure of a report."""

    def __init__(self, systems: Sequence[str]) -> None:
        self._at = {name: number for number, name in enumerate(sorted(set(systems)))}

    def colour(self, system: str) -> str:
        """A variable of the page."""
        return f"var(--c{self._at[system] % COLOURS + 1})"

    def symbol(self, system: str) -> str:
        """Differs where colours come round again."""
        at = self._at[system]
        return SYMBOLS[(at + at // COLOURS * 3) % len(SYMBOLS)]

    def dash(self, system: str) -> str:
        """Neighbours in colour differ in it."""
        at = self._at[system]
        return DASHES[(at + at // COLOURS) % len(DASHES)]


def words(text: str) -> str:
    """A text in which plotly finds no tags."""
    return escape(text)


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    lines = {"gridcolor": "var(--line)", "zerolinecolor": "var(--faint)", "linecolor": "var(--faint)"}
    return {"title": {"text": title, "standoff": 8}, "automargin": True, "fixedrange": True, **lines, **more}


def layout(x: Mapping[str, Any], y: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A layout without a ground of its own, so that the page shows through; legends stand below."""
    return {
        "xaxis": dict(x),
        "yaxis": dict(y),
        "font": {"family": FONT, "size": 13, "color": "var(--ink)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 16, "t": 12, "b": 44},
        "hovermode": "closest",
        "showlegend": True,
        "hoverlabel": {"bgcolor": "var(--panel)", "bordercolor": "var(--faint)", "font": {"color": "var(--ink)"}},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "font": {"size": 12},
            "traceorder": "normal",
        },
        **more,
    }


def scale(values: Sequence[float]) -> str:
    """A logarithmic axis where positive values span more than a factor of 20, else a linear one."""
    return "log" if values and min(values) > 0 and max(values) / min(values) > 20 else "linear"


def bars(names: Sequence[str]) -> int:
    """The height of a figure with a line for each name."""
    return 70 + 26 * len(names)
