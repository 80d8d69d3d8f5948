"""The chapter of one machine and model: its tables and figures in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from moebench.report import tables, times, trade
from moebench.report.figure import Figure, Looks
from moebench.report.grid import Grid, from_plain
from moebench.report.groups import Group, Named, one_budget
from moebench.report.page import Section
from moebench.report.summary import summary

LONG = 30  # rows of a table of scores above which it is folded
PERFETTO = "report.timeline.json beside this file holds the tokens of all rows and opens in Perfetto."
HOW_TO_SWEEP = "moebench run -m system=lru,slru,belady budget=0.05,0.1,0.25,0.5"
ONE_BUDGET = "The figures show each system at one budget, the one that most of them have."

Draw = Callable[[Sequence[Named], str], Sequence[Figure | None]]


def chapter(group: Group, slug: str, looks: Looks, commands: Mapping[str, str], forecast: str = "") -> list[Section]:
    """All sections of a group; ``slug`` begins the names of all that is in it, ``commands`` maps a row's id to its
    command, ``forecast`` says what modeled numbers of this machine are off by. What no row can fill is left out, but
    for the curves over budgets: there it says how to make some.
    """
    pictures = group.pictures
    swept = {name: one_budget(rows) for name, rows in pictures.items()}
    only = ONE_BUDGET if any(len(swept[name]) < len(rows) for name, rows in pictures.items()) else ""
    sections = [Section(slug, group.title, grids=(tables.results(group, slug, forecast),))]

    def part(
        name: str, title: str, text: str, grids: Sequence[Grid | None] = (), figures: Sequence[Figure] = ()
    ) -> None:
        told = tuple(grid for grid in grids if grid is not None)
        if told or figures or name == "budget":
            sections.append(Section(f"{slug}.{name}", title, 3, text, grids=told, figures=tuple(figures)))

    def each(of: Mapping[str, Sequence[Named]], draw: Draw) -> list[Figure]:
        """The figures of each workload, which their titles name where there are several."""
        found = []
        for at, (name, rows) in enumerate(of.items()):
            for figure in draw(rows, f"{slug}.{at}"):
                if figure is not None:
                    found.append(replace(figure, title=f"{figure.title}: {name}") if len(of) > 1 else figure)
        return found

    trades = each(pictures, lambda rows, at: [trade.pareto(rows, at, looks), trade.quality(rows, at, looks)])
    part("trade", "Speed, memory and quality", "", figures=trades)
    curves = each(pictures, lambda rows, at: trade.curves(rows, at, looks))
    how = "" if curves else f"No system ran at two budgets here. A sweep draws these curves: {HOW_TO_SWEEP}"
    part("budget", "Against the budget", how, figures=curves)
    split = each(swept, lambda rows, at: [times.split(rows, at)])
    part("time", "Where the time goes", only, [tables.split(group, f"{slug}.time-per-token")], split)
    steps = [tables.steps(group, f"{slug}.steps"), tables.by_misses(group, f"{slug}.misses")]
    tails = each(swept, lambda rows, at: [times.spread(rows, at), times.by_misses(rows, at, looks)])
    part("steps", "Latency and its tail", only, steps, tails)
    lines = each(swept, lambda rows, at: [times.timeline(named, f"{at}-{n}") for n, named in enumerate(rows)])
    part("timeline", "A few tokens on a timeline", PERFETTO, figures=lines)
    part("quality", "Quality", "", _scores(group, slug))
    part("again", "How to get each row again", "", [tables.commands(group, f"{slug}.commands", commands)])
    return sections


def _scores(group: Group, slug: str) -> list[Grid]:
    """The scores of each task, where a model answered."""
    scored = [named.row for named in group.rows if named.row.quality]
    grids = [from_plain(f"{slug}.quality-{at}", plain) for at, plain in enumerate(summary(scored))]
    return [replace(grid, folded=len(grid.rows) > LONG) for grid in grids]
