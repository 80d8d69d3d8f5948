"""A cell's results over time: in which commit a metric changed.

Rows of one cell are ordered by the time they were made; rows of one commit that follow each other are one point.
Modeled values step wherever two points differ; measured ones where an exact test says so, see ``evidence.steps``. Knows
no git.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from moebench.evidence import Step, changes, steps
from moebench.regress import PLACES, Rules, finished
from moebench.result import Metric, Row


@dataclass(frozen=True)
class Change:
    """One metric of one cell has another level from ``first`` on; ``last`` is the row before it."""

    metric: str
    last: Row
    first: Row
    before: float
    after: float

    @property
    def verdict(self) -> str:
        """``worse``, ``better`` or, where neither direction is, ``changed``."""
        higher = self.first.metrics[self.metric].higher_is_better
        return "changed" if higher is None else "better" if (self.after > self.before) == higher else "worse"


def find(rows: Sequence[Row], rules: Rules, metrics: Sequence[str] = ()) -> list[Change]:
    """All changes, cell by cell; failed rows are points without a value."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=finished):
        given = sorted((name, repr(value)) for name, value in row.options.items() if name not in PLACES)
        label = (row.hw, row.machine, row.system, row.model, row.workload_name, str(row.workload["hash"]))
        if row.status == "failed":
            continue
        cells.setdefault((*label, repr(given)), []).append(row)
    return [change for found in cells.values() for change in _of_cell(found, rules, metrics)]


def _of_cell(rows: Sequence[Row], rules: Rules, metrics: Sequence[str]) -> Iterator[Change]:
    points = [list(group) for _, group in groupby(rows, key=lambda row: row.environment.get("commit") or finished(row))]
    for name in metrics or dict.fromkeys(name for row in rows for name in row.metrics):
        found = _steps([[row.metrics[name] for row in point if name in row.metrics] for point in points], rules)
        for at, step in found:
            yield Change(name, points[at - 1][-1], points[at][0], step.before, step.after)


def _steps(points: Sequence[Sequence[Metric]], rules: Rules) -> list[tuple[int, Step]]:
    """Steps of one metric, each with the point that it begins at."""
    known = [at for at, point in enumerate(points) if any(number.value is not None for number in point)]
    kept = [[number for number in points[at] if number.value is not None] for at in known]
    if any(number.provenance == "modeled" for point in kept for number in point):
        found = changes([point[-1].value for point in kept])
    else:
        samples = [[x for number in point for x in number.samples or (number.value,)] for point in kept]
        found = steps(samples, rules.alpha, rules.least)  # type: ignore[arg-type]
    return [(known[step.at], step) for step in found]
