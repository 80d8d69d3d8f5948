"""What device=cuda does on the card of this machine: speed and identity of arms, copies, decoding, memory.

    python benchmarks/cuda_table.py [--tokens N]

A random Qwen3-MoE of 8 layers x 64 experts, top-8, hidden 1024, width 512, int4, one sequence. Every arm decodes the
same given tokens; its logits are compared bit by bit with those of everything resident. The peak of the library's
allocator stands beside what moebench books on the device. Needs a CUDA device (scripts/gpu_check.sh); the last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moebench.backends.device import DeviceSlots
from moebench.backends.torch_device import TorchDevice
from moebench.backends.torch_device_model import DeviceBackend, DeviceLayout
from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_source import TransformersSource
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop
from moebench.engine.movement import Rules
from moebench.plugins import load_plugins
from moebench.probes import device as probes
from moebench.residency.tier import Tier
from moebench.store.engines import StoreError, open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_pack
from moebench.systemspec import RunContext
from moebench.timeline.moves import DeviceMoves
from moebench.timeline.wall import WallTimeline
from moebench.units import GIB

SHAPE = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 8, "num_experts": 64}
WARM, HOST_SLOTS, PROMPT = 4, 32, 32


@dataclass(frozen=True)
class Arm:
    """One way to hold the experts: the part of them that has a slot on the device, and how they are stored."""

    name: str
    part: float
    codec: str = "none"


ARMS = (Arm("resident", 1.0), Arm("lru, half", 0.5), Arm("lru, an eighth", 0.125), Arm("lru, half, rans", 0.5, "rans"))


@dataclass(frozen=True)
class Found:
    """What an arm did; memory in GiB, booked and as the allocator counted it."""

    arm: str
    tok_s: float
    hit_rate: float
    identical: bool
    booked_gib: float
    allocator_gib: float | None


def random_model(**shape: int) -> Qwen3MoeForCausalLM:
    """Random weights in bf16."""
    torch.manual_seed(0)
    fixed = {"vocab_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3MoeConfig(**fixed, intermediate_size=64, num_experts_per_tok=8, norm_topk_prob=True, **shape)
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


def run(arm: Arm, pack: Any, geometry: Any, device: TorchDevice, tokens: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Logits [tokens, V] of the arm, and what it took."""
    options = {"dtype": "bfloat16", "attention": "sdpa", "numerics": "fast"}
    backend = DeviceBackend(device, pack, pack.dense_path, pack.manifest.model["config"], **options)
    engine, coded = "direct", {"coded": True} if pack.coded else {}
    try:
        reader = open_engine(engine, pack, **coded)
    except StoreError:  # a file system in memory has no direct reads
        reader = open_engine("pread", pack, **coded)
    apart, size = DeviceSlots(device, aligned_buffer), max(pack.slot_bytes, reader.buffer_bytes)
    slots = max(2 * geometry.top_k, int(arm.part * geometry.keys))

    def tier(name: str, count: int) -> Tier:
        arena = apart.tier(name, count, size)
        return Tier(name, count, size, geometry.layers, geometry.experts, "shared", arena)

    tiers = [tier("device", slots), tier("host", HOST_SLOTS)]
    timeline = WallTimeline(reader, lambda name, at: apart.tiers[name][at], DeviceMoves(reader, apart))
    spec, rng = load_plugins().system("lru"), np.random.default_rng(0)
    text = rng.integers(0, geometry.vocabulary, PROMPT + tokens).tolist()
    try:
        system = spec.make(spec.config(), RunContext(geometry, slots, "shared"))
        experts = Experts(geometry, tiers, timeline, Hooks([system, steps := Steps()]), Rules(True, True))
        if slots >= geometry.keys:
            experts.preload()
        loop = Loop(backend, experts)
        out = loop.generate([text[:PROMPT]], tokens, forced=[text[PROMPT:]], keep_logits=True)
        experts.drain()
        held = backend.dense_bytes + slots * size + backend.kv_bytes() + backend.transient_bytes
    finally:
        timeline.close()
    peak = device.peak_bytes()
    took = {"booked_gib": held / GIB, "allocator_gib": None if peak is None else peak / GIB, **steps.numbers()}
    return np.concatenate(out.logits), took


class Steps:
    """Rate and hits of decoded tokens after the first few."""

    from moebench.hookspecs import hookimpl

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.hits = self.requests = 0

    @hookimpl
    def end_step(self, step, record) -> None:
        """One pass ended; its logits are on the host."""
        self.ends.append(time.perf_counter())
        self.hits += sum(record.hits)
        self.requests += sum(record.requests)

    def numbers(self) -> dict[str, float]:
        """tok_s and hit_rate."""
        timed = self.ends[WARM:]
        return {"tok_s": (len(timed) - 1) / (timed[-1] - timed[0]), "hit_rate": self.hits / self.requests}


def table(device: TorchDevice, tokens: int, seconds: float, **shape: int) -> tuple[list[Found], dict[str, float]]:
    """All arms, and rates of link, kernels and decoder in GB/s."""
    source, found, reference = TransformersSource(random_model(**{**SHAPE, **shape}), "bfloat16"), [], None
    geometry = geometry_of(source.model["config"], "random", "int4")
    with tempfile.TemporaryDirectory(dir=".", prefix=".moebench-cuda-") as folder:
        packs = {
            codec: write_pack(Path(folder) / codec, source, QuantSpec("int4"), DeviceLayout(), codec=codec)
            for codec in {arm.codec for arm in ARMS}
        }
        for arm in ARMS:
            logits, took = run(arm, packs[arm.codec], geometry, device, tokens)
            reference = logits if reference is None else reference
            found.append(Found(arm.name, identical=np.array_equal(logits, reference), **took))
    return found, rates(device, seconds)


def rates(device: TorchDevice, seconds: float) -> dict[str, float]:
    """GB/s: copies up and down, int4 experts on one row, decoding on the device."""
    link, each = probes.Link(device, probes.COPY, probes.COPIES), seconds / 4
    amount = probes.COPY * probes.COPIES / 1e9
    measured = {name: probes.rates(turn, amount, each) for name, turn in (("h2d", link.up), ("d2h", link.down))}
    link.close()
    experts = probes.Experts(device)
    measured |= {"int4 experts, one row": experts.gb_s(each), "rans on the device": experts.decoded_gb_s(each)}
    experts.link.close()
    return {name: samples.median for name, samples in measured.items()}


def show(found: list[Found], speeds: dict[str, float]) -> None:
    """For people, then one JSON document."""
    print(f"{'arm':<18}{'tok/s':>8}{'hits':>8}{'identical':>11}{'booked GiB':>12}{'allocator GiB':>15}")
    for row in found:
        peak = "-" if row.allocator_gib is None else f"{row.allocator_gib:.3f}"
        same = "yes" if row.identical else "NO"
        print(f"{row.arm:<18}{row.tok_s:>8.1f}{row.hit_rate:>8.2f}{same:>11}{row.booked_gib:>12.3f}{peak:>15}")
    for name, speed in speeds.items():
        print(f"{name:<26}{speed:>8.2f} GB/s")
    print(json.dumps({"arms": [asdict(row) for row in found], "gb_s": speeds}, separators=(",", ":")))


def main() -> int:
    """0 where all arms give one answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    from moebench.backends.cuda_state import describe
    from moebench.backends.torch_cuda import CudaDevice

    device = CudaDevice()
    print(describe())
    found, speeds = table(device, options.tokens, seconds=20)
    show(found, speeds)
    return 0 if all(row.identical for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
