"""Expert kernels: how fast one expert's bytes are gone through, by quantisation, size and rows; and what threads do to
a layer while others read a disk.

    python benchmarks/expert_kernels.py [--rounds N] [--parts kernels threads]

``kernels``: whole experts (gate and up, activation, down) as a live run computes them, over more bytes than a cache
holds, bf16 activations, one thread; GB/s of stored bytes and microseconds an expert, medians of the rounds.
``threads``: a layer of eight int4 experts for one row in a process of its own for each number of threads and each way
of OpenMP's threads to wait, alone and beside four threads that read a file past the page cache; median and 99th
percentile. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"qwen3-30b-a3b": (2048, 768), "olmoe-1b-7b": (2048, 1024), "deepseek-v4-flash": (4096, 2048)}
ROWS = (1, 2, 3, 4, 6, 8, 32)
ARENA_BYTES = 384 << 20  # more than any cache of the processors that this has run on
WAITS = {
    "as it is": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 20000": {"GOMP_SPINCOUNT": "20000"},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
}
TOP_K, LAYERS = 8, 150


class Experts:
    """Experts of one shape in an arena of slots, with the layer that computes them."""

    def __init__(self, hidden: int, intermediate: int, quant: str) -> None:
        import torch
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        from moebench.backends.torch_bytes import TorchCpuLayout
        from moebench.backends.torch_experts import ExpertLayer, Live, Views
        from moebench.store.extents import place_parts
        from moebench.store.layout import QuantSpec
        from moebench.store.pages import aligned_buffer
        from moebench.store.quant import quantize
        from moebench.units import align_up

        torch.manual_seed(0)
        shapes = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
        parts: dict[str, np.ndarray] = {}
        for name, shape in shapes.items():
            weights = np.random.default_rng(0).standard_normal(shape, np.float32) / 50
            parts |= TorchCpuLayout().encode(quantize(name, weights, QuantSpec(quant)))
        specs = place_parts(parts)
        self.nbytes = specs[-1].offset + specs[-1].nbytes
        one = np.zeros(align_up(self.nbytes), np.uint8)
        for spec in specs:
            one[spec.offset : spec.offset + spec.nbytes] = parts[spec.name].reshape(-1).view(np.uint8)
        count = max(TOP_K, ARENA_BYTES // len(one))
        self.slots = aligned_buffer(count * len(one)).reshape(count, -1)
        self.slots[:] = one
        config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=2, num_experts_per_tok=TOP_K
        )
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        module.has_gate = True
        self.layer = ExpertLayer(0, module, Views(specs, "gate_up_proj"), torch.bfloat16, Live())
        self.hidden = hidden


def kernels(rounds: int) -> list[dict[str, Any]]:
    """A row for each shape, quantisation and number of rows."""
    import torch

    found = []
    print(f"{'expert':<20} {'quant':<6} {'MiB':>6} " + " ".join(f"{f'{rows} rows':>16}" for rows in ROWS))
    for name, (hidden, intermediate) in SHAPES.items():
        for quant in ("int4", "int8", "none"):
            experts, line = Experts(hidden, intermediate, quant), ""
            for rows in ROWS:
                x = torch.randn(rows, hidden, dtype=torch.bfloat16)
                spent = []
                with torch.inference_mode():
                    for _ in range(rounds + 1):
                        started = time.perf_counter()
                        for slot in experts.slots:
                            experts.layer.expert(x, slot)
                        spent.append((time.perf_counter() - started) / len(experts.slots))
                seconds = statistics.median(spent[1:])
                entry = {"expert": name, "quant": quant, "rows": rows, "bytes": experts.nbytes}
                found.append({**entry, "us": seconds * 1e6, "gb_s": experts.nbytes / seconds / 1e9})
                line += f" {found[-1]['gb_s']:5.2f} GB/s {found[-1]['us']:4.0f}us"
            print(f"{name:<20} {quant:<6} {experts.nbytes / 2**20:6.2f}{line}", flush=True)
            del experts
    return found


def layers(count: int, reads: str) -> dict[str, float]:
    """Milliseconds of layers of eight experts for one row, with ``count`` threads, beside reads of a file if named."""
    import torch

    torch.set_num_threads(count)
    experts = Experts(*SHAPES["qwen3-30b-a3b"], "int4")
    x, over = torch.randn(1, experts.hidden, dtype=torch.bfloat16), threading.Event()
    readers = [threading.Thread(target=_read, args=(reads, i, over)) for i in range(4 if reads else 0)]
    for reader in readers:
        reader.start()
    spent = []
    with torch.inference_mode():
        for number in range(LAYERS + 20):
            started = time.perf_counter()
            for i in range(TOP_K):
                experts.layer.expert(x, experts.slots[(number * TOP_K + i) % len(experts.slots)])
            spent.append((time.perf_counter() - started) * 1e3)
            time.sleep(0.002)  # what a layer waits for its reads
    over.set()
    for reader in readers:
        reader.join()
    ordered = sorted(spent[20:])
    return {
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[int(0.99 * len(ordered))],
        "worst_ms": ordered[-1],
    }


def _read(path: str, seed: int, over: threading.Event) -> None:
    import xxhash

    from moebench.store.pages import aligned_buffer, open_direct

    nbytes, draw = 2560 << 10, np.random.default_rng(seed)
    buffer, handle, most = aligned_buffer(nbytes), open_direct(Path(path)), (os.path.getsize(path) - nbytes) // 4096
    while not over.is_set():
        os.preadv(handle, [buffer.data], int(draw.integers(most)) * 4096)
        xxhash.xxh3_64().update(buffer.data)
    os.close(handle)


def threads(rounds: int, folder: str | None) -> list[dict[str, Any]]:
    """A row for each number of threads and way to wait, alone and beside reads; the median of ``rounds`` processes."""
    found = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(16):
            file.write(np.random.default_rng(0).bytes(32 << 20))
        file.flush()
        os.fsync(file.fileno())
        arms = [(1, "as it is"), *((n, wait) for n in sorted({2, cores} - {1}) for wait in WAITS)]
        samples: dict[tuple[int, str, bool], list[dict[str, float]]] = {}
        for _ in range(rounds):
            for count, wait in arms:
                for busy in (False, True):
                    command = [
                        sys.executable,
                        __file__,
                        "--layers",
                        str(count),
                        *(["--reads", file.name] if busy else []),
                    ]
                    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
                    done = subprocess.run(
                        command, env=environment | WAITS[wait], capture_output=True, text=True, check=True
                    )
                    samples.setdefault((count, wait, busy), []).append(json.loads(done.stdout))
    print(f"{'threads':<8} {'waiting':<12} {'beside':<8} {'median ms':>10} {'p99 ms':>8} {'worst ms':>9}")
    for (count, wait, busy), runs in samples.items():
        entry = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        found.append({"threads": count, "waiting": wait, "reads": busy, **entry})
        print(
            f"{count:<8} {wait:<12} {'reads' if busy else 'nothing':<8} {entry['median_ms']:10.2f} "
            f"{entry['p99_ms']:8.2f} {entry['worst_ms']:9.2f}"
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=("kernels", "threads"), default=("kernels", "threads"))
    parser.add_argument("--folder", default=None, help="where the file that is read lies; a temporary one by default")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)  # a child of ``threads``
    parser.add_argument("--reads", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layers:
        print(json.dumps(layers(arguments.layers, arguments.reads)))
        return
    document: dict[str, Any] = {"rounds": arguments.rounds}
    if "kernels" in arguments.parts:
        import torch

        torch.set_num_threads(1)
        document["kernels"] = kernels(arguments.rounds)
    if "threads" in arguments.parts:
        document["threads"] = threads(arguments.rounds, arguments.folder)
    print(json.dumps(document, separators=(",", ":")))


if __name__ == "__main__":
    main()
