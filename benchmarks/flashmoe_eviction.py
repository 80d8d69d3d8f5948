"""How good evictions are by cache size: hit rate, share that is wanted again within 5 steps, agreement with Belady.

    python benchmarks/flashmoe_eviction.py                          tinymoe's held-out prompts, the shipped nets
    python benchmarks/flashmoe_eviction.py --trace FOLDER [--test N --fit N]
        a recording (trace.npz, meta.json): nets are fitted on some sequences and judged on others; a recording of one
        sequence is cut in time, at 70 %

Every layer has slots of its own. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from moebench.plugins import load_plugins
from moebench.residency.agreement import judge
from moebench.residency.replay import events
from moebench.systems.flashmoe import artefact
from moebench.systems.flashmoe.policy import Learned
from moebench.systems.flashmoe.prepare import PrepareOptions, fit
from moebench.trace import format as trace_format
from moebench.trace.importers import import_npz

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)
POLICIES = ("lru", "lfu", "slru", "decayed_lfu", "belady")
ROOT = Path(__file__).parents[1]


def some(trace: trace_format.Trace, sequences: np.ndarray) -> trace_format.Trace:
    """Whole sequences of a trace, by number."""
    bounds = [*trace.sequence_starts.tolist(), trace.tokens]
    rows = np.concatenate([np.arange(bounds[s], bounds[s + 1]) for s in np.sort(sequences)])
    columns = (trace.experts, trace.phase, trace.sequence, trace.position)
    return trace_format.Trace(*(np.ascontiguousarray(c[rows]) for c in columns), metadata=trace.metadata)


def split(trace: trace_format.Trace, test: int, fitted: int) -> tuple[trace_format.Trace, trace_format.Trace]:
    """What nets are fitted on, and what they are judged on."""
    count = len(trace.sequence_starts)
    if count == 1:
        cut = round(0.7 * trace.tokens)
        return trace.take(slice(0, cut)), trace.take(slice(cut, trace.tokens))
    order = np.random.default_rng(0).permutation(count)
    return some(trace, order[test : test + fitted]), some(trace, order[:test])


def main() -> None:
    """Judge, print, and leave one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--test", type=int, default=12)
    parser.add_argument("--fit", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.trace is None:
        trace = trace_format.load(ROOT / "models" / "tinymoe" / "traces" / "held_out.safetensors")
        folder = ROOT / "systems" / "flashmoe" / "artefacts" / "tinymoe"
        fitted = artefact.load(folder)
    else:
        learn, trace = split(import_npz(arguments.trace), arguments.test, arguments.fit)
        with tempfile.TemporaryDirectory() as scratch:
            options = PrepareOptions(trace=str(learn.save(Path(scratch) / "fit.safetensors")), threads=1)
            name = arguments.trace.resolve().name.partition("_")[0]  # the recordings are named by their geometry
            shape = load_plugins().model_path(name)
            fitted = artefact.load(fit(options, shape, name, Path(scratch), lambda *a: None))
        print(f"fitted on {learn.tokens} tokens: {json.dumps(fitted.provenance['fits'])}")
    todo, seconds = events(trace, 32), {}
    arms = {name: name for name in POLICIES} | {k: partial(Learned, nets=net) for k, net in fitted.nets.items()}
    print(f"{trace.tokens} tokens, {trace.layers} layers, {trace.top_k} of {trace.expert_count} experts")
    print(f"{'slots per layer':14s}" + "".join(f"{round(s * trace.expert_count):>24d}" for s in SHARES))
    print(f"{'':14s}" + f"{'hit  refetch  agree':>24s}" * len(SHARES))
    rows = []
    for name, policy in arms.items():
        started, line = time.process_time(), f"{name:14s}"
        for share in SHARES:
            slots = max(trace.top_k, round(share * trace.expert_count)) * trace.layers
            judged = judge(todo, policy, slots)
            rows.append({"policy": name, "share": share, **asdict(judged)})
            line += f"{judged.hit_rate:>10.3f}  {judged.refetch or 0:.3f}  {judged.agreement or 0:.3f}"
        seconds[name] = round(time.process_time() - started, 1)
        print(line, flush=True)
    print(json.dumps({"trace": trace.metadata["model"], "rows": rows, "seconds": seconds}, separators=(",", ":")))


if __name__ == "__main__":
    main()
