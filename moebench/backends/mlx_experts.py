"""Routed experts of mlx-lm models: the module that stands where ``SwitchGLU`` stood, at that single point.

A block scores its experts, calls the switch with (x, ids) and sums what comes back with its weights. Here the switch
returns a promise, and the product with the weights is where the server is asked: then ids and weights are both known.
Every expert runs on its rows straight from the bytes it is given, and is evaluated before the next is asked for. Knows
tensors and kernels; knows no disk and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from moebench.backends.base import BackendError, ExpertServer
from moebench.step import ABSENT, Routing
from moebench.store.layout import TensorSpec
from moebench.store.manifest import WeightSpec
from moebench.units import PAGE

DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U8": mx.uint8, "U32": mx.uint32, "I8": mx.int8}
MODES = {"mxfp4": "mxfp4", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}  # other quantised kinds are affine
PARTS = ("", ".scales", ".biases", "_bias")

Array = mx.array
Tensors = tuple[Array | None, ...]


def buffer_of(nbytes: int) -> np.ndarray:
    """A zeroed, page-aligned uint8 array of ``nbytes`` bytes in memory of mlx, so that tensors over it need no copy."""
    owner = mx.zeros((nbytes + PAGE,), mx.uint8)
    mx.eval(owner)
    memory = np.array(owner, copy=False)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + nbytes]


def owner_of(buffer: np.ndarray) -> tuple[Array, int] | None:
    """The mlx array in whose memory ``buffer`` lies, and at which byte; None for memory of others."""
    array = buffer
    while isinstance(array.base, np.ndarray):
        array = array.base
    owner = array.base.obj if isinstance(array.base, memoryview) else None
    return (owner, _address(buffer) - _address(array)) if isinstance(owner, mx.array) else None


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class Views:
    """Tensors over the bytes of expert buffers, made once per address of mlx memory until ``clear``.

    Slots are reused for other experts of one layout, so a view is right whenever its address is served. Bytes in memory
    of others are copied, which ``copied`` counts.
    """

    def __init__(self, tensors: Sequence[TensorSpec], up: str) -> None:
        specs = {spec.name: spec for spec in tensors}
        self.specs = [specs.get(name + part) for name in (up, "down_proj") for part in PARTS]
        if missing := [name for name in (up, "down_proj") if name not in specs]:
            raise BackendError(f"pack lacks expert tensor {', '.join(missing)}; it holds {', '.join(specs)}")
        self.nbytes, self.copied = max(spec.offset + spec.nbytes for spec in tensors), 0
        self._of: dict[int, Tensors] = {}

    def __call__(self, buffer: np.ndarray) -> Tensors:
        """Weight, scales, biases and bias vector of up, then of down; None for what the pack lacks."""
        address = _address(buffer)
        if (known := self._of.get(address)) is not None:
            return known
        if buffer.nbytes < self.nbytes:
            raise BackendError(f"expert buffer of {buffer.nbytes} bytes is shorter than an expert of {self.nbytes}")
        found = owner_of(buffer)
        if found is None:
            self.copied += self.nbytes
            return self._over(mx.array(buffer[: self.nbytes]), 0)
        views = self._of[address] = self._over(*found)
        mx.eval([view for view in views if view is not None])
        return views

    def clear(self) -> None:
        """Let go of all memory that was served."""
        self._of.clear()

    def _over(self, owner: Array, start: int) -> Tensors:
        def view(spec: TensorSpec) -> Array:
            first = start + spec.offset
            return owner[first : first + spec.nbytes].view(DTYPES[spec.dtype]).reshape(spec.shape)

        return tuple(spec and view(spec) for spec in self.specs)


class Product:
    """x [n, in] times one matrix as a pack stores it -> [n, out], in x's dtype."""

    def __init__(self, weight: WeightSpec, scales: TensorSpec | None) -> None:
        self.quant: dict[str, Any] | None = None
        if scales is not None:
            bits = {"int4": 4, "int8": 8, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4}.get(weight.kind)
            self.quant = {
                "bits": bits or int(weight.kind.removeprefix("affine")),
                "group_size": weight.shape[1] // scales.shape[1],
                "mode": MODES.get(weight.kind, "affine"),
            }

    def __call__(
        self, x: Array, weight: Array, scales: Array | None, biases: Array | None, bias: Array | None
    ) -> Array:
        """The product, with its bias vector."""
        if self.quant is None:
            y = x @ weight.astype(x.dtype).T
        else:
            y = mx.quantized_matmul(x, weight, scales, biases, transpose=True, **self.quant).astype(x.dtype)
        return y if bias is None else y + bias.astype(x.dtype)


class Arithmetic:
    """What one expert computes. With ``alone`` its rows run one by one."""

    def __init__(
        self, views: Views, weights: Mapping[str, WeightSpec], up: str, gate: Callable[[Array], Array]
    ) -> None:
        self.views, self.gate, self.alone = views, gate, False
        self.up, self.down = Product(weights[up], views.specs[1]), Product(weights["down_proj"], views.specs[5])

    def __call__(self, x: Array, buffer: np.ndarray) -> Array:
        """One expert on its rows: [n, H] -> [n, H]."""
        return self.on(x, self.views(buffer))

    def on(self, x: Array, tensors: Tensors) -> Array:
        """The same on tensors."""
        if self.alone and len(x) > 1:
            return mx.concatenate([self.on(x[i : i + 1], tensors) for i in range(len(x))])
        return self.down(self.gate(self.up(x, *tensors[:4])), *tensors[4:])


class Live:
    """What the layers of one model share during a forward pass: the server, and which rows are padding (None: none)."""

    server: ExpertServer | None = None
    padded: np.ndarray | None = None


class Promise:
    """What a switch returns: outputs of experts that are asked for when their weights are known."""

    def __init__(self, layer: StreamedExperts, x: Array, ids: Array) -> None:
        self._layer, self._x, self._ids = layer, x, ids
        self.dtype, self.shape = x.dtype, (*ids.shape, x.shape[-1])

    def astype(self, dtype: Any) -> Promise:
        """Outputs have the dtype of their input."""
        return self

    def __mul__(self, weights: Array) -> Array:
        """The weighted sum over k, with an axis of length 1 where k was: a sum over that axis changes nothing."""
        y = self._layer.summed(self._x, self._ids, weights.squeeze(-1))
        return mx.expand_dims(y, -2)

    def __getattr__(self, name: str) -> Any:
        raise BackendError(
            f"layer {self._layer.index}: this family uses its experts' outputs ({name}) before it weighs them; "
            "backend=mlx serves families that sum y * weights[..., None]; use backend=torch"
        )


class StreamedExperts(nn.Module):
    """Stands for the switch of one MoE layer; holds no weights."""

    def __init__(self, index: int, arithmetic: Arithmetic, live: Live) -> None:
        super().__init__()
        self.index, self.arithmetic, self.live = index, arithmetic, live

    def __call__(self, x: Array, ids: Array) -> Promise:
        """x [..., H], ids [..., k]: a promise of outputs [..., k, H]."""
        return Promise(self, x, ids)

    def summed(self, x: Array, ids: Array, weights: Array) -> Array:
        """Ask the server, run its experts: sum over k of weight times output, [..., H].

        What the server sees is in order of weight, best first; what is summed is in the router's own order, as mlx-lm
        sums it.
        """
        live = self.live
        if live.server is None:
            raise BackendError("a model under moebench computes only through its backend's forward, with a server")
        k, shape = ids.shape[-1], x.shape
        x, ids, weights = x.reshape(-1, shape[-1]), ids.reshape(-1, k), weights.reshape(-1, k)
        mx.eval(x, ids, weights)
        own, shares = np.array(ids, np.int64), np.array(weights.astype(mx.float32))
        if live.padded is not None:
            own = np.where(live.padded[:, None], ABSENT, own)
        best = np.argsort(-shares, axis=1, kind="stable")
        native = Routing(np.take_along_axis(own, best, 1), np.take_along_axis(shares, best, 1))
        routing, items = live.server.serve(self.index, x, native)
        if routing is not native:
            own = np.asarray(routing.experts, np.int64)
            if live.padded is not None:
                own = np.where(live.padded[:, None], ABSENT, own)
            shares = np.where(own == ABSENT, 0, np.asarray(routing.weights, np.float32))
            weights = mx.array(shares).astype(weights.dtype)
        return combine(self.outputs(x, own, items), weights).reshape(shape)

    def outputs(self, x: Array, ids: np.ndarray, items: Iterator[tuple[int, np.ndarray]]) -> Array:
        """Unweighted outputs [N, k, H] in the order of ``ids`` [N, k]; rows of one expert run together."""
        (rows, k), flat = ids.shape, ids.reshape(-1)
        order = np.argsort(flat, kind="stable")
        ordered = flat[order]
        made, place, done = [mx.zeros((1, x.shape[1]), x.dtype)], np.zeros(rows * k, np.int32), 0
        for expert, buffer in items:
            low, high = np.searchsorted(ordered, (expert, expert + 1)).tolist()
            slots = order[low:high]
            y = self.arithmetic(x if rows == 1 else x[mx.array(slots // k)], buffer)
            mx.eval(y)  # its bytes are valid until the next expert is asked for
            made.append(y)
            place[slots] = 1 + done + np.arange(high - low)
            done += high - low
        if done != (needed := int((flat != ABSENT).sum())):
            raise BackendError(f"layer {self.index}: the server's experts cover {done} of {needed} (row, expert) pairs")
        return mx.concatenate(made)[mx.array(place)].reshape(rows, k, -1)


def combine(outputs: Array, weights: Array) -> Array:
    """Sum over k of outputs [N, k, H] times weights [N, k], in that order: [N, H] in the outputs' dtype."""
    return (outputs * weights[..., None]).sum(-2).astype(outputs.dtype)
