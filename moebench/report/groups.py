"""Rows sorted for a report: one group per machine and model, the newest row of each cell, a name for each row.

Knows rows and what a registry says of systems; knows no metric's meaning and draws nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebench.result import Row

# What a row is to its table, in the order in which the table shows them.
ROLES = ("floor", "baseline", "system", "oracle", "ceiling")
PUBLISHED = "published"


@dataclass(frozen=True)
class Named:
    """A row with a name that no other of its group and workload has, and what it is to the table."""

    name: str
    role: str
    row: Row
    workload: str

    @property
    def published(self) -> bool:
        """Whether others took these figures: nothing here was run."""
        return self.row.workload["kind"] == PUBLISHED

    @property
    def drawn(self) -> bool:
        """Whether it may stand in a picture: it ran here, and did not fail."""
        return self.row.status == "ok" and not self.published


@dataclass(frozen=True)
class Group:
    """The rows of one machine and one model, in the order of the table."""

    hw: str
    model: str
    rows: tuple[Named, ...]

    @property
    def title(self) -> str:
        """Model and machine."""
        return f"{self.model} on {self.hw}"

    @property
    def pictures(self) -> dict[str, list[Named]]:
        """Rows that may stand in one picture, by workload."""
        found: dict[str, list[Named]] = {}
        for named in self.rows:
            if named.drawn:
                found.setdefault(named.workload, []).append(named)
        return found


def one_budget(rows: Sequence[Named]) -> list[Named]:
    """Of a sweep over budgets the rows at the budget that most systems have; all rows of a system that lacks it."""
    systems: dict[str, set[str]] = {}
    for named in rows:
        systems.setdefault(str(named.row.config.get("budget")), set()).add(named.row.system)
    common = max(systems, key=lambda budget: (len(systems[budget]), budget), default="")
    have = systems.get(common, set())
    return [named for named in rows if named.row.system not in have or str(named.row.config.get("budget")) == common]


def newest(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The last row of each cell, and a line for each older one that was left out.

    A cell is a system with all its options on one machine, model and workload; its last row is the one that finished
    last. The same row run twice is one row.
    """
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cell = (row.hw, row.system, row.model, row.workload_name, row.config)
        same = cells.setdefault(json.dumps(cell, sort_keys=True, default=str), {})
        same[row.id] = max(row, same.get(row.id, row), key=_age)
    kept, left = [], []
    for found in cells.values():
        *older, last = sorted(found.values(), key=_age)
        kept.append(last)
        left += [
            f"{row.folder}/{row.id}: an older {'failed ' * (row.status == 'failed')}run of a cell that {last.id} shows"
            for row in older
        ]
    return kept, left


def _age(row: Row) -> tuple[str, str, str]:
    return str(row.volatile.get("finished", "")), row.id, json.dumps(dict(row.volatile), sort_keys=True, default=str)


def groups(rows: Sequence[Row], roles: Mapping[str, str]) -> list[Group]:
    """Rows by machine and model. ``roles`` maps a system to one of ``ROLES``; others are systems."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: _order(row, roles)):
        found.setdefault((row.hw, row.model), []).append(row)
    return [Group(hw, model, tuple(_named(part, roles))) for (hw, model), part in sorted(found.items())]


def _order(row: Row, roles: Mapping[str, str]) -> tuple[Any, ...]:
    role = roles.get(row.system, "system")
    published = row.workload["kind"] == PUBLISHED
    settings = json.dumps(row.config, sort_keys=True, default=str)
    return ROLES.index(role), row.system, published, row.workload_name, _amount(row.config.get("budget")), settings


def _amount(budget: Any) -> tuple[int, float, str]:
    """Budgets in the order of their numbers, fractions first."""
    text = str(budget)
    number = "".join(c for c in text if c.isdigit() or c == ".")
    try:
        return int(text != number), float(number), text
    except ValueError:
        return 2, 0.0, text


def _named(rows: Sequence[Row], roles: Mapping[str, str]) -> list[Named]:
    """Each row's name: its system's, with the options that tell rows of one system and workload apart."""
    workloads = _workloads(rows)
    of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row.config:
            of.setdefault((row.system, workloads[row.id]), []).append(row.options)
    named: list[Named] = []
    taken: set[tuple[str, str]] = set()
    for row in rows:
        mine, workload = row.options, workloads[row.id]
        others = of.get((row.system, workload), [])
        differ = [key for key in mine if len({str(config.get(key)) for config in others}) > 1]
        name = " ".join([row.system, *(f"{_short(key)}={mine[key]}" for key in differ)])
        if row.workload["kind"] == PUBLISHED:
            name = f"{row.system} (published)"
        while (name, workload) in taken:
            name += "'"
        taken.add((name, workload))
        named.append(Named(name, roles.get(row.system, "system"), row, workload))
    return named


def _short(key: str) -> str:
    return key.removeprefix("system.").removeprefix("workload.")


def _workloads(rows: Sequence[Row]) -> dict[str, str]:
    """Each row's workload by name, with the start of its hash where one name stands for several."""
    hashes: dict[str, set[str]] = {}
    for row in rows:
        hashes.setdefault(row.workload_name, set()).add(str(row.workload["hash"]))
    several = {name for name, found in hashes.items() if len(found - {""}) > 1}
    return {
        row.id: row.workload_name + (f" {str(row.workload['hash'])[:6]}" if row.workload_name in several else "")
        for row in rows
    }
