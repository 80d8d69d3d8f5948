"""The configuration that a model of random weights has: the geometry's own family, or a Qwen3-MoE of its sizes.

Knows the names that families give to counts of layers and experts; builds no model.
"""

from __future__ import annotations

from typing import Any

from moebench.errors import UsageError
from moebench.model_card import ModelCard

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # one of them in each family
STAND_IN = "qwen3_moe"
HEAD = 128  # width of the stand-in's attention heads
# A tied head would make every token its own likeliest successor; no token ends a text of random weights.
ALWAYS = {
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}


def configure(card: ModelCard, layers: int, experts: int, quant: str) -> dict[str, Any]:
    """``config.json`` with so many layers with experts, and experts in each; dense first layers stay.

    Own sizes where the geometry's file has its configuration; MLX's layout (int4) is written for Qwen3-MoE alone.
    """
    shape = card.geometry
    if not 1 <= layers <= shape.layers:
        raise UsageError(f"layers must be 1 to {shape.layers}, as {shape.name} has, got {layers}")
    if experts < shape.top_k:
        raise UsageError(f"experts must be at least the {shape.top_k} that {shape.name} chooses, got {experts}")
    config = card.config
    if config and (quant == "none" or config["model_type"] == STAND_IN):
        return {**_cut(config, shape.dense_layers + layers), **ALWAYS, _experts_key(config): experts}
    head = min(HEAD, shape.hidden)
    heads = max(1, shape.hidden // head)
    return {
        "model_type": STAND_IN,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": next(n for n in (4, 2, 1) if heads % n == 0),
        "head_dim": head,
        "num_experts": experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        **ALWAYS,
    }


def is_stand_in(card: ModelCard, config: dict[str, Any]) -> bool:
    """Whether this configuration is not that of the geometry's own family."""
    return card.config.get("model_type") != config["model_type"]


def _experts_key(config: dict[str, Any]) -> str:
    return next(key for key in EXPERTS if key in config)


def _cut(config: dict[str, Any], depth: int) -> dict[str, Any]:
    """The first layers of a model, lists of layers cut with them; one layer that attends is kept."""
    before, config = config["num_hidden_layers"], dict(config)
    config["num_hidden_layers"] = depth
    if "moe_layer_end_index" in config:
        config["moe_layer_end_index"] = depth - 1
    for key, value in config.items():
        if isinstance(value, list) and len(value) == before:
            config[key] = value[:depth]
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = list(getattr(CONFIG_MAPPING[config["model_type"]].from_dict(config), "layer_types", None) or ())
    if kinds and all(kind in ("linear_attention", "conv") for kind in kinds):
        config["layer_types"] = [*kinds[:-1], "full_attention"]
    return config
