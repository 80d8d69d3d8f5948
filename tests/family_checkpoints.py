"""Tiny random checkpoints of many MoE families in the hub's own key layout, as transformers' ``save_pretrained`` writes
them, with the embedded model's tokenizer.

Weights are wide enough for routing not to be degenerate; hidden and intermediate sizes are multiples of 64.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from moebench.geometry import embedded_folder

logging.disable_progress_bar()

COMMON = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 64,
    "num_key_value_heads": 4,
    "head_dim": None,
}
QWEN = {"num_experts": 8, "moe_intermediate_size": 64, "norm_topk_prob": True}
HYBRID = {
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
# name: (model type, settings over COMMON); head_dim None is left to the family's own default
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 128}),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "tie_word_embeddings": True}),
    "qwen3_next": ("qwen3_next", HYBRID),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID),
    "olmoe": ("olmoe", {"num_experts": 8, "num_key_value_heads": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 8}),
    "deepseek_v2": ("deepseek_v2", {**GROUPED, **LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", {**GROUPED, **LATENT}),
    "kimi": ("deepseek_v3", {**GROUPED, **LATENT, "n_group": 1, "topk_group": 1}),
    "glm4_moe": ("glm4_moe", {**GROUPED, "head_dim": 32, "num_key_value_heads": 2, "use_qk_norm": True}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8, "sliding_window": 8}),
    "granitemoe": ("granitemoe", {"num_local_experts": 8, "tie_word_embeddings": True}),
    "phimoe": ("phimoe", {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1, "num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {**GROUPED, **LATENT, "num_experts": 8, "num_shared_experts": 1, "layer_group_size": 2},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {"num_experts": 8, "moe_intermediate_size": 64, "num_dense_layers": 1, "num_hidden_layers": 3,
         "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True},
    ),
    "dots1": ("dots1", {**GROUPED, "head_dim": 32, "layer_types": ["full_attention"] * 3}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 8}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 2}),
    "flex_olmo": ("flex_olmo", {"num_experts": 8, "num_key_value_heads": 4}),
    "gpt_oss_mxfp4": ("gpt_oss", {"num_local_experts": 8, "sliding_window": 8}),
    "qwen3_moe_fp8": ("qwen3_moe", {**QWEN, "tie_word_embeddings": False}),
}  # fmt: skip


def native(name: str, dtype: str = "bfloat16", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of one family whose weights are bf16 numbers, in ``dtype``."""
    kind, settings = FAMILIES[name]
    settings = {"vocab_size": _vocabulary(), **COMMON, **settings, **changes}
    if settings["head_dim"] is None:
        del settings["head_dim"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = CONFIG_MAPPING[kind](**settings)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        _widen(model)
    return model


def make_checkpoint(
    name: str, folder: str | Path, *, tokenizer: bool = True, shards: int = 1, dtype: str = "bfloat16", **changes: Any
) -> Path:
    """Write the checkpoint of family ``name`` into ``folder`` with the hub's keys, as ``shards`` files or about."""
    folder = Path(folder)
    model = native(name, dtype, **changes)
    nbytes = sum(p.nbytes for p in model.parameters())
    size = "50GB" if shards == 1 else nbytes // shards + 1
    model.save_pretrained(folder, max_shard_size=size)
    config = json.loads((folder / "config.json").read_text())
    if name == "kimi":
        config |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    if name == "gpt_oss_mxfp4":
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}  # fmt: skip
        _rewrite(folder, _to_mxfp4)
    if name == "qwen3_moe_fp8":
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [64, 32],
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
        _rewrite(folder, _to_fp8)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if tokenizer:
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(embedded_folder() / file, folder / file)
    return folder


@cache
def _vocabulary() -> int:
    config = json.loads((embedded_folder() / "config.json").read_text())
    return config["vocab_size"]


@torch.no_grad()
def _widen(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "bias" not in name:
            parameter.mul_(3)
        elif "norm" not in name and ("bias" in name or "sinks" in name):
            parameter.normal_(std=0.1)
        parameter.copy_(parameter.bfloat16())
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "expert_bias" in name:
            buffer.normal_(std=0.1)


def _rewrite(folder: Path, convert: Any) -> None:
    """Convert every tensor of a folder's files in place; an index keeps its shards."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text()) if index_path.exists() else None
    for path in sorted(folder.glob("*.safetensors")):
        made: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            made |= convert(name, tensor)
        save_file(made, path, metadata={"format": "pt"})
        if index:
            index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != path.name}
            index["weight_map"] |= dict.fromkeys(made, path.name)
    if index:
        index_path.write_text(json.dumps(index))


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _to_mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fused expert matrices [E, in, out] as blocks of 32 inputs [E, out, in/32, 16] with exponents [E, out, in/32]."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    blocks = tensor.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (blocks.abs().amax(-1).clamp_min(2.0**-100).log2().floor() - 2).clamp(-127, 128)
    codes = ((blocks / exponent.exp2()[..., None])[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    return {
        f"{name}_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4),
        f"{name}_scales": (exponent + 127).to(torch.uint8),
    }


def _to_fp8(name: str, tensor: torch.Tensor, block: tuple[int, int] = (64, 32)) -> dict[str, torch.Tensor]:
    """Linear weights as float8 with one fp32 scale a block; embeddings, norms, routers and the head stay."""
    if tensor.dim() != 2 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
        return {name: tensor}
    rows, columns = tensor.shape
    blocks = tensor.float().view(rows // block[0], block[0], columns // block[1], block[1])
    scale = blocks.abs().amax((1, 3)) / 448
    quantised = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return {name: quantised, name.replace(".weight", ".weight_scale_inv"): scale}
