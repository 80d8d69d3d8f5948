"""One arm of the race in this process: a system of moebench decodes given tokens from one pack.

    python moebench_arm.py '{"pack": ..., "model": ..., "system": ..., "budget": ..., "warmup": ..., "tokens": [...]}'

The last line is one JSON document. Beside the run's own metrics it says for how long reads were in flight (from the
call that issues one to its last byte's hash) and what a whole-expert LRU of the same slots would have read.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moebench.hookspecs import hookimpl

sys.path.insert(0, str(Path(__file__).parents[1]))
from race.figures import busy_s, lru_misses


class Watch:
    """An observer of demands, and of reads from when they are issued to when they have landed."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.emitted = warmup, 0
        self.demands: list[tuple[int, int, list[int]]] = []  # emitted tokens before, layer, keys
        self.reads: list[tuple[float, float]] = []

    @hookimpl
    def acquired(self, layer, keys) -> None:
        """One layer's demand."""
        self.demands.append((self.emitted, layer, list(keys)))

    @hookimpl
    def end_step(self, step, record) -> None:
        """A token more; reads of warm-up do not count."""
        self.emitted += step.emits
        if self.emitted == self.warmup + 1:  # the first token comes out of the prompt
            self.reads.clear()

    def follow(self, timeline: Any) -> None:
        """Watch what ``timeline`` reads."""
        read = timeline.read

        def watched(*arguments: Any, **options: Any) -> Any:
            issued = time.perf_counter()
            tickets = read(*arguments, **options)
            for ticket in tickets:
                ticket.handle.add_done_callback(lambda _: self.reads.append((issued, time.perf_counter())))
            return tickets

        timeline.read = watched


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Decode the tokens; what the table needs of it."""
    from moebench.backends.torch_geometry import geometry_of
    from moebench.commands import compose
    from moebench.engine.loop import Loop
    from moebench.harness.assets import as_packed
    from moebench.harness.backend import open_backend
    from moebench.harness.plan import plan
    from moebench.harness.session import open_session
    from moebench.plugins import load_plugins
    from moebench.store.pack import Pack

    tokens, warmup = task["tokens"], task["warmup"]
    pack = Pack.open(task["pack"])
    registry = load_plugins()
    compose.register_groups(registry)
    words = {
        "system": task["system"], "hw": "host", "mode": "measure", "model": task["model"], "quality.suite": "none",
        "quant": "stored", "layout": pack.manifest.layout, "budget": task["budget"], "warmup_tokens": warmup,
        **task["words"],
    }  # fmt: skip
    (cell,) = plan(compose.resolve([f"{key}={value}" for key, value in words.items()], registry), registry)
    config = pack.manifest.model["config"]
    geometry = as_packed(geometry_of(config, cell.model), pack)
    model: Any = SimpleNamespace(pack=pack, config=config)  # nothing here has a tokenizer
    backend = open_backend("torch", model, cell.config.numerics, cell.threads)
    watch = Watch(warmup)
    session = open_session(
        cell, geometry, registry, pack=pack, dense_bytes=backend.dense_bytes, kv_bytes=backend.kv_bytes,
        observers=[watch], warmup_tokens=warmup, context=len(tokens), ops=backend.ops, allocate=backend.buffer,
    )  # fmt: skip
    watch.follow(session.timeline)
    try:
        loop = Loop(backend, session.experts, cell.config.chunk)
        loop.generate([tokens[:1]], len(tokens) - 1, forced=[tokens[1:]])
        session.experts.drain()
    finally:
        session.close()
    numbers = {name: value for name, (value, *_) in session.metrics.numbers().items()}
    timed = session.metrics.tokens
    tier = session.experts.tiers[0]
    ordered = [keys for _, _, keys in watch.demands]
    missed = lru_misses(ordered, tier.slots, sum(before <= warmup for before, _, _ in watch.demands))
    split = session.anatomy.details(geometry, computes=True)["split_ms_per_token"]
    return {
        "tok_s": numbers["decode_tok_s"],
        "tokens": timed,
        "mb_token": session.metrics.bytes / timed / 1e6,
        "requests_token": numbers["storage_requests_per_token"],
        "reads_token": numbers["reads_per_token"],
        "hit_rate": numbers["hit_rate"],
        "busy_s_token": busy_s(watch.reads) / timed,
        "lru_mb_token": missed * pack.expert_bytes / timed / 1e6,
        "slots": tier.slots,
        "split_ms": split,
        "overhead_share": split["overhead"] / sum(split.values()),
        "threads": cell.threads,
        "engine": cell.engine,
        "demand_mb_token": sum(len(k) for b, _, k in watch.demands if b > warmup) * pack.expert_bytes / timed / 1e6,
        "peak_mib": _peak_mib(),
        "steps_ms": np.round(np.asarray(session.metrics.step_s) * 1e3, 1).tolist(),
    }


def _peak_mib() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
