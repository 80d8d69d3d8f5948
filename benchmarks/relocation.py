"""What re-organising storage costs the reads beside it: demand latency with and without swaps, and how fast they go.

    python benchmarks/relocation.py [--folder DIR] [--gib N] [--rounds N] [--engine direct|pread|uring]

A pack of random experts (1.7 MiB) and its overlay are written to a folder of their own and removed again. Each round
reads bursts of experts as a layer's misses come, waits, and pauses as compute would. Rounds without swaps, with swaps
(one after another, as fast as the writer gets through) and with swaps that do not yield to reads alternate. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from moebench.store.block_queue import DEMAND
from moebench.store.engines import open_engine
from moebench.store.overlay import WRITE_UNIT_BYTES, Overlay
from moebench.store.pages import aligned_buffer
from moebench.store.relocate import RelocatingEngine
from moebench.store.writer import write_random_pack
from moebench.units import GIB, MIB

HIDDEN, INTERMEDIATE, EXPERTS = 2048, 512, 32
BURST, BURSTS, PAUSE_S = 4, 60, 0.01
ARMS = ("still", "swapping", "not yielding")


def rounds(engine: RelocatingEngine, data: list[np.ndarray], arm: str, seed: int) -> dict[str, object]:
    """One round of bursts; milliseconds of each, swaps, and MiB written."""
    rng, pack = np.random.default_rng(seed), engine.pack
    buffers = [aligned_buffer(pack.slot_bytes) for _ in range(BURST)]
    took, swaps, before = [], 0, engine.written_bytes
    engine._pause = (lambda a, b: None) if arm == "not yielding" else partial(RelocatingEngine._pause, engine)
    for _ in range(BURSTS):
        swaps += engine.landed()
        if arm != "still" and engine._swap is None:
            layer = int(rng.integers(len(data)))
            i, j = rng.choice(EXPERTS, 2, replace=False).tolist()
            engine.move(layer * EXPERTS + i, layer * EXPERTS + j, data[layer][i], data[layer][j])
        keys = rng.integers(len(data) * EXPERTS, pack.keys, BURST).tolist()  # of other layers than the swaps
        started = time.perf_counter()
        for future in [engine.submit(k, b, DEMAND) for k, b in zip(keys, buffers, strict=True)]:
            future.result()
        took.append((time.perf_counter() - started) * 1e3)
        time.sleep(PAUSE_S)
    while engine._swap is not None:
        swaps += engine.landed()
        time.sleep(1e-3)
    return {"ms": took, "swaps": swaps, "mib": (engine.written_bytes - before) / MIB}


def main() -> None:
    """Write, read, swap, print, remove."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--engine", default="direct")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        one = write_random_pack(Path(scratch) / "one", 1, 1, HIDDEN, INTERMEDIATE)
        layers = max(3, round(options.gib * GIB / one.slot_bytes / EXPERTS))
        pack = write_random_pack(Path(scratch) / "pack", layers, EXPERTS, HIDDEN, INTERMEDIATE)
        started = time.perf_counter()
        overlay = Overlay.create(pack, Path(scratch) / "overlays")
        copied_s = time.perf_counter() - started
        data = [[aligned_buffer(pack.slot_bytes) for _ in range(EXPERTS)] for _ in range(2)]
        for layer, experts in enumerate(data):
            for expert, buffer in enumerate(experts):
                pack.read(layer * EXPERTS + expert, buffer)
        found: dict[str, list[dict]] = {arm: [] for arm in ARMS}
        with RelocatingEngine(open_engine(options.engine, overlay), overlay) as engine:
            for index in range(options.rounds):
                for arm in ARMS:
                    found[arm].append(rounds(engine, data, arm, index))
            seconds, written, pauses = engine.seconds, engine.written_bytes, engine.pauses
    report = {
        "engine": options.engine, "expert_mib": pack.expert_bytes / MIB, "unit_kib": WRITE_UNIT_BYTES // 1024,
        "copied_gib": overlay.copied_bytes / GIB, "copied_s": round(copied_s, 2),
        "write_mib_s": round(written / MIB / seconds, 1), "waits": pauses,
        "unit_ms": round(seconds / written * WRITE_UNIT_BYTES * 1e3, 2),
    }  # fmt: skip
    for arm, each in found.items():
        all_ms = np.concatenate([r["ms"] for r in each])
        report[arm] = {f"p{q}_ms": round(float(np.percentile(all_ms, q)), 2) for q in (50, 90, 99)}
        report[arm]["swaps"] = sum(r["swaps"] for r in each)
        print(f"{arm:12} bursts of {BURST}: {report[arm]}")
    print(f"{report['write_mib_s']} MiB/s, {report['unit_ms']} ms a unit, {pauses} waits")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
