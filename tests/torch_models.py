"""Tiny random models of six families, packs of them and a server without a policy, for tests of the torch backend."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_model import TorchBackend
from moebench.backends.torch_source import TransformersSource
from moebench.checkpoint.open import open_source
from moebench.step import DECODE, Step
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_pack

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "qwen3_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "intermediate_size": 48,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": None},
    "olmoe": {"num_experts": 8, "intermediate_size": 32, "num_key_value_heads": 4},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "intermediate_size": 48,
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 8},
    "granitemoe": {"num_local_experts": 8, "intermediate_size": 32},
}


def native_model(family: str, seed: int = 0, **changes):
    """A random fp32 model whose expert weights are bf16 numbers, with transformers' eager experts and attention."""
    torch.manual_seed(seed)
    settings = {**COMMON, **FAMILIES[family], **changes}
    if family == "deepseek_v3":
        del settings["head_dim"]
    config = CONFIG_MAPPING[family](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_(std=0.1)
            parameter.copy_(parameter.bfloat16())
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(std=0.1)
    model.set_experts_implementation("eager")
    return model


def make_pack(folder, model, quant=None, dtype="float32"):
    """Write ``model``, in memory or a folder, as a pack below ``folder``."""
    source = TransformersSource(model, dtype) if isinstance(model, PreTrainedModel) else open_source(model)
    return write_pack(folder / "pack", source, quant or QuantSpec("none"), TorchCpuLayout())


def make_backend(pack, **options):
    """A backend over ``pack`` that takes any numerics unless told."""
    config = pack.manifest.model["config"]
    return TorchBackend(pack, pack.dense_path, config, **{"dtype": "float32", "numerics": "fast", **options})


class DictServer:
    """Every expert in memory; ``shuffle`` (a random generator) yields them in any order, from one reused slot."""

    def __init__(self, pack, shuffle=None):
        self.experts, self.shuffle, self.demands = pack.experts, shuffle, []
        self.buffers = [aligned_buffer(pack.slot_bytes) for _ in range(pack.keys)]
        for key, buffer in enumerate(self.buffers):
            pack.read(key, buffer)
        self.slot = aligned_buffer(pack.slot_bytes)
        self.valid = None

    def begin(self, step):
        self.valid = step.valid

    def routing(self, layer, native):
        return native

    def serve(self, layer, hidden, native):
        routing = self.routing(layer, native)
        demand = routing.demand(self.valid)
        self.demands.append(demand)
        return routing, self.items(layer, demand)

    def items(self, layer, demand):
        if self.shuffle is None:
            yield from ((e, self.buffers[layer * self.experts + e]) for e in demand)
            return
        for expert in self.shuffle.permutation(demand).tolist():
            self.slot[:] = self.buffers[layer * self.experts + expert]
            yield expert, self.slot
            self.slot[:] = 0xFF  # bytes are valid only until the next expert is asked for


def step_of(valid, past=None, phase=DECODE, index=0):
    """A step over [B, W] rows, of which ``valid`` are tokens, after ``past`` tokens per sequence."""
    valid = np.asarray(valid, bool)
    past = np.zeros(len(valid), int) if past is None else np.asarray(past)
    position = past[:, None] + np.cumsum(valid, axis=1) - 1
    sequence = np.repeat(np.arange(len(valid)), valid.shape[1])
    return Step(index, phase, sequence.astype(np.int32), position.reshape(-1).astype(np.int32), valid.reshape(-1))


def run(backend, server, tokens, *, valid=None, past=None, all_rows=False):
    """One forward pass of tokens [B, W] through ``server``."""
    tokens = np.asarray(tokens)
    step = step_of(np.ones(tokens.shape, bool) if valid is None else valid, past)
    if server is not None:
        server.begin(step)
    return backend.forward(step, tokens, server, all_rows)
