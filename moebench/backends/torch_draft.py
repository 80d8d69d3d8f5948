"""A dense transformers model that drafts: its own weights and caches, chains and trees of its likeliest tokens.

Knows nothing of the model it drafts for but the size of its vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from moebench.backends.base import BackendError
from moebench.backends.drafting import TextDrafter
from moebench.backends.torch_geometry import attention_modules, cached_values
from moebench.backends.torch_source import load_model
from moebench.backends.torch_state import cache_argument
from moebench.draft import Draft


class TorchDrafter(TextDrafter):
    """Drafts with the model of ``folder``, never with an id of ``vocabulary`` or above."""

    def __init__(self, folder: str | Path, dtype: str, vocabulary: int) -> None:
        self.model = load_model(folder, dtype)
        self._cache_name = cache_argument(self.model)
        if {type(layer) for layer in self.empty().layers} != {DynamicLayer}:
            raise BackendError(f"the draft model at {folder} must be dense with full attention in every layer")
        super().__init__(min(vocabulary, self.model.config.vocab_size))

    @torch.inference_mode()
    def propose(self, tokens: np.ndarray, depth: int, branching: int = 1) -> Draft:
        """A full tree of ``depth`` levels, each node's children likeliest first; one pass per level."""
        return super().propose(tokens, depth, branching)

    def empty(self) -> DynamicCache:
        """A cache that holds nothing."""
        return DynamicCache(config=self.model.config)

    def crop(self, cache: DynamicCache, length: int) -> None:
        """Keep the first ``length`` positions."""
        if length < cache.get_seq_length():
            cache.crop(length - cache.get_seq_length())

    def multiply(self, cache: DynamicCache, times: int) -> None:
        """Each row ``times`` times in a row; 0: only the first row of all."""
        if times:
            cache.batch_repeat_interleave(times)
        elif cache.layers[0].keys.shape[0] > 1:
            cache.batch_select_indices(torch.tensor([0], device=self.model.device))

    def probabilities(self, cache: DynamicCache, tokens: np.ndarray) -> np.ndarray:
        """fp32 [B, vocabulary] of what follows ``tokens`` [B, W]."""
        given = {self._cache_name: cache}
        ids = torch.from_numpy(tokens).to(self.model.device)
        logits = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits
        return logits[:, -1, : self._vocabulary].float().softmax(-1).cpu().numpy()

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
