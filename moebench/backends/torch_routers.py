"""Routers as every family has them: which module scores, what it adds for choosing, and how a choice comes to depend on
its row alone and to name the best first.

Routers that multiply or take sigmoids in float32 give many rows at once other last bits than each alone, and some leave
their choice unsorted. Both are mended around the family's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from moebench.backends.torch_experts import expert_modules, router_module
from moebench.backends.torch_settled import Settled

SAMPLE = 256  # rows that a router is tried on
BIASES = ("e_score_correction_bias", "expert_bias")


def settle_routers(model: nn.Module, exact: bool) -> None:
    """Let every router of ``model`` name its best expert first and, if ``exact``, run row by row where its rows' bits
    depend on their number. The others stay as they are.
    """
    random = torch.Generator().manual_seed(0)
    dtype = model.get_input_embeddings().weight.dtype  # type: ignore[operator]
    for name in expert_modules(model):
        router, scorer = outer_router(model, name), router_module(model, name)
        x = torch.randn(SAMPLE, scorer.weight.shape[1], generator=random).to(scorer.weight.device, dtype)
        outputs = routed(router)
        with torch.inference_mode():
            plain = outputs(x)
            with Settled():
                unsorted = not torch.equal(outputs(x), plain)
            single = torch.cat([outputs(row) for row in x.split(1)])
        rowwise = exact and (scorer.weight.dtype == torch.float32 != dtype or not torch.equal(plain, single))
        if unsorted or rowwise:
            router.forward = _settled(router.forward, rowwise)


def _settled(plain: Callable[..., Any], rowwise: bool) -> Callable[..., Any]:
    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with Settled():
            if not rowwise or (rows := hidden.reshape(-1, hidden.shape[-1])).shape[0] == 1:
                return plain(hidden, *args, **kwargs)
            # copies, so that every row starts at an aligned address
            parts = [plain(row.clone(), *args, **kwargs) for row in rows.split(1)]
        return tuple(torch.cat(same) for same in zip(*parts, strict=True))

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


def routed(router: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The router as a function of rows [N, in] to all that it says of them, fp32 [N, E + 2k]; without a bias."""
    wanted = inspect.signature(router.forward).parameters

    def kernel(x: torch.Tensor) -> torch.Tensor:
        biases = {name: torch.zeros(router.num_experts, device=x.device) for name in BIASES if name in wanted}
        return torch.cat([part.float() for part in router(x, **biases)], -1)

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
    return {layer: bias.cpu().numpy() for layer, bias in found.items() if bias is not None}
