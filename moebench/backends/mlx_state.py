"""What mlx-lm models remember: each sequence has caches of its own, so there is no padding in any attention.

A layer's attention (or whatever else carries state) runs once per sequence over that sequence's own rows. Windows of
drafts run along their paths: a branch attends over a copy of its path's keys, a layer that carries state runs row by
row and keeps the state after each. Knows caches and positions; knows no experts.
"""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from moebench.backends.base import BackendError
from moebench.draft import Draft
from moebench.step import VERIFY, Step

KINDS = (KVCache, RotatingKVCache, ArraysCache)


class Wanted:
    """Handed to a model in place of a mask: what kind it asked for, until the sequence that it is for is known."""

    def __init__(self, return_array: bool = False, window_size: int | None = None) -> None:
        self.return_array, self.window_size = return_array, window_size

    def of(self, cache: Any, rows: int) -> Any:
        """The mask of the next ``rows`` of one sequence, as mlx-lm makes it."""
        if isinstance(cache, ArraysCache):
            return None
        return cache.make_mask(rows, return_array=self.return_array, window_size=self.window_size)


class Layer:
    """Handed to a model as the cache of layer ``index``: it stands for those of all sequences."""

    def __init__(self, index: int) -> None:
        self.index = index

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> Wanted:
        """Every sequence gets its own when its rows run."""
        return Wanted(return_array, window_size)


class Memory:
    """The caches of all sequences of a batch, and the window that verified last."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name
        kinds = {type(cache) for cache in self.empty()}
        if odd := kinds - set(KINDS):
            raise BackendError(f"{name}: backend=mlx cannot keep a {odd.pop().__name__}; use backend=torch")
        self.trees, self.stateful = kinds == {KVCache}, ArraysCache in kinds
        self.layers = [Layer(i) for i in range(len(self.empty()))]
        self.reset(1)

    def empty(self) -> list[Any]:
        """The caches of one sequence, by layer."""
        return make_prompt_cache(self.model)

    def reset(self, batch: int) -> None:
        """Empty caches for ``batch`` sequences."""
        self.caches = [self.empty() for _ in range(batch)]
        self.lengths, self.spans = [0] * batch, [(0, 0)] * batch
        self.drafts: tuple[Draft, ...] = ()
        self.states: dict[tuple[int, int], list[list[Any]]] = {}

    def begin(self, step: Step, width: int) -> None:
        """A pass over rows [B, width] starts: which columns are each sequence's own, and how they hang together."""
        valid, position = step.valid.reshape(-1, width), step.position.reshape(-1, width)
        self.states, self.drafts = {}, step.drafts if step.phase == VERIFY else ()
        for b, row in enumerate(valid):
            own = np.flatnonzero(row)
            low, high = (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)
            if high - low != len(own) or (len(own) and position[b, low] != self.lengths[b]):
                raise BackendError(f"sequence {b}: its rows do not follow the {self.lengths[b]} tokens before them")
            self.spans[b] = (low, high)
            if self.drafts:
                self._require(b, high - low)
        self.lengths = [length + high - low for length, (low, high) in zip(self.lengths, self.spans, strict=True)]

    def _require(self, b: int, rows: int) -> None:
        if not self.trees and not self.drafts[b].is_chain:
            raise BackendError(f"{self.name} verifies chains of drafts only: not all of its layers are plain attention")
        for cache in self.caches[b]:
            if isinstance(cache, RotatingKVCache) and cache.offset + rows >= cache.max_size:
                raise BackendError(
                    f"{self.name} cannot verify drafts beyond its sliding window of {cache.max_size} positions"
                )

    def retain(self, kept: np.ndarray) -> None:
        """Of the window's rows [B, W] keep those that are true in ``kept``: one path of each sequence."""
        for b, (low, high) in enumerate(self.spans):
            rows = np.flatnonzero(kept[b, low:high])
            start = self.lengths[b] - (high - low)
            self.lengths[b] = start + len(rows)
            for layer, cache in enumerate(self.caches[b]):
                if isinstance(cache, ArraysCache):
                    if (b, layer) in self.states:
                        cache.cache = list(self.states[b, layer][len(rows)])
                elif np.array_equal(rows, np.arange(len(rows))):
                    cache.trim(high - low - len(rows))
                else:
                    columns = mx.array(np.append(np.arange(start), start + rows))
                    hold(cache, [part[..., columns, :] for part in cache.keys_and_values()])
        self.states = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and states that are allocated."""
        return sum(cache.nbytes for caches in self.caches for cache in caches if not cache.empty())


def hold(cache: KVCache, parts: list[mx.array]) -> None:
    """Let ``cache`` hold the keys and values [1, heads, T, size] of ``parts`` and nothing else."""
    cache.keys, cache.values = parts
    cache.offset = parts[0].shape[2]


class PerSequence(nn.Module):
    """Stands for one attention (or convolution, or recurrence): runs it for each sequence over that one's own rows.

    With ``alone`` a sequence's rows run one by one, as in plain decoding.
    """

    def __init__(self, inner: nn.Module, memory: Memory, width: int) -> None:
        super().__init__()
        self.inner, self.memory, self.width, self.alone = inner, memory, width, False
        self.wanted = Wanted()

    def __call__(self, x: mx.array, mask: Wanted, cache: Layer) -> mx.array:
        """x [B, W, H] -> [B, W, H]; rows that are padding are zero."""
        memory, width, parts = self.memory, x.shape[1], []
        self.wanted = mask or Wanted()
        for b, (low, high) in enumerate(memory.spans):
            own = memory.caches[b][cache.index]
            if low == high:
                parts.append(mx.zeros((1, *x.shape[1:]), x.dtype))
                continue
            rows = x[b : b + 1, low:high]
            if memory.drafts and not memory.drafts[b].is_chain:
                y = self._tree(rows, own, memory.drafts[b])
            elif memory.drafts and isinstance(own, ArraysCache):
                y = self._traced(rows, own, memory.states.setdefault((b, cache.index), []))
            else:
                y = self.rows(rows, own)
            parts.append(y if high - low == width else mx.pad(y, ((0, 0), (low, width - high), (0, 0))))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def rows(self, x: mx.array, own: Any) -> mx.array:
        """Rows [1, n, H] that follow each other, and what ``own`` remembers."""
        if self.alone and x.shape[1] > 1:
            return mx.concatenate([self.rows(x[:, i : i + 1], own) for i in range(x.shape[1])], 1)
        return self.inner(x, self.wanted.of(own, x.shape[1]), own)

    def _traced(self, x: mx.array, own: ArraysCache, states: list[list[Any]]) -> mx.array:
        """Row by row; ``states`` gets the state before the first and after each."""
        out = []
        states.append(list(own.cache))
        for i in range(x.shape[1]):
            out.append(self.rows(x[:, i : i + 1], own))
            states.append(list(own.cache))
        return mx.concatenate(out, 1)

    def _tree(self, x: mx.array, own: KVCache, draft: Draft) -> mx.array:
        """The last accepted token, then every node after its own path; ``own`` holds all of them in the end."""
        out = [self.rows(x[:, :1], own)]
        before = own.keys_and_values()
        nodes: list[list[mx.array]] = []
        for i, path in enumerate(draft.ancestors()):
            fork = KVCache()
            columns = [before, *(nodes[j] for j in np.flatnonzero(path[:i]))]
            hold(fork, [mx.concatenate(parts, 2) for parts in zip(*columns, strict=True)])
            out.append(self.rows(x[:, i + 1 : i + 2], fork))
            nodes.append([part[..., -1:, :] for part in fork.keys_and_values()])
        hold(own, [mx.concatenate(parts, 2) for parts in zip(before, *nodes, strict=True)])
        return mx.concatenate(out, 1)


def wrap(model: nn.Module, memory: Memory, width: int) -> None:
    """Put every module of a decoder layer that takes a cache behind ``PerSequence``; rows are ``width`` wide."""
    for layer in model.layers:
        wrapped = False
        for name, child in list(layer.children().items()):
            if not isinstance(child, nn.Module):
                continue
            takes = list(inspect.signature(type(child).__call__).parameters)[1:]
            if "cache" in takes:
                if takes[1:] != ["mask", "cache"]:
                    raise BackendError(
                        f"{memory.name}: {type(child).__name__} takes {', '.join(takes)}; use backend=torch"
                    )
                layer[name], wrapped = PerSequence(child, memory, width), True
        if not wrapped:
            raise BackendError(
                f"{memory.name}: a {type(layer).__name__} has no part that takes a cache; use backend=torch"
            )
    return wrapped
