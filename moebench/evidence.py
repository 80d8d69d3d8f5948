"""Exact tests on few samples: whether one set of numbers lies above another, and where a series steps.

Knows numbers; knows no metrics and no direction that is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

MINIMUM = 3  # samples on each side before anything is said
EXACT = 20


def rank_p(low: Sequence[float], high: Sequence[float]) -> float:
    """One-sided p that ``high`` lies above ``low`` so clearly by chance: the distribution of the U of Mann and Whitney
    (1947, https://doi.org/10.1214/aoms/1177730491), exact unless both have more than ``EXACT`` values, then normal. A
    tie counts against the difference.
    """
    m, n = sorted((len(low), len(high)))
    u = sum(a >= b for a in low for b in high)  # pairs that contradict it
    if m > EXACT:
        return math.erfc((n * m / 2 - u - 0.5) / math.sqrt(n * m * (n + m + 1) / 6)) / 2
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


def steps(points: Sequence[Sequence[float]], alpha: float, least: float) -> list[Step]:
    """Steps of a noisy series of points, each one or several samples.

    Both sides of every split of the series, and of its halves, quarters and so on, each moved by half its length, are
    compared by a two-sided rank test. Of the splits whose p times their number is at most ``alpha`` (Bonferroni) and
    whose medians differ by ``least`` (relative) the one of the smallest p is a step; then the series before it and that
    after it are searched. Short pieces find a level that comes and goes (Kovacs and others, 2023,
    https://doi.org/10.1093/biomet/asac052).
    """
    splits = []
    for first, end in _pieces(len(points)):
        for at in range(first + 1, end):
            left, right = ([x for point in points[a:b] for x in point] for a, b in ((first, at), (at, end)))
            if min(len(left), len(right)) >= MINIMUM:
                p = 2 * min(rank_p(left, right), rank_p(right, left))
                splits.append((p, -abs(change(median(left), median(right))), at))
    sure = [(p, size, at) for p, size, at in splits if p * len(splits) <= alpha and -size >= least]
    if not sure:
        return []
    at = min(sure)[2]
    before, after = steps(points[:at], alpha, least), steps(points[at:], alpha, least)
    return [*before, Step(at, *_levels(points, at, before, after)), *(replace(s, at=s.at + at) for s in after)]


def _pieces(count: int) -> list[tuple[int, int]]:
    """(first, end) of the whole and of its halves, quarters, ..., moved by half their length."""
    found, size = [(0, count)], count // 2
    while size >= 2:
        found += [(first, first + size) for first in range(0, count - size + 1, size // 2)]
        size //= 2
    return found


def _levels(
    points: Sequence[Sequence[float]], at: int, before: Sequence[Step], after: Sequence[Step]
) -> tuple[float, float]:
    """Medians on both sides of ``at``, as far as the level holds."""
    first, end = before[-1].at if before else 0, at + after[0].at if after else len(points)
    return median(x for point in points[first:at] for x in point), median(x for point in points[at:end] for x in point)
