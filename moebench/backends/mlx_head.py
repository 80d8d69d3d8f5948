"""The head of an mlx model, which computes logits of the rows that are asked for and of no others."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from moebench.backends.base import BackendError
from moebench.backends.mlx_load import owner


class Asked:
    """Which rows' logits the pass under way is asked for: all, or the last of each sequence."""

    all_rows = False

    def of(self, x: mx.array) -> mx.array:
        """The rows of x [B, W, H] that are asked for."""
        return x if self.all_rows else x[:, -1:]


class AsLinear(nn.Module):
    """An embedding as the head that it also is; no parameters of its own."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "embedding", embedding)

    def __call__(self, x: mx.array) -> mx.array:
        return self.embedding.as_linear(x)


class Head(nn.Module):
    """Stands for a head of its own."""

    def __init__(self, inner: nn.Module, asked: Asked) -> None:
        super().__init__()
        self.inner, self.asked = inner, asked

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(self.asked.of(x))


class TiedHead(nn.Module):
    """Stands for an embedding that is the head too."""

    def __init__(self, inner: nn.Module, asked: Asked) -> None:
        super().__init__()
        self.inner, self.product, self.asked = inner, AsLinear(inner), asked

    def __call__(self, ids: mx.array) -> mx.array:
        return self.inner(ids)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.product(self.asked.of(x))


def wrap_head(model: nn.Module) -> Asked:
    """Let the head of ``model`` compute what is asked for."""
    asked, paths = Asked(), dict(model.named_modules())
    for ending, stand_in in (("lm_head", Head), ("embed_tokens", TiedHead), ("word_embeddings", TiedHead)):
        for path, module in paths.items():
            if path.rpartition(".")[2] == ending:
                parent, name = owner(model, path)
                parent[name] = stand_in(module, asked)
                return asked
    raise BackendError(f"{model.model_type}: mlx-lm's model has no lm_head and no embed_tokens; use backend=torch")
