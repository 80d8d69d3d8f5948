"""Read engines against each other: bytes a second, calls and processor time, by expert size and by depth.

    python benchmarks/read_engines.py [--folder DIR] [--gib N] [--rounds N] [--codec none|rans]
                                      [--sizes MIB ...] [--arms ARM ...]

For each size a pack of random experts is written to a folder of its own and removed again. An arm reads bursts of 8
experts, as a layer's misses come, and waits for all 8; every expert is hashed. Rounds of all arms alternate in shuffled
order, so that a busy machine slows all alike; best and median of the rounds are printed, and the last line is one JSON
document. fio, where it is installed, reads the same file in bursts of the same size and hashes nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moebench.store.engines import open_engine
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer, drop_page_cache
from moebench.store.uring import refusal
from moebench.store.writer import write_random_pack
from moebench.units import GB, GIB, MIB

BURST = 8
SHAPES = {  # MiB of an int4 expert: hidden and intermediate size
    0.6: (1024, 384),
    1.7: (2048, 512),
    4.6: (2048, 1408),
    11.8: (4096, 1792),
    23.6: (7168, 2048),
}
ARMS = {
    "mmap threads=4": ("mmap", {"threads": 4, "block_bytes": 0}),
    "pread threads=4": ("pread", {"threads": 4, "block_bytes": 0}),
    "direct threads=4, blocks of 1 MiB": ("direct", {"threads": 4}),
    **{f"direct threads={n}": ("direct", {"threads": n, "block_bytes": 0}) for n in (1, 2, 4, 8)},
    **{f"uring depth={n}": ("uring", {"depth": n}) for n in (1, 2, 4, 8)},
    "direct, runs of 8": ("direct", {"threads": 4, "block_bytes": 0}),
    "uring, runs of 8": ("uring", {"depth": 8}),
}
FIO = {
    "fio psync numjobs=4": ["--ioengine=psync", "--numjobs=4", "--group_reporting"],
    "fio io_uring iodepth=8": [
        "--ioengine=io_uring",
        f"--iodepth={BURST}",
        f"--iodepth_batch_submit={BURST}",
        f"--iodepth_batch_complete_min={BURST}",
    ],
}


def read(pack: Pack, arm: str, nbytes: int, seed: int) -> dict[str, float]:
    """Read at least ``nbytes`` of experts in bursts; GB/s, calls an expert and processor seconds a GiB."""
    name, options = ARMS[arm]
    buffers = [aligned_buffer(pack.slot_bytes) for _ in range(BURST)]
    for buffer in buffers:
        buffer[:] = 1
    bursts = max(2, -(-nbytes // (BURST * pack.expert_bytes)))
    draw, run = np.random.default_rng(seed), "runs" in arm
    if name in ("mmap", "pread"):
        drop_page_cache(pack.file_path)
    with open_engine(name, pack, **options) as engine:
        used, started = time.process_time(), time.perf_counter()
        for _ in range(bursts):
            if run:
                at = int(draw.integers(0, pack.keys - BURST))
                futures = engine.submit_run(range(at, at + BURST), buffers, 0)
            else:
                keys = draw.choice(pack.keys, BURST, replace=False).tolist()
                futures = [engine.submit(key, buffer, 0) for key, buffer in zip(keys, buffers, strict=True)]
            for future in futures:
                future.result()
        spent, used = time.perf_counter() - started, time.process_time() - used
        total = bursts * BURST * pack.expert_bytes
        return {"gb_s": total / spent / GB, "calls": engine.calls / engine.requests, "cpu": used / (total / GIB)}


def read_fio(pack: Pack, arm: str, seed: int) -> dict[str, float]:
    """The same with fio, for two seconds."""
    command = ["fio", "--name=read", f"--filename={pack.file_path}", "--rw=randread", f"--bs={pack.slot_bytes}"]
    command += ["--direct=1", "--readonly", "--time_based", "--runtime=2", f"--randseed={seed}", "--output-format=json"]
    done = subprocess.run(command + FIO[arm], capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    busy = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return {"gb_s": job["read"]["bw_bytes"] / GB, "calls": 1.0, "cpu": busy / (job["read"]["io_bytes"] / GIB)}


def measure(pack: Pack, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All rounds of all arms on one pack."""
    arms: dict[str, Callable[[int], dict[str, float]]] = {}
    for arm, (name, _) in ARMS.items():
        if name != "uring" or refusal() is None:
            arms[arm] = lambda seed, arm=arm: read(pack, arm, arguments.each * MIB, seed)
    if shutil.which("fio") and not pack.coded:
        arms |= {arm: (lambda seed, arm=arm: read_fio(pack, arm, seed)) for arm in FIO}
    arms = {arm: run for arm, run in arms.items() if not arguments.arms or arm in arguments.arms}
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for number in range(arguments.rounds):
        order = list(arms)
        random.Random(number).shuffle(order)
        for arm in order:
            found[arm].append(arms[arm](number))
    return found


def main() -> None:
    """Write the packs, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=None, help="where the packs are written; a temporary folder by default")
    parser.add_argument("--gib", type=float, default=2, help="size of each pack")
    parser.add_argument("--each", type=int, default=256, help="MiB that an arm reads in a round, two bursts at least")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="none", choices=("none", "rans"))
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *FIO], help="these alone")
    arguments = parser.parse_args()
    document = []
    print("MiB    arm                                 GB/s best  median  calls/expert  CPU s/GiB")
    for size in arguments.sizes:
        hidden, intermediate = SHAPES[size]
        experts = max(2 * BURST, round(arguments.gib * GIB / (size * MIB)))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            pack = write_random_pack(Path(folder) / "pack", 1, experts, hidden, intermediate, codec=arguments.codec)
            drop_page_cache(pack.file_path)
            found = measure(pack, arguments)
        for arm, rounds in found.items():
            speeds = [one["gb_s"] for one in rounds]
            row = {
                "mib": round(pack.expert_bytes / MIB, 2),
                "arm": arm,
                "best_gb_s": round(max(speeds), 3),
                "median_gb_s": round(statistics.median(speeds), 3),
                "calls_per_expert": round(statistics.median(one["calls"] for one in rounds), 3),
                "cpu_s_per_gib": round(statistics.median(one["cpu"] for one in rounds), 3),
            }
            document.append(row)
            print(
                f"{row['mib']:<6} {arm:<36}{row['best_gb_s']:8.2f} {row['median_gb_s']:8.2f} "
                f"{row['calls_per_expert']:12.2f} {row['cpu_s_per_gib']:10.2f}",
                flush=True,
            )
    print(json.dumps({"codec": arguments.codec, "gib": arguments.gib, "rounds": arguments.rounds, "rows": document}))


if __name__ == "__main__":
    main()
