"""Where the active experts of a layer run: a split between device and host, given or found by trying.

Counts experts; never looks at where they reside (arXiv 2609.18110, section 4.3: residency is not placement).
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6  # times each split is tried
HOLD = 1024  # tokens for which the best one then stays


class Placement:
    """``count`` experts of each layer run on the host. ``choice`` is ``device``, ``auto`` or a number.

    ``auto`` takes the splits 0 to ``most`` in turn, one a token, so that all are tried at the same cache state; times
    each token end to end; and stays with the best for a while. An expert is ``units`` keys.
    """

    def __init__(self, choice: str, most: int, units: int = 1) -> None:
        self.auto, self.most, self.units = choice == "auto", most, units
        self.count = 0 if choice in ("device", "auto") else int(choice)
        self.trials = 0
        self._tried: list[tuple[int, float, int]] = []  # split, seconds and storage bytes of a token
        self._held = 0

    def host_share(self, keys: list[int]) -> set[int]:
        """The experts of a demand that run on the host: its last ones, wherever they live."""
        return set(keys[max(0, len(keys) - self.count * self.units) :])

    def observe(self, seconds: float, nbytes: int) -> None:
        """A token is done: it took so long, and storage delivered so much for it."""
        if not self.auto:
            return
        if self._held:
            self._held -= 1
            if not self._held:
                self.count = 0
            return
        self._tried.append((self.count, seconds, nbytes))
        self.count = (self.count + 1) % (self.most + 1)
        if len(self._tried) == ROUNDS * (self.most + 1):
            self.count, self._tried, self._held = best(*zip(*self._tried, strict=True)), [], HOLD
            self.trials += 1


def best(splits: tuple[int, ...], seconds: tuple[float, ...], nbytes: tuple[int, ...]) -> int:
    """The split with the least mean time at the same storage load.

    Tokens differ in what they read, so each split's mean is moved to the common load along the slope that seconds have
    over bytes within the splits (analysis of covariance).
    """
    split, time, load = np.array(splits), np.array(seconds), np.array(nbytes, float)
    counts = np.bincount(split)
    mean_time, mean_load = (np.bincount(split, values) / counts for values in (time, load))
    apart = load - mean_load[split]
    # sums, not products of a BLAS, which adds up in an order of the processor's own
    slope = (apart * (time - mean_time[split])).sum() / (apart**2).sum() if apart.any() else 0.0
    return int((mean_time - slope * (mean_load - load.mean())).argmin())
