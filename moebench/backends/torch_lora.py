"""Low-rank adapters beside a torch model's dense projections, never merged into them.

Computed in the model's dtype, as the projection itself. Knows tensors; knows no training and no file.
"""

from __future__ import annotations

import difflib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from moebench.backends.base import Adapters
from moebench.backends.torch_experts import BackendError, expert_modules, router_module


def dense_projections(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers that an adapter may stand beside, by name: attention, dense blocks and shared experts.

    Not routed experts, routers, gates of one output, or the head.
    """
    left_out = {model.get_output_embeddings()}
    for name, experts in expert_modules(model).items():
        left_out |= {*experts.modules(), router_module(model, name)}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module not in left_out and module.out_features > 1
    }


class Branch:
    """The forward hook of one adapted projection: adds scale * B (A x) to its output."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        self.a, self.b, self.scale = a, b, scale

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output + self.scale * F.linear(F.linear(inputs[0], self.a), self.b)


class Installed:
    """Adapters that are being served; ``remove`` leaves the model as it was."""

    def __init__(self, model: PreTrainedModel, adapters: Adapters) -> None:
        """Check all of ``adapters``, then hook them in; raises ``BackendError`` before anything changed."""
        modules = dense_projections(model)
        branches = {name: _branch(modules, name, *pair, adapters.scale) for name, pair in adapters.pairs.items()}
        self._handles = [modules[name].register_forward_hook(branch) for name, branch in branches.items()]

    def remove(self) -> None:
        """Stop serving them."""
        for handle in self._handles:
            handle.remove()


def branch_of(module: nn.Module) -> Branch | None:
    """The adapter served beside ``module``."""
    return next((hook for hook in module._forward_hooks.values() if isinstance(hook, Branch)), None)


def _branch(modules: dict[str, nn.Linear], name: str, a: np.ndarray, b: np.ndarray, scale: float) -> Branch:
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=3, cutoff=0.3) or list(modules)[:3]
        raise BackendError(f"adapter {name!r} is beside no dense projection of the model, such as {', '.join(near)}")
    linear = modules[name]
    if a.ndim != 2 or b.ndim != 2 or (*a.shape, *b.shape) != (len(a), linear.in_features, linear.out_features, len(a)):
        raise BackendError(
            f"adapter {name}: A {a.shape} and B {b.shape} do not fit a projection of {linear.in_features} to "
            f"{linear.out_features}: A must be (r, {linear.in_features}), B ({linear.out_features}, r)"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise BackendError(f"adapter {name} holds numbers that are not finite")
    return Branch(*(torch.tensor(matrix).to(linear.weight) for matrix in (a, b)), scale)
