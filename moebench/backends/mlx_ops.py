"""Arithmetic for systems that predict, on mlx arrays in float32, whatever the model computes in.

A product of many rows is made of products of one row, so that a row's bits never depend on its neighbours. Knows
tensors; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from moebench.backends.base import Ops


class MlxOps(Ops):
    """``Ops`` in float32: whatever comes in, in any float type, is made float32 first."""

    def tensor(self, array: np.ndarray) -> mx.array:
        """A float32 copy of ``array``."""
        return mx.array(np.asarray(array, np.float32))

    def numpy(self, tensor: Any) -> np.ndarray:
        """A float32 copy of ``tensor``."""
        return np.array(_float(tensor))

    def rows(self, tensor: mx.array, index: np.ndarray) -> mx.array:
        """[N, H] -> [len(index), H]; an index outside 0..N-1 is an ``IndexError``."""
        index = np.asarray(index, np.int64)
        if index.size and (index.min() < 0 or index.max() >= len(tensor)):
            raise IndexError(f"rows {index.min()} to {index.max()} of {len(tensor)}")
        return _float(tensor[mx.array(index)])

    def concat(self, tensors: Sequence[mx.array]) -> mx.array:
        """[..., a], [..., b], ... -> [..., a + b + ...]."""
        return mx.concatenate([_float(t) for t in tensors], axis=-1)

    def stack(self, tensors: Sequence[mx.array]) -> mx.array:
        """n of [...] -> [n, ...]."""
        return mx.stack([_float(t) for t in tensors])

    def linear(self, x: mx.array, weight: mx.array) -> mx.array:
        """[n, rows, in], [n, out, in] -> [n, rows, out]."""
        x, turned = _float(x), _float(weight).swapaxes(1, 2)
        return mx.concatenate([x[:, i : i + 1] @ turned for i in range(x.shape[1])], axis=1)

    def gelu(self, x: mx.array) -> mx.array:
        """Exact GELU, elementwise."""
        return nn.gelu(_float(x))


def _float(tensor: Any) -> mx.array:
    return (tensor if isinstance(tensor, mx.array) else mx.array(np.asarray(tensor, np.float32))).astype(mx.float32)
