"""Where Edge0's loss on tinymoe comes from, and what its adapters give back: one rung per change, accuracy per domain.

    python benchmarks/edge0_ladder.py [K] [DISTILLED]

K (2) experts per token. DISTILLED is an artefact whose heads were distilled only:
    moebench prepare system=edge0 model=tinymoe k=2 steps_tune=0 steps_onpolicy=0 out=DIR
Prints the tables of docs/systems.md: exact match per domain on the local suite, mean, paired difference to the
unmodified model with its 95 % interval, and how many of the predicted experts the router would have chosen.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from moebench.backends.torch_model import NativeTorchBackend, TorchBackend
from moebench.commands.record import RecordingExperts, prepared
from moebench.engine.loop import Loop
from moebench.harness.assets import load_live
from moebench.harness.plan import EMBEDDED, embedded_folder
from moebench.plugins import load_plugins
from moebench.quality import local
from moebench.quality.paired import paired_delta
from moebench.store.pages import aligned_buffer


def main(top_k: int, distilled: str) -> None:
    """Evaluate all rungs on the 500 items of the local suite."""
    spec = load_plugins().system("edge0")
    off = spec.config(k=top_k, prerouter=False, lora=False)
    on = spec.config(k=top_k)
    rungs = {
        "int4 experts, router's top 4": replace(off, k=4),
        f"router's top {top_k}": off,
        "heads distilled only": spec.config(k=top_k, lora=False, artefact=distilled),
        "trained heads, no adapters": replace(on, lora=False),
        "trained heads and adapters": on,
        "adapters, router's choice": replace(on, prerouter=False),
    }
    if not distilled:
        del rungs["heads distilled only"]
    items, folder = local.load_items("local"), embedded_folder()
    model = load_live(folder, EMBEDDED, "int4", "packed")
    native = local.evaluate(Loop(NativeTorchBackend(folder), None, 256), model.tokenizer, items)
    print(f"{'':30}" + "".join(f"{task:>9}" for task in (*local.TASKS, "mean")) + "   difference      overlap")
    show("unmodified bf16", native, native, "")
    for name, knobs in rungs.items():
        backend = TorchBackend(model.pack, model.pack.dense_path, model.config)
        system = prepared(spec, knobs, EMBEDDED, model, backend, 0)
        experts = RecordingExperts(model.pack, aligned_buffer(model.pack.slot_bytes), system)
        answers = local.evaluate(Loop(backend, experts, 256), model.tokenizer, items)
        overlap = system.hooks.report().get("overlap")
        show(name, answers, native, "" if overlap is None else f"{overlap:.3f}")


def show(name: str, answers: list[local.Answer], native: list[local.Answer], overlap: str) -> None:
    """One line of the table."""
    shares = []
    for task in local.TASKS:
        right = [a.right for a in answers if a.task == task]
        shares.append(100 * sum(right) / len(right))
    delta = paired_delta([a.right for a in answers], [a.right for a in native], [a.task for a in native])
    interval = f"{delta.points:+6.1f} [{delta.ci[0]:+.1f}, {delta.ci[1]:+.1f}]"
    mean = sum(shares) / len(shares)
    print(f"{name:30}" + "".join(f"{s:9.1f}" for s in (*shares, mean)) + f"   {interval:22}{overlap}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2, sys.argv[2] if len(sys.argv) > 2 else "")
