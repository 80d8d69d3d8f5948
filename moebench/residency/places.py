"""Where each expert stands on storage, counted in whole slots: the one map that view, loop and clocks share.

Knows keys and places; knows no file and no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Places:
    """``place`` int64 [keys]: the slot on storage, 0 to keys - 1, that holds each key; a permutation."""

    def __init__(self, place: np.ndarray) -> None:
        self.place = np.array(place, np.int64)
        self.check_integrity()

    @classmethod
    def in_order(cls, keys: int) -> Places:
        """Every expert at the place of its key."""
        return cls(np.arange(keys))

    def __call__(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """Place of each key, int64."""
        return self.place[np.asarray(keys, np.int64)]

    def swap(self, a: int, b: int) -> None:
        """Two experts changed places."""
        self.place[[a, b]] = self.place[[b, a]]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every place is taken exactly once."""
        if not np.array_equal(np.sort(self.place), np.arange(len(self.place))):
            raise AssertionError("places: not one expert a place")
