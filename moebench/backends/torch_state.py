"""What a model remembers between passes, and how it forgets rejected drafts: keys and values, and recurrent states.

Keys and values of single positions can be taken out. A recurrent or convolution state cannot be cropped: transformers'
own crop of a cache leaves the recurrent states as they are, which is silently wrong. So while a window is verified the
layers that carry one run position by position, as in plain decoding, and the state after each is kept. Row-invariant
numerics runs them so in every pass: what a family computes a prompt's state by gives other last bits than its steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from moebench.backends.torch_experts import BackendError
from moebench.backends.torch_settled import Settled

State = dict[tuple[str, int], torch.Tensor]


def cache_argument(model: PreTrainedModel) -> str:
    """What ``forward`` calls its cache: transformers renamed the argument on the way to version 6."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def stateful_modules(model: PreTrainedModel, cache_name: str) -> dict[int, nn.Module]:
    """The modules that carry a recurrent or convolution state, by layer."""
    layers = DynamicCache(config=model.config).layers
    stateful = {i for i, layer in enumerate(layers) if type(layer) is LinearAttentionLayer}
    found: dict[int, nn.Module] = {}
    for module in model.modules():  # a layer's own module comes after the blocks around it
        index = getattr(module, "layer_idx", None)
        if index in stateful and cache_name in inspect.signature(module.forward).parameters:
            found[index] = module
    return found


class Memory:
    """The layers of one model that remember: which kinds it has, and the states of a window under way."""

    valid: torch.Tensor | None = None  # bool [B, W]: which rows of the pass under way are tokens; None: all

    def __init__(self, model: PreTrainedModel, cache_name: str, stepwise: bool) -> None:
        self.name, layers = type(model).__name__, DynamicCache(config=model.config).layers
        self.kinds, self.stepwise = {type(layer) for layer in layers}, stepwise
        self._states: dict[int, list[State]] | None = None
        self._cache: DynamicCache | None = None
        self.modules = stateful_modules(model, cache_name)
        self.untraced = {i for i, layer in enumerate(layers) if type(layer) is LinearAttentionLayer} - {*self.modules}
        for index, module in self.modules.items():
            module.forward = partial(self._forward, module.forward, index)

    @property
    def trees(self) -> bool:
        """Whether every layer is attention, so that siblings can be verified side by side."""
        return self.kinds <= {DynamicLayer, DynamicSlidingWindowLayer}

    def require(self, cache: DynamicCache, batch: int, length: int) -> None:
        """Raise ``BackendError`` unless a window that ends at ``length`` positions can be rolled back."""
        other = self.kinds - {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}
        if other or self.untraced:
            kind = next(iter(other), LinearAttentionLayer).__name__
            raise BackendError(f"{self.name} cannot verify drafts: it cannot forget what a {kind} holds")
        if batch > 1 and self.kinds != {DynamicLayer}:
            kinds = ", ".join(sorted(kind.__name__ for kind in self.kinds - {DynamicLayer}))
            raise BackendError(
                f"{self.name} verifies drafts for one sequence at a time, as it has {kinds}: "
                "set workload.batch=1 and quality=none"
            )
        for layer in cache.layers:
            if type(layer) is DynamicSlidingWindowLayer and length >= layer.sliding_window:
                raise BackendError(
                    f"{self.name} cannot verify drafts beyond its sliding window of {layer.sliding_window} positions"
                )

    @contextmanager
    def window(self, cache: DynamicCache) -> Iterator[None]:
        """Keep the state after every position of the pass in the block."""
        self._cache, self._states = cache, {}
        try:
            yield
        finally:
            self._cache = None

    def _forward(self, plain: Any, index: int, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """A stateful layer's forward, with padding as zeros, which the mask is for; where it has to be, one position
        after another.
        """
        kwargs = {**kwargs, "attention_mask": None}
        if self.valid is not None:  # a family's own mask leaves single columns out
            hidden_states = hidden_states * self.valid[..., None]
        if self._cache is None and not self.stepwise:
            return plain(hidden_states, **kwargs)
        states, out = [], []
        for at in range(hidden_states.shape[1]):
            with Settled() if self.stepwise else nullcontext():
                out.append(plain(hidden_states[:, at : at + 1], **kwargs))
            if self._cache is not None:
                states.append({name: state.clone() for name, state in _states(self._cache.layers[index]).items()})
        if self._cache is not None:
            self._states[index] = states
        return torch.cat(out, 1)

    @torch.inference_mode()
    def keep(self, cache: DynamicCache, columns: np.ndarray, rows: int) -> None:
        """Keep the cached ``columns`` (int64, ascending) and, where there is state, the one after the first ``rows``
        of the window.
        """
        index = torch.from_numpy(columns)
        for at, layer in enumerate(cache.layers):
            if at in (self._states or {}):
                for name, state in _states(layer).items():
                    state.copy_(self._states[at][rows - 1][name])
            else:
                index = index.to(layer.keys.device)
                layer.keys, layer.values = layer.keys.index_select(-2, index), layer.values.index_select(-2, index)
                if type(layer) is DynamicSlidingWindowLayer:
                    layer.cumulative_length = len(columns)
        self.forget()

    def forget(self) -> None:
        """Drop the states of the last window."""
        self._states = None


def held_bytes(cache: DynamicCache) -> int:
    """Bytes of all keys, values and states held."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            total += layer.keys.nbytes + layer.values.nbytes
        total += sum(state.nbytes for state in _states(layer).values())
    return total


def _states(layer: Any) -> State:
    """Recurrent and convolution states of one cache layer; empty for attention."""
    kinds = {"conv": getattr(layer, "conv_states", {}), "recurrent": getattr(layer, "recurrent_states", {})}
    return {(kind, i): state for kind, states in kinds.items() for i, state in states.items() if state is not None}
