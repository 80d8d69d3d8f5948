"""What the experts function costs: decode with every expert resident, against plain transformers generate.

    python benchmarks/decode_overhead.py [--tokens N] [--rounds N]

A model of tinymoe's shape, random weights, bf16, eager attention, one thread. Rounds of all arms alternate, so that a
busy machine slows all alike; medians are printed, and the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moebench.backends.probe import plain_kernels
from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_model import TorchBackend
from moebench.backends.torch_source import TransformersSource
from moebench.step import DECODE, PREFILL, Step
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_pack

PROMPT = np.arange(3, 67)[None]


def tiny_model() -> Qwen3MoeForCausalLM:
    """tinymoe's shape: hidden 128, width 64, 8 layers, 32 experts, top-4."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=384,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        eos_token_id=None,
        initializer_range=0.05,
    )
    config._attn_implementation = "eager"
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


class Resident:
    """Every expert in memory, no policy."""

    def __init__(self, pack) -> None:
        self.buffers = []
        for layer in range(pack.layers):
            self.buffers.append([aligned_buffer(pack.slot_bytes) for _ in range(pack.experts)])
            for expert, buffer in enumerate(self.buffers[-1]):
                pack.read(layer * pack.experts + expert, buffer)
        self.valid = None

    def serve(self, layer, hidden, native):
        """The native routing and its experts."""
        buffers = self.buffers[layer]
        return native, ((expert, buffers[expert]) for expert in native.demand(self.valid))


def one_pass(backend, server, tokens: np.ndarray, past: int, phase: int) -> int:
    """One forward pass of one sequence; the greedy next token."""
    width = tokens.shape[1]
    position = np.arange(past, past + width, dtype=np.int32)
    step = Step(past, phase, np.zeros(width, np.int32), position, np.ones(width, bool))
    server.valid = step.valid
    return int(backend.forward(step, tokens, server)[0].argmax())


def decode(backend, server, count: int) -> float:
    """Milliseconds per token over ``count`` single-row steps after the prompt."""
    backend.reset(1)
    token = one_pass(backend, server, PROMPT, 0, PREFILL)
    started = time.perf_counter()
    for i in range(count):
        token = one_pass(backend, server, np.array([[token]]), PROMPT.shape[1] + i, DECODE)
    return (time.perf_counter() - started) / count * 1e3


def generate(model, count: int) -> float:
    """Milliseconds per token of transformers' greedy generate, its prefill taken off."""
    prompt = torch.from_numpy(PROMPT)
    spent = {}
    for n in (1, count + 1):
        started = time.perf_counter()
        model.generate(prompt, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
        spent[n] = time.perf_counter() - started
    return (spent[count + 1] - spent[1]) / count * 1e3


def main() -> None:
    """Run all arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, arms = tiny_model(), {}
    with tempfile.TemporaryDirectory() as folder:
        for quant in ("none", "int8", "int4"):
            source = TransformersSource(model)
            pack = write_pack(Path(folder) / quant, source, QuantSpec(quant), TorchCpuLayout())
            for numerics in ("fast", "row_invariant"):
                config = pack.manifest.model["config"]
                backend = TorchBackend(pack, pack.dense_path, config, numerics=numerics)
                server = Resident(pack)
                arms[f"moebench {quant} {numerics}"] = lambda n, b=backend, s=server: decode(b, s, n)
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        for numerics in ("fast", "row_invariant"):

            def arm(n: int, implementation: str = implementation, plain: bool = numerics == "row_invariant") -> float:
                model.set_experts_implementation(implementation)
                with plain_kernels(plain):
                    return generate(model, n)

            arms[f"generate {implementation} {numerics}"] = arm
    with torch.inference_mode():
        for run in arms.values():
            run(4)
        samples = {name: [] for name in arms}
        for _ in range(arguments.rounds):
            for name, run in arms.items():
                samples[name].append(run(arguments.tokens))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    default = medians["generate grouped_mm fast"]  # what transformers does when nothing is chosen
    print(f"{'arm':34s} {'ms/token':>9s} {'vs default generate':>20s}")
    for name, value in medians.items():
        print(f"{name:34s} {value:9.2f} {value / default:19.2f}x")
    print(json.dumps({"ms_per_token": medians, "rounds": arguments.rounds, "tokens": arguments.tokens}))


if __name__ == "__main__":
    main()
