"""A GGUF file (ggml's docs/gguf.md, version 3) of a Qwen3-MoE that MLX quantised to 4 bits with bias = -8 scale.

Such weights are (code - 8) * scale: ggml's Q4_0 holds the same codes and, where fp16 holds it, the same scale, for 32
weights each instead of 64. So llama.cpp computes with the very numbers that the packs hold. Needs the package gguf.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from moebench.checkpoint.files import Checkpoint
from moebench.errors import UsageError
from moebench.store.quant import from_bf16
from moebench.units import align_up

BLOCK = 32  # weights of a Q4_0 block: fp16 scale, 16 bytes of codes
LOW = np.uint64(0x0F0F0F0F0F0F0F0F)  # the lower four bits of eight bytes
NAMES = {  # of a layer
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps", "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def q4_0(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """Q4_0 blocks, uint8 [..., blocks * 18], of MLX's codes uint32 [..., columns / 8] with scales and biases as bf16
    bits uint16 [..., columns / 64]. Raises ``UsageError`` where the weights would be others.
    """
    scale = from_bf16(scales)
    half = scale.astype(np.float16)
    if (half.astype(np.float32) != scale).any() or (from_bf16(biases) != -8 * scale).any():
        raise UsageError("these weights are no Q4_0: a bias is not -8 times its scale, or a scale no fp16 number")
    source = (
        np.ascontiguousarray(codes).view("<u8").reshape(*codes.shape[:-1], -1, 2)
    )  # [..., blocks, 2], 16 codes each
    first, second = source[..., 0], source[..., 1]
    even = (first & LOW) | ((second & LOW) << np.uint64(4))  # codes 0, 2 ... with 16, 18 ...
    odd = ((first >> np.uint64(4)) & LOW) | (second & ~LOW)
    out = np.empty((*first.shape, 2 + BLOCK // 2), np.uint8)  # codes j and j + 16 in byte j
    out[..., 2::2] = even[..., None].view(np.uint8)
    out[..., 3::2] = odd[..., None].view(np.uint8)
    out[..., :2] = np.repeat(half, 64 // BLOCK, axis=-1)[..., None].view(np.uint8)
    return out.reshape(*codes.shape[:-1], -1)


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF, from its name in the checkpoint."""
    path = name.removesuffix(".weight")
    if path in OUTER:
        return f"{OUTER[path]}.weight"
    layer, _, rest = path.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.weight"


def write_gguf(folder: Path, out: Path) -> list[int]:
    """Write ``out`` from an MLX folder; returns the offset of each layer's router, fp32 [experts, hidden]."""
    try:
        import gguf
    except ImportError:
        raise UsageError("the GGUF file needs the package gguf: pip install gguf") from None
    checkpoint = Checkpoint(folder)
    names = [name for name in checkpoint.tensors if name.endswith(".weight")]
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(out, "qwen3moe")
    _describe(writer, checkpoint.config)
    for name in names:
        stored = checkpoint.tensors[name]
        if stored.dtype == "U32":
            shape = (*stored.shape[:-1], stored.shape[-1] * 8 // BLOCK * (2 + BLOCK // 2))
            kind, dtype = kinds.Q4_0, np.dtype(np.uint8)
        else:
            shape, kind, dtype = stored.shape, kinds.F32, np.dtype(np.float32)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(gguf_name(name), shape, dtype, nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in names:
        writer.write_tensor_data(_tensor(checkpoint, name))
    writer.close()
    os.truncate(out, align_up(out.stat().st_size))  # a loop device has whole sectors
    offsets = {tensor.name: int(tensor.data_offset) for tensor in gguf.GGUFReader(out).tensors}
    return [offsets[f"blk.{layer}.ffn_gate_inp.weight"] for layer in range(checkpoint.config["num_hidden_layers"])]


def _tensor(checkpoint: Checkpoint, name: str) -> np.ndarray:
    path, values = name.removesuffix(".weight"), checkpoint.read(name)
    if checkpoint.tensors[name].dtype != "U32":
        return from_bf16(values)
    return q4_0(values, checkpoint.read(f"{path}.scales"), checkpoint.read(f"{path}.biases"))


def _describe(writer: Any, config: dict[str, Any]) -> None:
    """What llama.cpp reads of a qwen3moe; there is no vocabulary but its size."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_quantization_version(2)
    writer.add_tokenizer_model("none")
