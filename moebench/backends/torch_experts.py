"""The one experts function that all transformers MoE families run through.

It asks the server for each layer's experts, runs every expert on its rows straight from the bytes it is given, and sums
the results in router order, so that the order of arrival never shows. Knows tensors and kernels; knows no disk and no
policy. In a float32 model unquantised experts compute in float32, quantised ones in bf16, as their kernels demand.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moebench.backends.base import BackendError, ExpertServer
from moebench.step import ABSENT, Routing
from moebench.store.layout import TensorSpec

NAME = "moebench"
DTYPES = {"BF16": torch.bfloat16, "U8": torch.uint8, "I8": torch.int8}
EXPERT_TENSORS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold routed experts and go through transformers' registry, by name, in layer order."""
    found = {name: m for name, m in model.named_modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")}
    if not found:
        raise BackendError(f"{type(model).__name__} has no experts that go through transformers' experts registry")
    return found


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters [E, ...] of one experts module that belong to single experts, in a fixed order."""
    parameters = dict(module.named_parameters(recurse=False))
    return {name: parameters[name] for name in EXPERT_TENSORS if name in parameters}


def router_module(model: nn.Module, experts_name: str) -> nn.Module:
    """The module beside the experts module of that name that scores its experts: its weight has one row for each."""
    experts, block = model.get_submodule(experts_name), model.get_submodule(experts_name.rpartition(".")[0])
    for module in block.modules():
        weight = getattr(module, "weight", None)
        if (
            module is not experts
            and weight is not None
            and weight.dim() == 2
            and weight.shape[0] == experts.num_experts
        ):
            return module
    raise BackendError(f"{type(block).__name__} has no router whose weight has {experts.num_experts} rows")


class Views:
    """Tensors over the bytes of expert buffers, made once per address.

    They own no memory: the server keeps a buffer alive while it serves it, and slots are reused for other experts of
    the same layout. So a cached view is right whenever its address is served, and pins nothing.
    """

    LIMIT = 1 << 16  # addresses remembered, for servers that never reuse one

    def __init__(self, tensors: Sequence[TensorSpec], up: str) -> None:
        specs = {spec.name: spec for spec in tensors}
        names = [up, f"{up}.scales", f"{up}_bias", "down_proj", "down_proj.scales", "down_proj_bias"]
        self.specs = [specs.get(name) for name in names]
        if missing := [name for name in (up, "down_proj") if name not in specs]:
            raise BackendError(f"pack lacks expert tensor {', '.join(missing)}; it holds {', '.join(specs)}")
        self.nbytes = max(spec.offset + spec.nbytes for spec in tensors)
        self._of: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._at: dict[int, tuple[weakref.ref[np.ndarray], tuple[torch.Tensor | None, ...]]] = {}  # by array object

    def __call__(self, buffer: np.ndarray) -> tuple[torch.Tensor | None, ...]:
        """(up, up scales, up bias, down, down scales, down bias) over ``buffer``; None for what the pack lacks."""
        known = self._at.get(id(buffer))
        if known is not None and known[0]() is buffer:
            return known[1]
        address = buffer.__array_interface__["data"][0]
        views = self._of.get(address)
        if views is None:
            if buffer.nbytes < self.nbytes:
                raise BackendError(f"expert buffer of {buffer.nbytes} bytes is shorter than an expert of {self.nbytes}")
            if len(self._of) >= self.LIMIT:
                self._of.clear()
            views = self._of[address] = tuple(spec and _view(address, spec) for spec in self.specs)
        if len(self._at) >= self.LIMIT:
            self._at.clear()
        self._at[id(buffer)] = weakref.ref(buffer), views
        return views


def _view(address: int, spec: TensorSpec) -> torch.Tensor:
    raw = (ctypes.c_uint8 * spec.nbytes).from_address(address + spec.offset)
    return torch.frombuffer(raw, dtype=DTYPES[spec.dtype]).view(spec.shape)


def linear_kernel(weight: TensorSpec, scales: TensorSpec | None, dtype: torch.dtype) -> Linear:
    """The function (x [n, in], weight, scales) -> [n, out] in ``dtype`` for a tensor as the pack stores it."""
    if weight.dtype == "BF16":
        if dtype == torch.bfloat16:
            return lambda x, w, s: F.linear(x, w)
        return lambda x, w, s: F.linear(x, w.to(dtype))
    if weight.dtype == "I8":
        kernel: Linear = torch._weight_int8pack_mm
    else:
        group = 2 * weight.shape[1] // scales.shape[0]
        four = torch._weight_int4pack_mm_for_cpu

        def kernel(x, w, s):
            return four(x, w, group, s)

    if dtype == torch.bfloat16:
        return kernel
    return lambda x, w, s: kernel(x.bfloat16(), w, s).to(dtype)


class Live:
    """What the layers of one model share during a forward pass: the server, and which rows are padding (None: none)."""

    server: ExpertServer | None = None
    padded: np.ndarray | None = None


class ExpertLayer:
    """One MoE layer as the experts function sees it: its index, its arithmetic, and the pass under way."""

    def __init__(
        self, index: int, module: nn.Module, views: Any, dtype: torch.dtype, live: Live, kernel: Any = linear_kernel
    ) -> None:
        up, up_scales, _, down, down_scales, _ = views.specs
        self.index, self.views, self.live = index, views, live
        self.up, self.down = kernel(up, up_scales, dtype), kernel(down, down_scales, dtype)
        self.gate = module._apply_gate if module.has_gate else module.act_fn
        self.norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None

    def expert(self, x: torch.Tensor, buffer: np.ndarray) -> torch.Tensor:
        """One expert on its rows: [n, H] -> [n, H]."""
        up, up_scales, up_bias, down, down_scales, down_bias = self.views(buffer)
        y = self.up(x, up, up_scales)
        y = self.gate(y if up_bias is None else y + up_bias)
        y = self.down(y, down, down_scales)
        if down_bias is not None:
            y = y + down_bias
        return y if self.norm is None else self.norm(y)

    def one_row(self, x: torch.Tensor, ids: np.ndarray, items: Iterator[tuple[int, np.ndarray]]) -> torch.Tensor:
        """Unweighted outputs [1, k, H] of a single row in router order."""
        outputs = {expert: self.expert(x, buffer) for expert, buffer in items}
        chosen = ids[0].tolist()
        if ABSENT in chosen:
            outputs[ABSENT] = torch.zeros_like(x)
        if missing := [e for e in chosen if e not in outputs]:
            raise BackendError(f"layer {self.index}: the server did not yield expert {missing[0]}, which the row needs")
        return torch.cat([outputs[e] for e in chosen]).unsqueeze(0)

    def many_rows(self, x: torch.Tensor, ids: np.ndarray, items: Iterator[tuple[int, np.ndarray]]) -> torch.Tensor:
        """Unweighted outputs [N, k, H] of many rows in router order; rows of one expert run together."""
        rows, k = ids.shape
        flat = ids.reshape(-1)
        order = np.argsort(flat, kind="stable")
        ordered = flat[order]
        out = x.new_zeros(rows * k, x.shape[1])
        done = 0
        for expert, buffer in items:
            low, high = np.searchsorted(ordered, (expert, expert + 1)).tolist()
            slots = torch.from_numpy(order[low:high])
            out[slots] = self.expert(x[slots // k], buffer)
            done += high - low
        if done != (needed := int((flat != ABSENT).sum())):
            raise BackendError(f"layer {self.index}: the server's experts cover {done} of {needed} (row, expert) pairs")
        return out.view(rows, k, -1)


def combine(outputs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weighted sum over k of [N, k, H] with [N, k], in router order: [N, H] in ``dtype``."""
    return (outputs * weights.unsqueeze(-1)).sum(1).to(dtype)


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Routed experts of one layer for rows [N, H]: transformers' experts function ``moebench``."""
    layer: ExpertLayer = module.moebench
    live = layer.live
    if live.server is None:
        raise BackendError("a model under moebench computes only through its backend's forward, which brings a server")
    ids, weights = top_k_index.cpu().numpy(), top_k_weights
    if live.padded is not None:
        ids = np.where(live.padded[:, None], ABSENT, ids)
    native = Routing(ids, weights)
    routing, items = live.server.serve(layer.index, hidden_states, native)
    if routing is not native:
        ids, weights = routing.experts, torch.as_tensor(routing.weights).to(top_k_weights)
    if live.padded is not None or routing is not native:
        if live.padded is not None:
            ids = np.where(live.padded[:, None], ABSENT, ids)
        weights = weights.masked_fill(torch.from_numpy(ids == ABSENT).to(weights.device), 0)
    outputs = (layer.one_row if len(ids) == 1 else layer.many_rows)(hidden_states, ids, items)
    return combine(outputs, weights, hidden_states.dtype)


def install(
    model: Any, tensors: Sequence[TensorSpec], dtype: torch.dtype, over: Any = Views, layer: Any = ExpertLayer
) -> Live:
    """Send every experts module of ``model`` through ``experts_forward``: a ``layer`` each, which sees experts that are
    laid out as ``tensors`` through the views ``over`` their bytes.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    live = Live()
    views: dict[str, Any] = {}
    for index, module in enumerate(expert_modules(model).values()):
        up = "gate_up_proj" if module.has_gate else "up_proj"
        if up not in views:
            views[up] = over(tensors, up)
        module.moebench = layer(index, module, views[up], dtype, live)
    model.set_experts_implementation(NAME)
    return live
