"""Repeated measurements of one quantity, and how they are taken. Knows no quantity."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from moebench.spread import Spread

TENTHS = 10  # samples from which percentiles are told


@dataclass(frozen=True)
class Samples:
    """What was measured, one number for each repeat."""

    values: tuple[float, ...]

    def __add__(self, more: Self) -> Self:
        """Both together."""
        return type(self)(self.values + more.values)

    @property
    def median(self) -> float:
        """The sample in the middle."""
        return statistics.median(self.values)

    @property
    def value(self) -> float:
        """What to report of them."""
        return self.median

    @property
    def spread(self) -> Spread[float]:
        """10th to 90th percentile; of fewer than ten samples the lowest to the highest."""
        ordered = sorted(self.values)
        beyond = len(ordered) // TENTHS
        return Spread(ordered[beyond], ordered[-1 - beyond], len(ordered))


class Alternating(Samples):
    """Of what is fast and slow by turns, as a processor that is shared with others: a run gets the mean of it."""

    @property
    def value(self) -> float:
        """The mean."""
        return statistics.fmean(self.values)


def repeated(work: Callable[[], float], seconds: float, least: int = 3) -> Samples:
    """Samples that ``work`` returns, for ``seconds`` and ``least`` times."""
    values: list[float] = []
    until = time.perf_counter() + seconds
    while len(values) < least or time.perf_counter() < until:
        values.append(work())
    return Samples(tuple(values))


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def rates(work: Callable[[], object], amount: float, seconds: float) -> Samples:
    """``amount`` a second, over ``seconds`` of repeats; the first, in which caches and kernels warm up, is left out."""
    work()
    return repeated(lambda: amount / timed(work), seconds)


def times(work: Callable[[], object], count: int, seconds: float) -> Samples:
    """Microseconds of one of the ``count`` things that ``work`` does; its first turn is left out."""
    work()
    return repeated(lambda: timed(work) / count * 1e6, seconds, least=1)
