"""A tiny random Llama with tinymoe's tokenizer, in the place of SmolLM2."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moebench.models.smollm2_moe.student import Shape

SHAPE = Shape(neurons=256, hidden=64, shared=64, experts=8, top_k=4, width=32)


def make_tokenizer():
    """The tokenizer of tinymoe."""
    return AutoTokenizer.from_pretrained(Path(str(resources.files("moebench.models.tinymoe"))) / "checkpoint")


def make_dense():
    """LlamaForCausalLM with sharp random weights, fp32."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    return model


def make_ids():
    """int64 [24, 64], uniform."""
    return np.random.default_rng(0).integers(2, 384, (24, 64))
