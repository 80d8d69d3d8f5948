"""Random integers that are the same on every machine and under every numpy; knows nothing of what is drawn."""

from __future__ import annotations

import numpy as np


class Draws:
    """Integers from PCG64's raw stream, which numpy keeps stable across versions."""

    def __init__(self, seed: int | list[int]) -> None:
        self.bits = np.random.PCG64(seed)

    def raw(self, shape) -> np.ndarray:
        """uint64, uniform."""
        return self.bits.random_raw(int(np.prod(shape))).reshape(shape)

    def u16(self, shape) -> np.ndarray:
        """uint16, uniform; four from each raw draw."""
        size = int(np.prod(shape))
        words = self.bits.random_raw(-(-size // 4)).astype("<u8").view("<u2")
        return words[:size].reshape(shape)

    def below(self, limit: int | np.ndarray, shape) -> np.ndarray:
        """int64 in 0..limit-1 (bias below limit / 2^32); an array of limits is broadcast to ``shape``."""
        return ((self.raw(shape) >> np.uint64(32)) * np.asarray(limit, np.uint64) >> np.uint64(32)).astype(np.int64)

    def permutations(self, count: int, size: int) -> np.ndarray:
        """int64 [count, size], each row a permutation of 0..size-1."""
        return self.raw((count, size)).argsort(axis=1, kind="stable")
