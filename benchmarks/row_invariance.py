"""What row-invariant numerics costs a family, pass by pass: tiny random models, or tinymoe; experts in memory.

    python benchmarks/row_invariance.py [FAMILY ...]

Per family the milliseconds of a prompt chunk of 32 rows (over nothing, and over 64 cached positions) and of a step, in
``fast`` numerics and in ``row_invariant``; medians of 7. Run from the repository, with its tests beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

CHUNK, PAST = 32, 64


def timed(backend, server, width: int, past: int) -> float:
    """Milliseconds of one pass of ``width`` rows over ``past`` cached ones."""
    from torch_models import run

    tokens = np.random.default_rng(0).integers(3, 90, (1, past + width))
    took = []
    for _ in range(7):
        backend.reset(1)
        if past:
            run(backend, server, tokens[:, :past])
        start = time.perf_counter()
        run(backend, server, tokens[:, past:], past=[past])
        took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took)


def main(families: list[str]) -> None:
    """Print a table, then one JSON line."""
    from family_checkpoints import native
    from torch_models import DictServer, make_backend, make_pack

    from moebench.backends.torch_source import load_model
    from moebench.geometry import embedded_folder

    shapes = {"chunk": (CHUNK, 0), "later chunk": (CHUNK, PAST), "step": (1, PAST)}
    print(f"{'family':16}{'numerics':16}" + "".join(f"{name + ' ms':>16}" for name in shapes))
    found = []
    for family in families:
        model = load_model(embedded_folder(), "float32") if family == "tinymoe" else native(family, "float32")
        with tempfile.TemporaryDirectory() as folder:
            pack = make_pack(Path(folder), model, dtype="bfloat16")
            for numerics in ("fast", "row_invariant"):
                backend = make_backend(pack, dtype="bfloat16", numerics=numerics)
                server = DictServer(pack)
                row = {name: timed(backend, server, *shape) for name, shape in shapes.items()}
                print(f"{family:16}{numerics:16}" + "".join(f"{value:16.2f}" for value in row.values()))
                found.append({"family": family, "numerics": numerics, **row})
    print(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main(sys.argv[1:] or ["tinymoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "bailing_hybrid", "lfm2_moe"])
