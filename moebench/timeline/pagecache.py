"""What the operating system's page cache holds of a modeled machine: whole experts, the least recently used go first.

Knows costs and places; knows no time.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from moebench.residency.places import Places
from moebench.timeline.costs import Costs


class PageCache:
    """Empty at start; with no room (``slots`` 0) it is bypassed. A fault brings neighbours too, as far as the kernel
    reads around it.
    """

    def __init__(self, costs: Costs, places: Places | None) -> None:
        self.slots = costs.page_cache_bytes // max(1, costs.read_bytes)  # it holds what is stored
        self._reach = costs.around_bytes // max(1, costs.read_bytes)
        self._places, self._held = places, OrderedDict[int, None]()
        self._key_at = np.zeros(0, np.int64)  # keys by place, once they are asked for

    def serves(self, key: int) -> bool:
        """Whether it holds the expert; it does afterwards."""
        hit = key in self._held
        for one in (*(() if hit else self._around(key)), key):
            self._held[one] = None
            self._held.move_to_end(one)
        while len(self._held) > self.slots:
            self._held.popitem(last=False)
        return hit

    def forget(self, key: int) -> None:
        """A read was taken back."""
        self._held.pop(key, None)

    def _around(self, key: int) -> list[int]:
        """Neighbours that the faults of an expert bring whole."""
        if self._places is None or not self._reach:
            return []
        if not len(self._key_at):
            self._key_at = np.argsort(self._places.place)
        place = int(self._places([key])[0])
        near = self._key_at[max(0, place - self._reach) : place + self._reach + 1]
        return [int(one) for one in near if one != key]
