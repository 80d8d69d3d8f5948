"""A dense transformers model that drafts: its own weights and caches, chains and trees of its likeliest tokens.

Knows nothing of the model it drafts for but the size of its vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from moebench.backends.base import Drafter
from moebench.backends.torch_experts import BackendError
from moebench.backends.torch_geometry import attention_modules, cached_values
from moebench.backends.torch_source import load_model
from moebench.backends.torch_state import cache_argument
from moebench.draft import ROOT, Draft


@dataclass
class _Text:
    """One text: the ids it was asked about, how many of its cached ids can stand, and the cache."""

    asked: np.ndarray
    cached: np.ndarray
    cache: DynamicCache


class TorchDrafter(Drafter):
    """Drafts with the model of ``folder``, never with an id of ``vocabulary`` or above.

    A text that continues one of those remembered goes on from the longest common prefix of ids; others begin anew, in
    the place of what was asked about longest ago.
    """

    def __init__(self, folder: str | Path, dtype: str, vocabulary: int) -> None:
        self.model = load_model(folder, dtype)
        self._cache_name = cache_argument(self.model)
        if {type(layer) for layer in self._empty().layers} != {DynamicLayer}:
            raise BackendError(f"the draft model at {folder} must be dense with full attention in every layer")
        self._vocabulary = min(vocabulary, self.model.config.vocab_size)
        self.reset(1)

    def reset(self, sequences: int) -> None:
        """Forget all texts; from now on remember up to ``sequences``."""
        self._limit, self._texts = sequences, []

    @torch.inference_mode()
    def propose(self, tokens: np.ndarray, depth: int, branching: int = 1) -> Draft:
        """A full tree of ``depth`` levels, each node's children likeliest first; one pass per level."""
        text = self._recall(tokens)
        known = _common(text.cached, tokens[:-1])
        _crop(text.cache, known)
        probability = self._pass(text.cache, tokens[None, known:])
        ids, parents, shares = [], [], []
        level = [ROOT]
        for at in range(depth):
            best = np.argsort(-probability, axis=1, kind="stable")[:, :branching]
            first = len(ids)
            ids += best.ravel().tolist()
            parents += np.repeat(level, best.shape[1]).tolist()
            shares += np.take_along_axis(probability, best, 1).ravel().tolist()
            level = list(range(first, len(ids)))
            if at + 1 < depth:
                text.cache.batch_repeat_interleave(best.shape[1])
                probability = self._pass(text.cache, best.reshape(-1, 1))
        if text.cache.layers[0].keys.shape[0] > 1:
            text.cache.batch_select_indices(torch.tensor([0]))
        likeliest = [ids[node] for node in _first_path(parents)]
        text.asked, text.cached = tokens.copy(), np.append(tokens, likeliest[: depth - 1]).astype(np.int64)
        return Draft(ids, parents, shares)

    def _recall(self, tokens: np.ndarray) -> _Text:
        """The remembered text that ``tokens`` continue, now the latest; else a new one."""
        for text in self._texts:
            if len(text.asked) <= len(tokens) and np.array_equal(text.asked, tokens[: len(text.asked)]):
                break
        else:
            text = _Text(np.zeros(0, np.int64), np.zeros(0, np.int64), self._empty())
        self._texts = [text, *(other for other in self._texts if other is not text)][: self._limit]
        return text

    def _pass(self, cache: DynamicCache, tokens: np.ndarray) -> np.ndarray:
        """Probabilities fp32 [B, vocabulary] of what follows ``tokens`` [B, W]."""
        given = {self._cache_name: cache}
        logits = self.model(input_ids=torch.from_numpy(tokens), use_cache=True, logits_to_keep=1, **given).logits
        return logits[:, -1, : self._vocabulary].float().softmax(-1).numpy()

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    @property
    def vocabulary(self) -> int:
        """Ids that it may propose."""
        return self._vocabulary

    @property
    def bytes_per_level(self) -> int:
        """All weights but an input embedding that is only looked up."""
        embedding = self.model.get_input_embeddings().weight
        tied = embedding.data_ptr() == self.model.get_output_embeddings().weight.data_ptr()
        return self.held_bytes - (0 if tied else embedding.nbytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum({p.data_ptr(): p.nbytes for p in self.model.parameters()}.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return self.model.dtype.itemsize * sum(map(cached_values, attention_modules(self.model)))


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """Length of the common prefix of two id arrays."""
    n = min(len(one), len(two))
    differ = np.flatnonzero(one[:n] != two[:n])
    return int(differ[0]) if len(differ) else n


def _crop(cache: DynamicCache, length: int) -> None:
    """Keep the first ``length`` positions."""
    if length < cache.get_seq_length():
        cache.crop(length - cache.get_seq_length())


def _first_path(parents: list[int]) -> list[int]:
    """Nodes on the path of the first child of each first child."""
    path = [0]
    while path[-1] in parents:
        path.append(parents.index(path[-1]))
    return path
