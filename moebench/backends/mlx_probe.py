"""Whether each kernel an mlx model uses is row-invariant: do many rows at once give the bits that each row gives alone?

It depends on device, dtype, shape and library, so it is tried, never assumed. A kernel that is not can be separated:
its rows then run one by one, at the price of a launch each. Knows tensors; knows no server and no pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from moebench.backends.base import BackendError
from moebench.backends.mlx_experts import DTYPES, Arithmetic, combine
from moebench.backends.mlx_head import AsLinear
from moebench.backends.mlx_load import owner
from moebench.backends.mlx_lora import Adapted, width_of
from moebench.backends.mlx_state import Memory, PerSequence
from moebench.store.layout import TensorSpec

ROWS = (2, 3, 4, 8, 16, 33)
PAST = 200  # cached positions before the rows of an attention probe

Separate = Callable[[], None]


@dataclass(frozen=True)
class Kernel:
    """``together`` takes rows [n, width] at once, ``alone`` one by one; ``separate`` makes the kernel do so always."""

    name: str
    width: int
    together: Callable[[mx.array], Any]
    alone: Callable[[mx.array], Any]
    separate: Separate

    def verdict(self, dtype: mx.Dtype) -> dict[str, Any]:
        """``{"equal": bool, "max_abs_diff": float, "first_unequal_rows": int or None}``."""
        x = mx.random.normal((max(ROWS), self.width), key=mx.random.key(0)).astype(dtype)
        single = _numbers(self.alone(x))
        differ = {n: float(np.abs(_numbers(self.together(x[:n])) - single[:n]).max()) for n in ROWS}
        unequal = [n for n, by in differ.items() if by]
        return {
            "equal": not unequal,
            "max_abs_diff": max(differ.values()),
            "first_unequal_rows": min(unequal, default=None),
        }


class RowByRow(nn.Module):
    """Stands for a layer of rows: runs them one by one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> Any:
        return one_by_one(self.inner, x)


def one_by_one(layer: Callable[[mx.array], Any], x: mx.array) -> Any:
    """``layer`` on each row of x [..., width] by itself; a layer may return several tensors."""
    made = [layer(row) for row in x.reshape(-1, 1, 1, x.shape[-1])]

    def joined(parts: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(parts).reshape(*x.shape[:-1], parts[0].shape[-1])

    return tuple(map(joined, zip(*made, strict=True))) if isinstance(made[0], tuple) else joined(made)


def kernels(model: nn.Module, memory: Memory, arithmetic: Sequence[Arithmetic], top_k: int) -> list[Kernel]:
    """Every distinct layer with a matrix, every attention, and what experts compute, as they are installed."""
    found: dict[str, Kernel] = {}
    for kernel in (*_layers(model), *_attentions(model, memory), *_experts(arithmetic, top_k)):
        found.setdefault(kernel.name, kernel)
    return list(found.values())


def require_row_invariance(found: Sequence[Kernel], dtype: mx.Dtype) -> dict[str, Any]:
    """Separate every kernel that is not row-invariant; the report of all after that."""
    report = {}
    for kernel in found:
        report[kernel.name] = kernel.verdict(dtype)
        if not report[kernel.name]["equal"]:
            kernel.separate()
    return report


def _numbers(output: Any) -> np.ndarray:
    """The last of a kernel's outputs, fp32 [rows, ...]."""
    output = output[-1] if isinstance(output, tuple) else output
    return np.array(output.astype(mx.float32)).reshape(-1, output.shape[-1])


def _layers(model: nn.Module) -> Iterator[Kernel]:
    """Layers outside attention; those that are alike are separated together."""
    inside = tuple(
        f"{path}." for path, module in model.named_modules() if isinstance(module, PerSequence | RowByRow | Adapted)
    )
    alike: dict[str, list[tuple[Any, Any]]] = {}
    for path, module in model.named_modules():
        if not path.startswith(inside) and (name := _name(module)):
            alike.setdefault(name, []).append(owner(model, path))
    for name, places in alike.items():
        parent, key = places[0]

        def separate(places: Sequence[tuple[Any, Any]] = places) -> None:
            for parent, key in places:
                parent[key] = RowByRow(parent[key])

        yield _of_rows(name, _width(parent[key]), parent[key], separate)


def _name(module: nn.Module) -> str:
    """What a layer of rows with a matrix is called; empty for anything else."""
    of = module.inner if isinstance(module, Adapted | RowByRow) else module
    weight = of.embedding.weight if isinstance(of, AsLinear) else of.get("weight")
    if not isinstance(weight, mx.array) or weight.ndim != 2 or isinstance(of, nn.Embedding | nn.QuantizedEmbedding):
        return ""
    more = f" with adapter of rank {len(module.branch.a)}" if isinstance(module, Adapted) else ""
    return f"{type(of).__name__} {'x'.join(map(str, weight.shape))} {str(weight.dtype).rpartition('.')[2]}{more}"


def _width(module: nn.Module) -> int:
    of = module.inner if isinstance(module, Adapted | RowByRow) else module
    return width_of(of.embedding if isinstance(of, AsLinear) else of)


def _of_rows(name: str, width: int, run: Callable[[mx.array], Any], separate: Separate) -> Kernel:
    return Kernel(name, width, lambda x: run(x[None]), lambda x: one_by_one(run, x[None]), separate)


def _attentions(model: nn.Module, memory: Memory) -> Iterator[Kernel]:
    """Whole attention modules, projections and all: windows after ``PAST`` rows against the same rows one by one."""
    alike: dict[str, list[tuple[int, PerSequence]]] = {}
    for index, layer in enumerate(model.layers):
        for module in layer.children().values():
            if isinstance(module, PerSequence):
                alike.setdefault(_attention_name(module), []).append((index, module))
    for name, members in alike.items():
        index, first = members[0]

        def run(x: mx.array, step: int, index: int = index, first: PerSequence = first) -> mx.array:
            own = memory.empty()[index]
            past = mx.random.normal((1, PAST, x.shape[-1]), key=mx.random.key(1)).astype(x.dtype)
            first.rows(past, own)
            return mx.concatenate([first.rows(x[None, i : i + step], own) for i in range(0, len(x), step)], 1)

        def separate(members: Sequence[tuple[int, PerSequence]] = members) -> None:
            for _, module in members:
                module.alone = True

        yield Kernel(name, first.width, lambda x, run=run: run(x, len(x)), lambda x, run=run: run(x, 1), separate)


def _attention_name(module: PerSequence) -> str:
    adapted = sum(isinstance(child, Adapted) for child in module.inner.children().values())
    window = f", window {module.wanted.window_size}" * bool(module.wanted.window_size)
    return f"{type(module.inner).__name__} of width {module.width}{window}" + f", {adapted} adapters" * bool(adapted)


def _experts(arithmetic: Sequence[Arithmetic], top_k: int) -> Iterator[Kernel]:
    for one in arithmetic:
        tensors = tuple(spec and _random(spec, key) for key, spec in enumerate(one.views.specs))
        up, hidden = one.views.specs[0], one.views.specs[4].shape[0]

        def separate(one: Arithmetic = one) -> None:
            one.alone = True

        def run(x: mx.array, one: Arithmetic = one, tensors: Any = tensors) -> mx.array:
            return one.on(x.reshape(-1, x.shape[-1]), tensors)

        yield _of_rows(f"expert {'x'.join(map(str, up.shape))} {up.dtype}", hidden, run, separate)
        weights = mx.random.uniform(shape=(1, top_k), key=mx.random.key(2))

        def total(x: mx.array, hidden: int = hidden, weights: mx.array = weights) -> mx.array:
            return combine(x.reshape(-1, top_k, hidden), weights.astype(x.dtype))

        yield _of_rows(f"weighted sum of {top_k}", top_k * hidden, total, _cannot)


def _cannot() -> None:
    raise BackendError(
        "numerics=row_invariant: here the weighted sum of experts gives other bits for several rows; use numerics=fast"
    )


def _random(spec: TensorSpec, key: int) -> mx.array:
    if spec.dtype in ("BF16", "F16", "F32"):
        return mx.random.normal(spec.shape, key=mx.random.key(key)).astype(DTYPES[spec.dtype])
    draw = np.random.default_rng(key)
    if spec.dtype == "U32":
        return mx.array(draw.integers(0, 1 << 32, spec.shape, np.uint32))
    return mx.array(draw.integers(125, 129, spec.shape, np.uint8))  # powers of two near 1, so that sums stay finite
