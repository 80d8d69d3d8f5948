"""Cells that were both measured and modeled: how far apart their numbers lie, and the bars that this is held to.

Definitions stand in ``docs/forecast.md``. Knows numbers; runs nothing and knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

TIMES = ("decode_tok_s", "stall_ms_per_token", "ttft_s")  # what a forecast of time is about
TRAFFIC = ("hit_rate", "ssd_mib_per_token", "reads_per_token")
HELD = ("decode_tok_s", "stall_ms_per_token")  # times that have bars
MEDIAN_BAR, MOST_BAR, MOST = 0.10, 0.25, 0.95
HIT_POINTS, BYTES_SHARE = 2.0, 0.05  # where what is read depends on when reads end
SAME = 1e-9  # relative difference of floats that count the same thing
STALL_FLOOR = 0.05  # of a token's time: a stall below it is judged as part of that time


@dataclass(frozen=True)
class Compared:
    """One cell: ``measured`` values by metric, one per repeat, and ``modeled`` ones. ``error`` is what went wrong on
    either side; ``parts`` the milliseconds per token of both, by what they went to.
    """

    workload: str
    system: str
    budget: str
    timing_dependent: bool
    measured: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    modeled: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    page_cache: str = ""
    error: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.workload} {self.system} {self.budget}"

    def value(self, metric: str) -> float | None:
        """The measured value: the median over repeats."""
        found = self.measured.get(metric)
        return median(found) if found else None

    def ratio(self, metric: str) -> float | None:
        """Modeled over measured; None where either is missing or nothing was measured of it."""
        value = self.value(metric)
        return self.modeled[metric] / value if value and metric in self.modeled else None

    def scale(self, metric: str) -> float | None:
        """What differences of a metric are divided by: the measured value, of a stall at least 5 % of a token's time,
        since the share of nothing is no error of a forecast.
        """
        value = self.value(metric)
        if metric == "stall_ms_per_token" and value is not None and (rate := self.value("decode_tok_s")):
            return max(value, STALL_FLOOR * 1e3 / rate)
        return value or None

    def deviation(self, metric: str) -> float | None:
        """(modeled - measured) / scale."""
        scale, value = self.scale(metric), self.value(metric)
        if scale is None or value is None or metric not in self.modeled:
            return None
        return (self.modeled[metric] - value) / scale

    def noise(self, metric: str) -> float | None:
        """(highest - lowest repeat) / scale; None for a single repeat."""
        found, scale = self.measured.get(metric, ()), self.scale(metric)
        return (max(found) - min(found)) / scale if len(found) > 1 and scale else None


@dataclass(frozen=True)
class Bar:
    """One thing that forecasts are held to: ``value`` may be ``limit`` at most (``least``: at least)."""

    name: str
    value: float
    limit: float
    n: int
    least: bool = False
    misses: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        """Whether it holds."""
        return self.value >= self.limit if self.least else self.value <= self.limit


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile: the smallest value that ``share`` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def deviations(cells: Iterable[Compared], metric: str) -> list[tuple[str, float]]:
    """Names of cells and their deviations of a metric, where both sides have it."""
    found = [(cell.name, cell.deviation(metric)) for cell in cells]
    return [(name, value) for name, value in found if value is not None]


def bars(cells: Sequence[Compared]) -> list[Bar]:
    """All bars over the cells that ran on both sides, and one that none ran on one side only."""
    ran = [cell for cell in cells if not cell.error]
    made = []
    for metric in HELD:
        found = deviations(ran, metric)
        if found:
            sizes = [abs(value) for _, value in found]
            far = tuple(f"{name} {value:+.0%}" for name, value in found if abs(value) > MOST_BAR)
            made.append(Bar(f"{metric}: median error", median(sizes), MEDIAN_BAR, len(found)))
            share = 1 - len(far) / len(found)
            made.append(Bar(f"{metric}: cells within {MOST_BAR:.0%}", share, MOST, len(found), True, far))
    pairs = ranked(ran)
    if pairs:
        wrong = tuple(name for name, right in pairs if not right)
        made.append(Bar("systems ranked right", 1 - len(wrong) / len(pairs), 1.0, len(pairs), True, wrong))
    for exact in (True, False):
        held = [cell for cell in ran if cell.timing_dependent is not exact]
        wrong = tuple(f"{cell.name} {what}" for cell in held for what in apart(cell))
        kind = "equal where no clock decides" if exact else "near where the clock decides"
        if held:
            bad = len({cell.name for cell in held if apart(cell)})
            made.append(Bar(f"hits and bytes {kind}", 1 - bad / len(held), 1.0, len(held), True, wrong))
    failed = tuple(f"{cell.name}: {cell.error}" for cell in cells if cell.error)
    made.append(Bar("cells that failed on one side", len(failed), 0, len(cells), False, failed))
    return made


def ranked(cells: Sequence[Compared]) -> list[tuple[str, bool]]:
    """Pairs of systems on one workload and budget whose measured speeds differ by more than their noise, that is whose
    repeats do not overlap, and whether the forecast puts the same one ahead.
    """
    found = []
    metric = "decode_tok_s"
    for one, other in combinations(cells, 2):
        if (one.workload, one.budget) != (other.workload, other.budget):
            continue
        a, b = one.measured.get(metric), other.measured.get(metric)
        if not a or not b or min(len(a), len(b)) < 2 or not (min(a) > max(b) or min(b) > max(a)):
            continue
        if metric in one.modeled and metric in other.modeled:
            ahead = (min(a) > max(b)) == (one.modeled[metric] > other.modeled[metric])
            found.append((f"{one.workload} {one.budget}: {one.system}, {other.system}", ahead))
    return found


def apart(cell: Compared) -> list[str]:
    """What lies too far apart of a cell's hits and bytes: equal, or near where they depend on when reads end."""
    said = []
    for metric in TRAFFIC:
        value, modeled = cell.value(metric), cell.modeled.get(metric)
        if value is None or modeled is None:
            continue
        if not cell.timing_dependent:
            wrong = any(not math.isclose(modeled, one, rel_tol=SAME) for one in cell.measured[metric])
        elif metric == "hit_rate":
            wrong = 100 * abs(modeled - value) > HIT_POINTS
        elif metric == "ssd_mib_per_token":
            wrong = abs(modeled - value) > BYTES_SHARE * value
        else:
            continue
        if wrong:
            said.append(f"{metric} {value:.4g} measured, {modeled:.4g} modeled")
    return said


def plain(cell: Compared) -> dict[str, Any]:
    """A cell as the document of a validation has it."""
    return {
        "workload": cell.workload, "system": cell.system, "budget": cell.budget,
        "timing_dependent": cell.timing_dependent, "page_cache": cell.page_cache, "error": cell.error,
        "measured": {name: list(values) for name, values in cell.measured.items()}, "modeled": dict(cell.modeled),
        "parts_ms_per_token": {side: dict(parts) for side, parts in cell.parts.items()},
    }  # fmt: skip
