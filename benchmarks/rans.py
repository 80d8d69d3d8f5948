"""What entropy coding saves and costs: entropy of bytes, coded size, decoding speed, and the disks for which it pays.

    python benchmarks/rans.py [--rounds N] [--mib N]

Gaussian weights in five formats, and tinymoe's own packs. Decoders: compiled, on one thread and on two at once; torch
on the CPU, and on CUDA where there is one. Speed is decoded bytes per second of processor time of each thread (on CUDA
of the clock), so that others on the machine do not count; rounds of all arms alternate. The last line is one JSON
document. With ratio r, disk B and decoder D (GB/s of decoded bytes) a read followed by its decoding takes less time
than a plain read where r/B + 1/D < 1/B, so below B = D (1 - r); with both overlapped where max(r/B, 1/D) < 1/B, so
below B = D, and up to B = r D the whole saving is gained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from moebench.backends import torch_rans
from moebench.harness.assets import ensure_pack
from moebench.harness.plan import EMBEDDED, embedded_folder
from moebench.store import coded
from moebench.store.extents import place_parts
from moebench.store.layout import QuantSpec, TensorSpec
from moebench.store.plain import PlainLayout
from moebench.store.quant import quantize, to_bf16
from moebench.store.rans import entropy_bytes
from moebench.store.rans_kernels import VECTOR
from moebench.units import GB, MIB

ROWS, COLUMNS = 768, 2048  # of the Gaussian matrices, three to an expert
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # magnitudes of FP4 (OCP Microscaling Formats 1.0)
TORCH_EXPERTS = 8  # decoded together by torch on the CPU
PLANES = {0: "bytes", 1: "exponents", 2: "mantissas"}


@dataclass
class Arm:
    """Experts of one format: slots as they are, and as they are stored."""

    name: str
    specs: tuple[TensorSpec, ...]
    slots: list[np.ndarray]
    stored: list[np.ndarray] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Decoded bytes of all experts."""
        return sum(slot.size for slot in self.slots)

    @property
    def ratio(self) -> float:
        """Stored over decoded bytes."""
        return sum(stored.size for stored in self.stored) / self.nbytes


def nibbles(values: np.ndarray) -> np.ndarray:
    """Two 4-bit values a byte."""
    flat = values.astype(np.uint8).reshape(-1)
    return flat[0::2] | flat[1::2] << 4


def bf16(weights: np.ndarray) -> dict[str, np.ndarray]:
    """Every weight in 16 bits."""
    return {"w": to_bf16(weights)}


def rows(weights: np.ndarray) -> dict[str, np.ndarray]:
    """int4 with one scale a row, its largest weight over 7."""
    scale = np.abs(weights).max(1, keepdims=True) / 7
    return {"w": nibbles(np.clip(np.rint(weights / scale) + 8, 0, 15)), "w.scales": to_bf16(scale)}


def affine(weights: np.ndarray) -> dict[str, np.ndarray]:
    """int4 affine, groups of 64 with scale and bias: this store's own."""
    return PlainLayout().encode(quantize("w", weights, QuantSpec("int4")))


def q4_0(weights: np.ndarray) -> dict[str, np.ndarray]:
    """Like GGUF's Q4_0: groups of 32, the weight of largest magnitude at -8 steps of an fp16 scale."""
    groups = weights.reshape(-1, 32)
    scale = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1) / -8
    return {"w": nibbles(np.clip(np.floor(groups / scale + 8.5), 0, 15)), "w.scales": scale.astype(np.float16)}


def mxfp4(weights: np.ndarray) -> dict[str, np.ndarray]:
    """Like MXFP4: groups of 32 FP4 numbers under a power of two (OCP Microscaling Formats 1.0)."""
    groups = weights.reshape(-1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(1, keepdims=True))) - 2
    between = (GRID[1:] + GRID[:-1]) / 2
    values = np.searchsorted(between, np.abs(groups) / 2**exponent) | (groups < 0) << 3
    return {"w": nibbles(values), "w.scales": (exponent + 127).astype(np.uint8)}


FORMATS: dict[str, Callable[[np.ndarray], dict[str, np.ndarray]]] = {
    "Gaussian bf16": bf16,
    "Gaussian int4 per row": rows,
    "Gaussian int4 affine, group 64": affine,
    "Gaussian Q4_0-like": q4_0,
    "Gaussian MXFP4-like": mxfp4,
}


def arms(mib: int) -> Iterator[Arm]:
    """All arms, about ``mib`` MiB each where there is that much."""
    for name, encode in FORMATS.items():
        slots: list[np.ndarray] = []
        while sum(slot.size for slot in slots) < mib * MIB:
            rng = np.random.default_rng([7, len(slots)])
            parts = {
                f"{matrix}{part}": values
                for matrix in ("gate", "up", "down")
                for part, values in encode(rng.standard_normal((ROWS, COLUMNS), np.float32)).items()
            }
            specs = place_parts(parts)
            slots.append(slot_of(specs, parts))
        yield Arm(name, specs, slots)
    for quant in ("none", "int4"):
        pack = ensure_pack(embedded_folder(), EMBEDDED, quant, "packed")
        slots = [np.empty(pack.expert_bytes, np.uint8) for _ in range(pack.keys)]
        for key, slot in enumerate(slots):
            pack.read(key, slot)
        yield Arm(f"tinymoe {'bf16' if quant == 'none' else quant}", pack.manifest.tensors, slots)


def slot_of(specs: tuple[TensorSpec, ...], parts: dict[str, np.ndarray]) -> np.ndarray:
    """The bytes of one expert."""
    slot = np.zeros(specs[-1].offset + specs[-1].nbytes, np.uint8)
    for spec in specs:
        slot[spec.offset : spec.offset + spec.nbytes] = parts[spec.name].reshape(-1).view(np.uint8)
    return slot


def entropies(arm: Arm) -> tuple[float, dict[str, float]]:
    """Order-0 bound of the ratio with a table of its own for each plane; bits a byte of weight and scale planes."""
    bound, bits = 0.0, {}
    for slot in arm.slots:
        for spec in arm.specs:
            for kind, symbols in coded.planes_of(spec, slot[spec.offset : spec.offset + spec.nbytes]):
                name = f"{'scale' if '.' in spec.name else 'weight'} {PLANES[kind]}"
                nbytes = entropy_bytes(symbols)
                bound += nbytes
                total = bits.setdefault(name, [0.0, 0])
                total[0], total[1] = total[0] + nbytes * 8, total[1] + symbols.size
    return bound / arm.nbytes, {name: total / count for name, (total, count) in bits.items()}


def decode_some(arm: Arm, keys: range, vector: bool) -> float:
    """Decode these experts; seconds of this thread's processor time."""
    begun = time.thread_time()
    for key in keys:
        coded.decode(arm.stored[key], arm.slots[key], vector)
    return time.thread_time() - begun


def decoders() -> dict[str, Callable[[Arm], float]]:
    """Each decodes experts of an arm and returns GB/s of decoded bytes."""
    pools = {threads: ThreadPoolExecutor(threads) for threads in (1, 2)}

    def compiled(threads: int, vector: bool = VECTOR) -> Callable[[Arm], float]:
        def run(arm: Arm) -> float:
            shares = [range(i, len(arm.slots), threads) for i in range(threads)]
            seconds = pools[threads].map(lambda keys: decode_some(arm, keys, vector), shares)
            return arm.nbytes / (sum(seconds) / threads) / GB

        return run

    def on_cpu(arm: Arm) -> float:
        begun = time.process_time()
        torch_rans.decode(arm.stored[:TORCH_EXPERTS], arm.slots[0].size)
        return sum(slot.size for slot in arm.slots[:TORCH_EXPERTS]) / (time.process_time() - begun) / GB

    def on_cuda(arm: Arm) -> float:
        begun = time.perf_counter()
        torch_rans.decode(arm.stored, arm.slots[0].size, "cuda")
        torch.cuda.synchronize()
        return arm.nbytes / (time.perf_counter() - begun) / GB

    found = {"1 thread": compiled(1), "2 threads": compiled(2)}
    if VECTOR:
        found["1 thread, plain loop"] = compiled(1, vector=False)
    found["torch, cpu"] = on_cpu
    return found | ({"torch, cuda": on_cuda} if torch.cuda.is_available() else {})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    every, runs, report = list(arms(options.mib)), decoders(), []
    for arm in every:
        arm.stored = [coded.encode(arm.specs, slot) for slot in arm.slots]
    for index in range(options.rounds):
        for arm in every:
            for name, run in runs.items():
                if name != "torch, cpu" or index < 2:  # seconds each
                    arm.rates.setdefault(name, []).append(run(arm))
    print("| bytes | bits a byte | bound | coded | decoder | GB/s best, median | pays after | beside | in full |")
    print("|---" * 9 + "|")
    for arm in every:
        bound, bits = entropies(arm)
        cells = [arm.name, ", ".join(f"{name} {value:.2f}" for name, value in bits.items())]
        cells += [f"{bound:.3f}", f"{arm.ratio:.3f}"]
        for name, rates in arm.rates.items():
            best, median = max(rates), statistics.median(rates)
            pays = f"{median * (1 - arm.ratio):.3g} | {median:.3g} | {median * arm.ratio:.3g}"
            print(f"| {' | '.join(cells)} | {name} | {best:.3g}, {median:.3g} | {pays} |")
            cells = [""] * len(cells)
        report.append({"arm": arm.name, "bound": bound, "ratio": arm.ratio, "bits": bits, "gb_s": arm.rates})
    print(json.dumps({"benchmark": Path(__file__).stem, "rows": report}, separators=(",", ":")))


if __name__ == "__main__":
    main()
