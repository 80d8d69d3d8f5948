"""Which experts of a window to compute next, while others are still on their way (arXiv 2609.14643, section 4.4).

An expert passes four stages: read from flash, mapped for the accelerator, copied into its chip, computed. The loop asks
whenever the chip can take the next copy, which is after every completion; the answer is a group of mapped experts to
compute together or one to wait for. The same code decides on a measured run, where nothing is copied and computing
takes what it took before. Knows clocks only through the view; knows no bytes and no engine.

What the paper leaves open is settled so: candidates are the first n mapped experts, most rows first (ties: lowest key);
nothing is waited for while an expert is mapped, and then the one that is expected first; with nothing on its way the
rest is one group; and where not even one copy hides behind what still computes (at the start, or where copying takes
longer than computing) the group is the paper's first one, eight experts at most.

A layer's experts cost the same on the modeled clock. There any order that never waits while an expert is mapped ends a
layer at one and the same time, the earliest possible: ``stages`` and ``arrival`` differ in the number of calls alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Mode = Literal["stages", "arrival", "wait_all"]
FIRST_GROUP = 8  # "the eight most frequent mapped experts are pre-grouped"


def group_size(copy_s: np.ndarray, compute_s: np.ndarray, busy_s: float, next_s: float) -> int:
    """How many candidates to compute together: of those groups whose copy is hidden, the one that computes shortest and
    yet until the next expert is mapped, else the one that computes longest.

    ``copy_s`` (T_VTCM) and ``compute_s`` (T_HMX), float [n], are of the first 1, 2, ... n candidates and do not fall;
    ``busy_s`` is W_t, ``next_s`` tau_next, all in seconds. R_t = max(0, tau_next - W_t).
    """
    hidden = int(np.searchsorted(copy_s, busy_s, "right"))
    if not hidden:
        return min(FIRST_GROUP, len(copy_s))
    lasting = int(np.searchsorted(compute_s, max(0.0, next_s - busy_s))) + 1
    return min(lasting, hidden)


class Schedule:
    """Orders the experts of one layer after the other.

    ``stages`` groups as above, ``arrival`` takes each expert as it comes, ``wait_all`` waits for all and computes them
    as one group.
    """

    def __init__(self, mode: Mode, experts: int) -> None:
        self.mode, self.experts = mode, experts
        self._rows = np.zeros(experts, np.int64)
        self._rows_each = 0
        self.counted = {"groups": 0, "grouped_experts": 0, "waits": 0}

    def window(self, executed: np.ndarray) -> None:
        """A layer's routing is decided: ``executed`` are the expert ids of its valid rows, int [N, k], -1 for none."""
        self._rows = np.bincount(executed[executed >= 0], minlength=self.experts)
        self._rows_each = math.ceil(self._rows.sum() / max(1, np.count_nonzero(self._rows)))

    def next(self, ready: Sequence[int], pending: Sequence[int], view: Any) -> list[int]:
        """The answer to ``order_compute``: keys of ``ready`` to compute together, or one of ``pending`` to wait for."""
        if pending and (not ready or self.mode == "wait_all"):
            self.counted["waits"] += 1
            return [pending[int(view.remaining(pending).argmin())]]
        keys = np.asarray(ready, np.int64)
        if self.mode == "arrival":
            keys = keys[:1]
        elif pending:
            count = np.arange(1, len(keys) + 1)
            copy_s, compute_s = view.stages(1, self._rows_each)  # an expert counts as one with the mean of rows
            size = group_size(count * copy_s, count * compute_s, view.busy_s, float(view.remaining(pending).min()))
            keys = keys[np.lexsort((keys, -self._rows[keys % self.experts]))[:size]]
        self.counted["groups"] += 1
        self.counted["grouped_experts"] += len(keys)
        return keys.tolist()
