"""Step times of one row: percentiles, and the tail split by the experts that missed in the step. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

P99_MINIMUM = 100  # samples below which no 99th percentile is given


@dataclass(frozen=True)
class Bucket:
    """Steps with ``low`` to ``high`` misses: how many, and nearest-rank percentiles in ms; p99 needs 100 steps."""

    low: int
    high: int
    n: int
    p50: float
    p95: float
    p99: float | None

    @property
    def label(self) -> str:
        """``0``, ``1``, ``3-4``."""
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Tail:
    """All timed steps of a row, and the same split. ``slow`` are the steps at or above the 99th percentile,
    ``slow_missed`` those of them with a miss, ``given_miss`` the steps that missed at all; both None under 100 steps.
    """

    whole: Bucket
    buckets: tuple[Bucket, ...]
    given_miss: Bucket | None
    slow: int | None
    slow_missed: int | None


def tail(steps: Mapping[str, Sequence[Any]]) -> Tail | None:
    """The tail of ``details["steps"]``; None where a row has no timed steps."""
    ms, misses = list(map(float, steps.get("ms", ()))), list(map(int, steps.get("misses", ())))
    if not ms or len(ms) != len(misses):
        return None
    pairs = list(zip(misses, ms, strict=True))
    whole = _bucket(min(misses), max(misses), ms)
    buckets = []
    for low, high in _ranges(max(misses)):
        if found := [time for missed, time in pairs if low <= missed <= high]:
            buckets.append(_bucket(low, high, found))
    missed_ms = [time for missed, time in pairs if missed]
    slow = None if whole.p99 is None else [missed for missed, time in pairs if time >= whole.p99]
    return Tail(
        whole,
        tuple(buckets),
        _bucket(1, max(misses), missed_ms) if missed_ms else None,
        None if slow is None else len(slow),
        None if slow is None else sum(missed > 0 for missed in slow),
    )


def rank(values: Sequence[float], q: float) -> float:
    """The nearest-rank percentile: the smallest value that a share ``q`` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def _bucket(low: int, high: int, ms: Sequence[float]) -> Bucket:
    p99 = rank(ms, 0.99) if len(ms) >= P99_MINIMUM else None
    return Bucket(low, high, len(ms), rank(ms, 0.5), rank(ms, 0.95), p99)


def _ranges(most: int) -> list[tuple[int, int]]:
    """0, 1, 2, 3-4, 5-8, ...: each range twice as wide as the one before, up to ``most``."""
    found = [(0, 0), (1, 1), (2, 2)]
    while found[-1][1] < most:
        low = found[-1][1] + 1
        found.append((low, 2 * (low - 1)))
    return found
