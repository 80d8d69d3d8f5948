"""``Ops`` in numpy, for tests of systems without a backend: one row at a time, so that rows never touch each other."""

from __future__ import annotations

import math

import numpy as np

from moebench.backends.base import Ops

_erf = np.vectorize(math.erf, otypes=[np.float64])


class NumpyOps(Ops):
    """Float32 arrays stand for tensors."""

    def tensor(self, array):
        return np.array(array, np.float32)

    def numpy(self, tensor):
        return np.array(tensor, np.float32)

    def rows(self, tensor, index):
        return np.asarray(tensor[index], np.float32)

    def concat(self, tensors):
        return np.concatenate(tensors, axis=-1, dtype=np.float32)

    def stack(self, tensors):
        return np.stack(tensors, dtype=np.float32)

    def linear(self, x, weight):
        products = [[w @ row for row in rows] for rows, w in zip(x, weight, strict=True)]
        return np.array(products, np.float32).reshape(*x.shape[:2], weight.shape[1])

    def gelu(self, x):
        return (x * (1 + _erf(x / math.sqrt(2))) / 2).astype(np.float32)
