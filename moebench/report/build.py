"""A report from rows: one HTML page, the same tables as Markdown and CSV, and a trace for Perfetto. Writes no files.

The same rows give the same bytes: nothing here looks at a clock, a folder or the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moebench.hardware import HardwareProfile
from moebench.report import machines, tables, times, trade
from moebench.report.definitions import definitions, paragraphs, prose
from moebench.report.figure import Figure, Looks
from moebench.report.grid import Cell, Column, Grid, from_plain
from moebench.report.groups import Group, groups, one_budget
from moebench.report.page import Section, page
from moebench.report.perfetto import trace
from moebench.report.plain import to_csv, to_markdown
from moebench.report.summary import summary
from moebench.result import Row

TITLE = "moebench report"
LONG = 30  # rows of a table of scores above which it is folded
PERFETTO = "report.timeline.json beside this file holds the tokens of all rows and opens in Perfetto."
HOW_TO_SWEEP = "moebench run -m system=lru,slru,belady budget=0.05,0.1,0.25,0.5"


@dataclass(frozen=True)
class Sources:
    """What a report says beside the rows: each system's role, each row's command (by id), the machines' profiles, why a
    profile is missing, and what was left out of the report.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    profiles: Mapping[str, HardwareProfile] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()


def build(rows: Sequence[Row], sources: Sources) -> dict[str, str]:
    """File name to text: ``report.html``, ``report.md``, ``report.tables/*.csv``, ``report.timeline.json``."""
    found = groups(rows, sources.roles)
    looks = Looks([row.system for row in rows])
    sections: list[Section] = []
    taken: set[str] = set()
    for group in found:
        sections += _group(group, _slug(f"{group.hw}-{group.model}", taken), looks, sources)
    sections += _common(found, sources)
    files = {"report.html": page(TITLE, _head(found), sections), "report.md": _markdown(found, sections)}
    for section in sections:
        files |= {f"report.tables/{grid.slug}.csv": to_csv(grid.sheet) for grid in section.grids}
    return files | {"report.timeline.json": trace(found)}


def _head(found: Sequence[Group]) -> list[str]:
    """What is in the report, and what failed."""
    rows = [named.row for group in found for named in group.rows]
    ran = [row for row in rows if row.workload["kind"] != "published"]
    failed = [row for row in ran if row.status == "failed"]
    lines = [
        f"{_count(len(ran), 'row')} of {_count(len({row.system for row in ran}), 'system')} on "
        f"{', '.join(dict.fromkeys(group.hw for group in found))}"
        + (
            f"; {_count(len(rows) - len(ran), 'row')} of published figures beside them."
            if len(rows) > len(ran)
            else "."
        ),
        "Marks: m measured on the machine named, ~ modeled from its profile by arithmetic, † published by others, "
        "- no value, and the note says why. Nothing is averaged over rows.",
    ]
    if failed:
        lines.append(f"{_count(len(failed), 'row')} failed: in the tables as failed, with the error.")
    return lines


def _group(group: Group, slug: str, looks: Looks, sources: Sources) -> list[Section]:
    """The chapter of one machine and model."""
    sections = [Section(slug, group.title, grids=(tables.results(group, slug),))]

    def part(name: str, title: str, text: str, grids: Sequence[Grid | None], figures: Sequence[Figure | None]) -> None:
        shown = tuple(filter(None, grids)), tuple(filter(None, figures))
        sections.append(Section(f"{slug}-{name}", title, 3, text, grids=shown[0], figures=shown[1]))

    each = [(f"{slug}-{at}" if at else slug, rows) for at, rows in enumerate(group.pictures.values())]
    several = len(each) > 1
    notes = " Each workload has a picture of its own, in the order of the table." if several else ""
    pictures = [trade.pareto(rows, at, looks) for at, rows in each] + [
        trade.quality(rows, at, looks) for at, rows in each
    ]
    if any(pictures):
        part("trade", "Speed, memory and quality", notes, (), pictures)
    curves = [figure for at, rows in each for figure in trade.curves(rows, at, looks)]
    how = "" if curves else f"No system ran at two budgets here. A sweep draws these curves: {HOW_TO_SWEEP}"
    part("budget", "Against the budget", how, (), curves)
    swept = {at: one_budget(rows) for at, rows in each}
    fewer = any(len(rows) > len(swept[at]) for at, rows in each)
    only = "The figures show each system at one budget, the one that most of them have." if fewer else ""
    split = [times.split(rows, at) for at, rows in swept.items()]
    if any(split):
        part("time", "Where the time goes", only, [tables.split(group, f"{slug}-time-per-token")], split)
    spread = [times.spread(rows, at) for at, rows in swept.items()]
    if any(spread):
        grids = [tables.steps(group, f"{slug}-steps"), tables.by_misses(group, f"{slug}-misses")]
        misses = [times.by_misses(rows, at, looks) for at, rows in swept.items()]
        part("steps", "Latency and its tail", only, grids, [*spread, *misses])
    lines = [times.timeline(named, f"{at}-{n}") for at, rows in swept.items() for n, named in enumerate(rows)]
    if any(lines):
        part("timeline", "A few tokens on a timeline", PERFETTO, (), lines)
    scored = [named.row for named in group.rows if named.row.quality]
    if scored:
        scores = [
            replace(from_plain(f"{slug}-quality-{at}", plain), folded=len(plain.rows) > LONG)
            for at, plain in enumerate(summary(scored))
        ]
        part("quality", "Quality", "", scores, ())
    part("again", "How to get each row again", "", [tables.commands(group, f"{slug}-commands", sources.commands)], ())
    return sections


def _common(found: Sequence[Group], sources: Sources) -> list[Section]:
    """The chapters that hold for all rows."""
    inputs = tuple(filter(None, [tables.assumptions(found, "assumptions")]))
    made = tuple(filter(None, [tables.environments(found, "environments")]))
    missing = " ".join(f"{name}: {why}." for name, why in sources.unknown.items())
    left = tuple((Cell(line),) for line in sources.left_out)
    return [
        Section("assumptions", "Assumed and transferred inputs", text="" if inputs else "None.", grids=inputs),
        Section("hardware", "Hardware profiles", text=missing, grids=tuple(machines.profile_tables(sources.profiles))),
        Section("environments", "Made with", grids=made),
        Section("definitions", "Definitions", grids=(definitions("definitions"),)),
        Section("rules", "What holds for all of them", 3, html="\n".join(paragraphs()), markdown=prose()),
        Section(
            "left-out", "Left out", text="" if left else "Nothing: every file that was found is in the tables.",
            grids=(Grid("left-out", "Files and rows left out", (Column("what and why"),), left),) if left else (),
        ),
    ]  # fmt: skip


def _markdown(found: Sequence[Group], sections: Sequence[Section]) -> str:
    parts = [f"# {TITLE}", *map(_line, _head(found))]
    for section in sections:
        if section.grids or section.text or section.markdown:
            parts.append(f"{'#' * section.level} {_line(section.title)}")
            parts += [text for text in (_line(section.text), section.markdown) if text]
            parts += [to_markdown([grid.page]).rstrip("\n") for grid in section.grids]
    return "\n\n".join(parts) + "\n"


def _line(text: str) -> str:
    """A text that is one line of words in Markdown."""
    return re.sub(r"([\\`*_<>\[\]#|])", r"\\\1", " ".join(text.split()))


def _slug(text: str, taken: set[str]) -> str:
    """A name for anchors and files that no other group has."""
    base = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "group"
    slug, number = base, 2
    while slug in taken:
        slug, number = f"{base}-{number}", number + 1
    taken.add(slug)
    return slug


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
