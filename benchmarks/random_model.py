"""How fast a random checkpoint is written, beside plain zeros of the same size, and the memory that it takes.

python benchmarks/random_model.py [FOLDER]      # needs 5 GiB free in FOLDER, the current one by default
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from pathlib import Path

from moebench import model_card
from moebench.checkpoint.random_config import configure
from moebench.checkpoint.random_plan import plan
from moebench.checkpoint.random_write import write_random
from moebench.plugins import load_plugins

PIECE = 1 << 21


def zeros(path: Path, nbytes: int) -> float:
    """Seconds to write and sync so many zeros, as dd conv=fsync does."""
    started, piece = time.perf_counter(), bytes(PIECE)
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // PIECE):
            file.write(piece)
        os.fsync(file.fileno())
    path.unlink()
    return time.perf_counter() - started


def main() -> None:
    """Two layers of Qwen3-30B-A3B, in turns with zeros."""
    base = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "random-model-benchmark"
    card = model_card.load(load_plugins().model_path("qwen3-30b-a3b"))
    config = configure(card, 2, 128, "none")
    planned = plan(config, 8, "none", 0)
    for _ in range(3):
        plain = planned.nbytes / zeros(base.with_suffix(".zeros"), planned.nbytes) / 1e6
        started = time.perf_counter()
        write_random(base, planned, config, "uniform", 0, {}, lambda _: None)
        made = planned.nbytes / (time.perf_counter() - started) / 1e6
        shutil.rmtree(base)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{planned.nbytes / 2**30:.2f} GiB: random {made:.0f} MB/s, zeros {plain:.0f} MB/s; peak {peak:.0f} MiB")


if __name__ == "__main__":
    main()
