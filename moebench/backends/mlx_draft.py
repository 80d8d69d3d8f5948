"""A dense model of mlx-lm that drafts: its own weights and caches, chains and trees of its likeliest tokens.

Knows nothing of the model it drafts for but the size of its vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from moebench.backends.base import BackendError
from moebench.backends.drafting import TextDrafter
from moebench.backends.mlx_load import empty_model, load_dense, plain_config
from moebench.backends.mlx_state import hold
from moebench.backends.torch_source import load_config


class MlxDrafter(TextDrafter):
    """Drafts with the model of ``folder``, never with an id of ``vocabulary`` or above."""

    def __init__(self, folder: str | Path, vocabulary: int) -> None:
        folder = Path(folder)
        files = sorted(folder.glob("*.safetensors"))
        if not (folder / "config.json").is_file() or not files:
            raise BackendError(f"no model at {folder}: it has no config.json, or no safetensors")
        config = plain_config(load_config(folder))
        self.model = empty_model(config)
        load_dense(self.model, {}, config, False, *files)
        if {type(cache) for cache in self.empty()} != {KVCache}:
            raise BackendError(f"the draft model at {folder} must be dense with full attention in every layer")
        super().__init__(min(vocabulary, config["vocab_size"]))
        self._cached_bytes = self._bytes_of_one_token()
        self.tied = bool(config.get("tie_word_embeddings"))

    def _bytes_of_one_token(self) -> int:
        cache = self.empty()
        self.probabilities(cache, np.zeros((1, 1), np.int64))
        return sum(part.nbytes for layer in cache for part in layer.keys_and_values())

    def empty(self) -> list[KVCache]:
        """Caches that hold nothing, by layer."""
        return make_prompt_cache(self.model)

    def crop(self, cache: list[KVCache], length: int) -> None:
        """Keep the first ``length`` positions."""
        for layer in cache:
            layer.trim(layer.offset - length)

    def multiply(self, cache: list[KVCache], times: int) -> None:
        """Each row ``times`` times in a row; 0: only the first row of all."""
        for layer in cache:
            parts = layer.keys_and_values()
            hold(layer, [mx.repeat(part, times, 0) if times else part[:1] for part in parts])

    def probabilities(self, cache: list[KVCache], tokens: np.ndarray) -> np.ndarray:
        """fp32 [B, vocabulary] of what follows ``tokens`` [B, W]."""
        logits = self.model(mx.array(tokens), cache=cache)[:, -1, : self._vocabulary].astype(mx.float32)
        return np.array(mx.softmax(logits, axis=-1, precise=True))

    @property
    def bytes_per_level(self) -> int:
        """All weights but an input embedding that is only looked up."""
        parameters = dict(tree_flatten(self.model.parameters()))
        looked_up = sum(value.nbytes for name, value in parameters.items() if "embed_tokens." in name)
        return self.held_bytes - (0 if self.tied else looked_up)

    @property
    def held_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(value.nbytes for _, value in tree_flatten(self.model.parameters()))

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return self._cached_bytes
