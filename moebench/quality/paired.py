"""Paired deltas: the same items under two arms, in points, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Delta:
    """Mean difference in points (0 to 100), its 95 % bootstrap interval over items, and the number of items."""

    points: float
    ci: tuple[float, float]
    n: int


def paired_delta(system: Sequence[bool], reference: Sequence[bool], groups: Sequence[str], seed: int = 0) -> Delta:
    """Mean over groups (tasks) of the mean difference system - reference; items are resampled within their group."""
    if not len(system) == len(reference) == len(groups) > 0:
        raise ValueError("a paired delta needs the same items under both arms, at least one")
    difference = 100.0 * (np.asarray(system, float) - np.asarray(reference, float))
    rng = np.random.Generator(np.random.PCG64(seed))
    names = sorted(set(groups))
    means, samples = [], np.zeros(RESAMPLES)
    for name in names:
        part = difference[[g == name for g in groups]]
        means.append(part.mean())
        samples += part[rng.integers(0, len(part), (RESAMPLES, len(part)))].mean(1) / len(names)
    low, high = np.quantile(samples, [0.025, 0.975])
    return Delta(float(np.mean(means)), (float(low), float(high)), len(difference))


def exact_p(gained: int, lost: int) -> float:
    """Two-sided exact p of so many items gained and lost, each way equally likely under no effect (McNemar 1947 in its
    exact form, a sign test: https://doi.org/10.1007/BF02295996); 1 where nothing changed.
    """
    count = gained + lost
    tail = sum(math.comb(count, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**count)
