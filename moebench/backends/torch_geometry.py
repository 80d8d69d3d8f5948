"""The exact sizes of a transformers model, counted on the model itself without memory for its weights.

Knows modules and their parameters; knows no weights and no files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from moebench.backends.torch_experts import BackendError, expert_modules, expert_parameters
from moebench.backends.torch_source import empty_model
from moebench.backends.torch_state import cache_argument, held_bytes, stateful_modules
from moebench.errors import MoebenchError
from moebench.geometry import Geometry


def geometry_of(config: Mapping[str, Any], name: str, quant: str = "int4", group: int = 64) -> Geometry:
    """The geometry of a model, counted on the model itself.

    ``kv_bytes_per_token`` is for a bf16 cache; layers with a sliding window count in full. ``fixed_state_bytes`` are
    recurrent states, which are float32 in every family, and convolution states in bf16. Dense blocks that differ in
    size are inside ``other_parameters``. Raises ``BackendError`` where a layer is neither attention nor carries such
    a state, where layers have unlike experts, or where sizes do not go together.
    """
    model = empty_model(config, "bfloat16")
    try:
        return _counted(model, name, quant, group)
    except MoebenchError:
        raise
    except Exception as error:  # torch and transformers raise whatever a wrong size leads them to
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise BackendError(f"{name}: no geometry of this configuration, its sizes do not go together: {said}") from None


def _counted(model: PreTrainedModel, name: str, quant: str, group: int) -> Geometry:
    modules, text = expert_modules(model), model.config.get_text_config()
    first = next(iter(modules.values()))
    hidden, intermediate = first.down_proj.shape[1:] if not first.is_transposed else first.down_proj.shape[:0:-1]
    if len(kinds := {(m.num_experts, *m.down_proj.shape) for m in modules.values()}) > 1:
        raise BackendError(f"{name}: layers have unlike experts ({len(kinds)} kinds); no geometry for such models")
    attention, stateful = attention_modules(model), stateful_modules(model, cache_argument(model))
    if unknown := set(range(text.num_hidden_layers)) - {*stateful, *(m.layer_idx for m in attention)}:
        raise BackendError(f"{name}: layer {min(unknown)} is neither attention nor carries a known state; no geometry")
    routed = sum(p.numel() for m in modules.values() for p in expert_parameters(m).values())
    shared = [block_width(part, hidden) for block in moe_blocks(model) for part in shared_experts(block)]
    shared_intermediate = sum(shared) // len(modules)
    dense = [block_width(block, hidden) for block in dense_blocks(model)]
    dense_intermediate = dense[0] if len(set(dense)) == 1 else 0
    counted = sum(shared) + (len(dense) * dense_intermediate if dense_intermediate else 0)
    return Geometry(
        name=name,
        layers=len(modules),
        experts=first.num_experts,
        top_k=text.num_experts_per_tok,
        hidden=hidden,
        intermediate=intermediate,
        other_parameters=sum(p.numel() for p in model.parameters()) - routed - 3 * hidden * counted,
        shared_experts=1 if shared_intermediate else 0,
        shared_intermediate=shared_intermediate,
        dense_layers=len(dense) if dense_intermediate else 0,
        dense_intermediate=dense_intermediate,
        quant=quant,
        group=group,
        kv_bytes_per_token=2 * sum(map(cached_values, attention)),
        fixed_state_bytes=sum(state_bytes(module, model) * count for module, count in alike(stateful)),
        vocabulary=text.vocab_size,
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        sources={"*": "counted on the transformers model"},
    )


def moe_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules around the routed experts, in layer order."""
    return [model.get_submodule(name.rpartition(".")[0]) for name in expert_modules(model)]


def shared_experts(block: nn.Module) -> list[nn.Module]:
    """The experts of a block that every token runs through, without the gates of one output that weigh them."""
    return [m for n, m in block.named_children() if n.startswith("shared_") and not isinstance(m, nn.Linear)]


def dense_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of layers without experts, found where other layers have theirs."""
    names = [name.rpartition(".")[0] for name in expert_modules(model)]
    shape = re.compile(r"\d+".join(map(re.escape, re.split(r"\d+", names[0]))))
    return [m for n, m in model.named_modules() if shape.fullmatch(n) and n not in names]


def block_width(block: nn.Module, hidden: int) -> int:
    """The intermediate size of a block of three matrices."""
    return sum(p.numel() for p in block.parameters() if p.dim() == 2) // (3 * hidden)


def alike(modules: Mapping[int, nn.Module]) -> list[tuple[nn.Module, int]]:
    """One module of each class and size, and how many there are."""
    kinds: dict[tuple[type, int], list[nn.Module]] = {}
    for module in modules.values():
        kinds.setdefault((type(module), sum(p.numel() for p in module.parameters())), []).append(module)
    return [(same[0], len(same)) for same in kinds.values()]


def state_bytes(module: nn.Module, model: PreTrainedModel) -> int:
    """Bytes of the states that a stateful module of a model on the meta device keeps for one sequence."""
    cache = DynamicCache(config=model.config)
    token = torch.empty(1, 1, model.config.get_text_config().hidden_size, dtype=model.dtype, device="meta")
    with torch.inference_mode():
        module(token, **{cache_argument(model): cache})
    return held_bytes(cache)


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
