"""Which experts leave: by activation ratio and depth, by uses while cached, or by recency.

Knows keys and counts; knows no tiers and no bytes.
"""

from __future__ import annotations

import numpy as np

from moebench.systems.moe_infinity.matrices import Activity

EPSILON = 1e-8  # its code's
HALF_LIFE = 16  # passes, the half-life of moebench's decayed_lfu
# 40 bits, so that the last digit of a machine's power function cannot reach a victim
DECAY = round(0.5 ** (1 / HALF_LIFE) * 2**40) / 2**40
FEW = 8


class Replacement:
    """Scores keys; the lowest leaves first.

    ``activation``: (ratio + epsilon) * (1 - layer / L) of the running sequences (the paper): deep layers leave first,
    for there is more time to read them ahead. ``incache``: how often an expert was dispatched, loads included and never
    forgotten (its code). ``incache_decayed``: the same, halved every ``HALF_LIFE`` passes. ``lru``: the last use.
    """

    def __init__(self, law: str, activity: Activity) -> None:
        layers, experts = activity.layers, activity.experts
        self.law, self.activity, self.events = law, activity, 0
        self.shallow = np.repeat(1.0 - np.arange(layers) / layers, experts)
        self.used = np.zeros(layers * experts)

    def begin_step(self) -> None:
        """A pass starts."""
        if self.law == "incache_decayed":
            self.used *= DECAY

    def access(self, keys: np.ndarray) -> None:
        """A layer demands ``keys``."""
        self.events += 1
        if self.law == "lru":
            self.used[keys] = self.events
        else:
            self.used[keys] += 1

    def score(self, keys: np.ndarray) -> np.ndarray:
        """float64 per key."""
        if self.law == "activation":
            return (self.activity.ratio.ravel()[keys] + EPSILON) * self.shallow[keys]
        return self.used[keys]

    def worst(self, keys: np.ndarray, need: int, protected: np.ndarray) -> np.ndarray:
        """The ``need`` lowest of ``keys``, the protected ones (bool) after all others; ties go to the lowest key."""
        score, plain = self.score(keys), len(keys) - int(protected.sum())
        if need > min(FEW, plain):
            return keys[np.lexsort((keys, score, protected))[:need]]
        score = np.where(protected, np.inf, score)
        chosen = []
        for _ in range(need):  # repeated minima beat a sort
            ties = np.flatnonzero(score == score.min())
            chosen.append(at := int(ties[keys[ties].argmin()]))
            score[at] = np.inf
        return keys[chosen]
