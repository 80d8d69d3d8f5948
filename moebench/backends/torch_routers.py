"""Routers as every family has them: which module scores, what it adds for choosing, and how a choice comes to depend on
its row alone and to name the best first.

Routers that keep float32 weights multiply in float32, where torch gives many rows at once other last bits than each
alone; and some leave their choice unsorted. Both are mended around the family's own code, call by call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from moebench.backends.torch_experts import expert_modules, router_module

BIASES = ("e_score_correction_bias", "expert_bias")


class Settled(TorchFunctionMode):
    """While it is entered, top-k is sorted and, if ``exact``, a float32 product of many rows is made of products of one
    row, and a convolution of many sequences of convolutions of one. ``changed`` says whether anything was.
    """

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact, self.changed = exact, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk and not kwargs.get("sorted", True):
            self.changed, kwargs = True, {**kwargs, "sorted": True}
        elif func is F.linear and self.exact and args[1].dtype == torch.float32 and args[0].dim() == 2:
            self.changed = True
            if len(args[0]) > 1:
                # copies, so that every row starts at an aligned address
                return torch.cat([func(row.clone(), *args[1:], **kwargs) for row in args[0].split(1)])
        elif func is F.conv1d and self.exact and len(args[0]) > 1:
            self.changed = True
            return torch.cat([func(sequence, *args[1:], **kwargs) for sequence in args[0].split(1)])
        return func(*args, **kwargs)


def settle_routers(model: nn.Module, exact: bool) -> None:
    """Let every router of ``model`` that needs it run under ``Settled``; others stay as they are."""
    dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
    for name in expert_modules(model):
        router = outer_router(model, name)
        width = router_module(model, name).weight.shape[1]
        settled = Settled(exact)
        with torch.inference_mode(), settled:
            as_rows(router)(torch.zeros(2, width, dtype=dtype))
        if settled.changed:
            router.forward = _under(settled, router.forward)


def _under(settled: Settled, plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with settled:
            return plain(*args, **kwargs)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    return forward


def outer_router(model: nn.Module, experts_name: str) -> nn.Module:
    """The module that routes for the experts module of that name: the one that scores, or the one that wraps it."""
    block, scorer = model.get_submodule(experts_name.rpartition(".")[0]), router_module(model, experts_name)
    experts = model.get_submodule(experts_name)
    for child in block.children():
        if child is not experts and any(module is scorer for module in child.modules()):
            return child
    return scorer


def as_rows(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module as a function of rows [N, in] to its first output: a gated norm gates rows by themselves, a router
    adds no bias.
    """
    wanted = inspect.signature(module.forward).parameters
    extra = {name: torch.zeros(len(module.weight)) for name in BIASES if name in wanted}  # type: ignore[arg-type]

    def kernel(x: torch.Tensor) -> torch.Tensor:
        output = module(x, **extra, **({"gate": x} if "gate" in wanted else {}))
        return output[0] if isinstance(output, tuple) else output

    return kernel


def selection_bias(model: nn.Module, experts_name: str) -> torch.Tensor | None:
    """What the router of that experts module adds to scores for choosing, fp32 [E]; None for families without."""
    block = model.get_submodule(experts_name.rpartition(".")[0])
    for name, tensor in (*block.named_buffers(), *block.named_parameters()):
        if name.rpartition(".")[2] in BIASES:
            return tensor.detach().float().flatten()
    return None


def selection_biases(model: nn.Module) -> dict[int, np.ndarray]:
    """``selection_bias`` by MoE layer, where there is one."""
    found = {layer: selection_bias(model, name) for layer, name in enumerate(expert_modules(model))}
    return {layer: bias.numpy() for layer, bias in found.items() if bias is not None}
