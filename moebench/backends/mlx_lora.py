"""Low-rank adapters beside an mlx model's dense projections, never merged into them.

Computed in the dtype of what the projection takes. Knows tensors; knows no training and no file.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from moebench.backends.base import Adapters, BackendError
from moebench.backends.mlx_load import owner


class Projections:
    """The linear layers of one model that an adapter may stand beside, by path; made before anything is wrapped.

    Attention, dense blocks and shared experts; not routers, gates of one output, or the head.
    """

    def __init__(self, model: nn.Module, routers: list[str]) -> None:
        self.places: dict[str, tuple[Any, str]] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        for path, module in model.named_modules():
            linear = isinstance(module, nn.Linear | nn.QuantizedLinear) and module.weight.shape[0] > 1
            if linear and path not in routers and not path.endswith("lm_head"):
                self.places[path] = owner(model, path)
                self.sizes[path] = width_of(module), module.weight.shape[0]

    def install(self, adapters: Adapters) -> dict[str, nn.Module]:
        """Put all of ``adapters`` beside their projections; returns what stood there. Raises ``BackendError`` before
        anything changed.
        """
        branches = {path: self._branch(path, *pair, adapters.scale) for path, pair in adapters.pairs.items()}
        before = {path: parent[name] for path, (parent, name) in self.places.items() if path in branches}
        for path, branch in branches.items():
            parent, name = self.places[path]
            parent[name] = Adapted(before[path], branch)
        return before

    def restore(self, before: dict[str, nn.Module]) -> None:
        """Undo an ``install``."""
        for path, module in before.items():
            parent, name = self.places[path]
            parent[name] = module

    def _branch(self, path: str, a: np.ndarray, b: np.ndarray, scale: float) -> Branch:
        if path not in self.places:
            near = difflib.get_close_matches(path, self.places, n=3, cutoff=0.3) or list(self.places)[:3]
            raise BackendError(
                f"adapter {path!r} is beside no dense projection of the model, such as {', '.join(near)}"
            )
        inputs, outputs = self.sizes[path]
        if a.ndim != 2 or b.ndim != 2 or (*a.shape, *b.shape) != (len(a), inputs, outputs, len(a)):
            raise BackendError(
                f"adapter {path}: A {a.shape} and B {b.shape} do not fit a projection of {inputs} to {outputs}: "
                f"A must be (r, {inputs}), B ({outputs}, r)"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise BackendError(f"adapter {path} holds numbers that are not finite")
        return Branch(mx.array(np.asarray(a, np.float32)), mx.array(np.asarray(b, np.float32)), scale)


class Adapted(nn.Module):
    """A projection with an adapter: adds scale * B (A x) to its output."""

    def __init__(self, inner: nn.Module, branch: Branch) -> None:
        super().__init__()
        self.inner, self.branch = inner, branch

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(x) + self.branch(x)


@dataclass(frozen=True, eq=False)
class Branch:
    """An adapter's matrices, float32; no module, so that mlx counts them among no model's parameters."""

    a: mx.array
    b: mx.array
    scale: float

    def __call__(self, x: mx.array) -> mx.array:
        return self.scale * ((x @ self.a.astype(x.dtype).T) @ self.b.astype(x.dtype).T)


def width_of(module: nn.Module) -> int:
    """Inputs of a layer with a matrix, quantised or not."""
    scales = module.get("scales")
    return module.weight.shape[-1] if scales is None else scales.shape[-1] * module.group_size
