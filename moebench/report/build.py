"""A report from rows: one HTML page, the same tables as Markdown and CSV, and a trace for Perfetto. Writes no files.

The same rows give the same bytes: nothing here looks at a clock, a folder or the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moebench.hardware import HardwareProfile
from moebench.report import machines, tables
from moebench.report.chapter import chapter
from moebench.report.definitions import definitions, paragraphs, prose
from moebench.report.figure import Looks
from moebench.report.grid import Cell, Column, Grid
from moebench.report.groups import Group, groups
from moebench.report.page import Section, page
from moebench.report.perfetto import trace
from moebench.report.plain import to_csv, to_markdown
from moebench.result import Row

TITLE = "moebench report"


@dataclass(frozen=True)
class Sources:
    """What a report says beside the rows: each system's role, each row's command (by id), the machines' profiles, why a
    profile is missing, what was left out of the report, and what forecasts are off by on a machine.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    profiles: Mapping[str, HardwareProfile] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    forecasts: Mapping[str, str] = field(default_factory=dict)


def build(rows: Sequence[Row], sources: Sources) -> dict[str, str]:
    """File name to text: ``report.html``, ``report.md``, ``report.tables/*.csv``, ``report.timeline.json``."""
    found = groups(rows, sources.roles)
    looks = Looks([row.system for row in rows])
    sections: list[Section] = []
    taken: set[str] = set()
    for group in found:
        slug, off = _slug(f"{group.hw}-{group.model}", taken), sources.forecasts.get(group.hw, "")
        sections += chapter(group, slug, looks, sources.commands, off)
    sections += _common(found, sources)
    files = {
        "report.html": page(TITLE, _head(found), sections, any(section.figures for section in sections)),
        "report.md": _markdown(found, sections),
    }
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
            "omitted", "Left out", text="" if left else "Nothing: every file that was found is in the tables.",
            grids=(Grid("omitted", "Files and rows left out", (Column("what and why"),), left),) if left else (),
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
    """A name for anchors and files that no other group has; what belongs to it comes after a point."""
    base = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "group"
    slug, number = base, 2
    while slug in taken:
        slug, number = f"{base}-{number}", number + 1
    taken.add(slug)
    return slug


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
