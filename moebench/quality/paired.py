"""Paired deltas: the same items under two arms, in points, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
Scores = Sequence[float] | np.ndarray  # of items, in one order for all arms


@dataclass(frozen=True)
class Delta:
    """Mean difference in points (0 to 100), its 95 % bootstrap interval over items, and the number of items."""

    points: float
    ci: tuple[float, float]
    n: int


def paired_delta(system: Scores, reference: Scores, groups: Sequence[str], seed: int = 0) -> Delta:
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


@dataclass(frozen=True)
class Share:
    """A share of a loss, 1 for all of it, with its 95 % bootstrap interval over items; None with the ``reason``."""

    value: float | None
    ci: tuple[float, float] | None
    reason: str = ""


def paid_back(repaired: Scores, lossy: Scores, reference: Scores, groups: Sequence[str], seed: int = 0) -> Share:
    """(repaired - lossy) / (reference - lossy), each the mean over groups of mean scores on the same items.

    Items are resampled within their group, for all three arms alike. A resample without a loss has no share: the
    interval is None where those are more than it leaves out on one side (2.5 %).
    """
    arms = np.asarray([repaired, lossy, reference], float)
    if not arms.shape[1] == len(groups) > 0:
        raise ValueError("a share needs the same items under all three arms, at least one")
    rng = np.random.Generator(np.random.PCG64(seed))
    mean, samples = np.zeros(3), np.zeros((3, RESAMPLES))
    for name in sorted(set(groups)):
        part = arms[:, [g == name for g in groups]]
        mean += part.mean(1)
        samples += part[:, rng.integers(0, part.shape[1], (RESAMPLES, part.shape[1]))].mean(2)
    if mean[2] <= mean[1]:
        return Share(None, None, "no loss to pay back")
    value = float((mean[0] - mean[1]) / (mean[2] - mean[1]))
    loss = samples[2] - samples[1]
    if (loss <= 0).mean() > 0.025:
        return Share(value, None, "the loss is within noise: no interval")
    back = samples[0] - samples[1]
    low, high = np.quantile(back[loss > 0] / loss[loss > 0], [0.025, 0.975])
    return Share(value, (float(low), float(high)))
