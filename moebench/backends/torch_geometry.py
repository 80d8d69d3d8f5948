"""The exact sizes of a transformers model, counted on the model itself without memory for its weights.

Knows modules and their parameters; knows no weights and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from moebench.backends.torch_experts import BackendError, expert_modules, expert_parameters
from moebench.backends.torch_source import empty_model
from moebench.geometry import Geometry


def geometry_of(config: Mapping[str, Any], name: str, quant: str = "int4", group: int = 64) -> Geometry:
    """The geometry of an attention-only model, counted on the model itself (without memory for its weights).

    ``kv_bytes_per_token`` is for a bf16 cache; layers with a sliding window count in full. Dense blocks of first layers
    are inside ``other_parameters``.
    """
    model = empty_model(config, "bfloat16")
    modules = expert_modules(model)
    first = next(iter(modules.values()))
    hidden, intermediate = first.down_proj.shape[1:] if not first.is_transposed else first.down_proj.shape[:0:-1]
    routed = sum(p.numel() for m in modules.values() for p in expert_parameters(m).values())
    shared = sum(p.numel() for n, p in model.named_parameters() if "shared_expert" in n and p.shape != (1, hidden))
    shared_intermediate = shared // (3 * hidden * len(modules))
    total = sum(p.numel() for p in model.parameters())
    text = model.config.get_text_config()
    attention = attention_modules(model)
    if len(attention) != text.num_hidden_layers:
        raise BackendError(
            f"{name}: {len(attention)} of {text.num_hidden_layers} layers are attention; no geometry for others"
        )
    return Geometry(
        name=name,
        layers=len(modules),
        experts=first.num_experts,
        top_k=text.num_experts_per_tok,
        hidden=hidden,
        intermediate=intermediate,
        other_parameters=total - routed - shared_intermediate * 3 * hidden * len(modules),
        shared_experts=1 if shared_intermediate else 0,
        shared_intermediate=shared_intermediate,
        quant=quant,
        group=group,
        kv_bytes_per_token=2 * sum(map(cached_values, attention)),
        vocabulary=text.vocab_size,
        tied=bool(text.tie_word_embeddings),
        sources={"*": "counted on the transformers model"},
    )


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of a model, in layer order."""
    return [m for m in model.modules() if hasattr(m, "num_key_value_groups") and hasattr(m, "scaling")]


def cached_values(attention: nn.Module) -> int:
    """Numbers that one attention module caches per token: keys and values, or the latent of a compressed cache."""
    if hasattr(attention, "kv_lora_rank"):
        return attention.kv_lora_rank + attention.qk_rope_head_dim
    _, kv_heads, key, value = head_shape(attention)
    return kv_heads * (key + value)


def head_shape(attention: nn.Module) -> tuple[int, int, int, int]:
    """(query heads, key-value heads, key size, value size) of one attention module."""
    heads = attention.config.num_attention_heads
    head = getattr(attention, "head_dim", None)
    key, value = getattr(attention, "qk_head_dim", head), getattr(attention, "v_head_dim", head)
    return heads, heads // attention.num_key_value_groups, key, value
