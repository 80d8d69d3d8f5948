"""Exact-match accuracy of tinymoe on its five tasks, unmodified and at each quantisation, with everything resident.

    python benchmarks/tinymoe_accuracy.py [ITEMS_PER_TASK]

Prints the table of docs/quality.md. Greedy decoding, full-length items that training never saw.
"""

from __future__ import annotations

import sys

from moebench.backends.torch_model import NativeTorchBackend, TorchBackend
from moebench.commands.record import RecordingExperts
from moebench.engine.loop import Loop
from moebench.harness.assets import load_live
from moebench.harness.plan import EMBEDDED, embedded_folder
from moebench.quality import local
from moebench.store.pages import aligned_buffer


def main(count: int) -> None:
    """Evaluate all arms on ``count`` items per task."""
    items = local.load_items("local")
    items = [i for task in local.TASKS for i in [x for x in items if x["task"] == task][:count]]
    folder, arms = embedded_folder(), {}
    model = load_live(folder, EMBEDDED, "int4", "packed")
    arms["unmodified bf16"] = Loop(NativeTorchBackend(folder), None, 256)
    for quant in ("none", "int8", "int4"):
        packed = load_live(folder, EMBEDDED, quant, "packed").pack
        backend = TorchBackend(packed, packed.dense_path, model.config)
        arms[quant] = Loop(backend, RecordingExperts(packed, aligned_buffer(packed.slot_bytes)), 256)
    print(f"{'':16}" + "".join(f"{task:>9}" for task in (*local.TASKS, "mean")))
    for name, loop in arms.items():
        answers = local.evaluate(loop, model.tokenizer, items, model.ends)
        shares = [100 * sum(a.right for a in answers if a.task == t) / count for t in local.TASKS]
        print(f"{name:16}" + "".join(f"{share:9.1f}" for share in (*shares, sum(shares) / len(shares))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else local.ITEMS["local"])
