"""Exact tests on few samples: whether one set of numbers lies above another, and where a series steps.

Knows numbers; knows no metrics and no direction that is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

MINIMUM = 3  # samples on each side before anything is said


def rank_p(low: Sequence[float], high: Sequence[float]) -> float:
    """One-sided p that ``high`` lies above ``low`` so clearly by chance: the exact distribution of the U of Mann and
    Whitney (1947, https://doi.org/10.1214/aoms/1177730491). A tie counts against the difference.
    """
    n, m = len(low), len(high)
    u = sum(a >= b for a in low for b in high)  # pairs that contradict it
    counts = [1] + [0] * (n * m)  # arrangements of each U: the coefficients of a Gaussian binomial
    for i in range(1, m + 1):
        for at in range(n * m, n + i - 1, -1):
            counts[at] -= counts[at - n - i]
        for at in range(i, n * m + 1):
            counts[at] += counts[at - i]
    return sum(counts[: u + 1]) / math.comb(n + m, m)


def change(before: float, after: float) -> float:
    """Relative change; from zero it is infinite."""
    if before == after:
        return 0.0
    return (after - before) / abs(before) if before else math.copysign(math.inf, after)


@dataclass(frozen=True)
class Step:
    """A series has another level, the median, from point ``at`` on."""

    at: int
    before: float
    after: float


def changes(points: Sequence[float | None]) -> list[Step]:
    """Every point that differs from the one before it; None is a point without a value and differs from none."""
    known = [(at, value) for at, value in enumerate(points) if value is not None]
    return [Step(at, a, b) for (_, a), (at, b) in pairwise(known) if a != b]


def steps(points: Sequence[Sequence[float]], alpha: float, least: float, start: int = 0) -> list[Step]:
    """Steps of a noisy series of points, each one or several samples.

    The split whose two-sided rank test has the smallest p is a step if p times the number of splits is at most
    ``alpha`` (Bonferroni) and the medians differ by ``least`` (relative); then both halves are searched.
    """
    splits = []
    for at in range(1, len(points)):
        left, right = ([x for point in side for x in point] for side in (points[:at], points[at:]))
        if min(len(left), len(right)) >= MINIMUM:
            step = Step(start + at, median(left), median(right))
            p = 2 * min(rank_p(left, right), rank_p(right, left))
            splits.append((p, -abs(change(step.before, step.after)), step))
    if not splits:
        return []
    p, size, best = min(splits, key=lambda split: split[:2])
    if p * len(splits) > alpha or -size < least:
        return []
    cut = best.at - start
    return [*steps(points[:cut], alpha, least, start), best, *steps(points[cut:], alpha, least, best.at)]
