"""How fast replay goes on the virtual clock: Qwen3.6-35B-A3B geometry, K=4, through the bound hooks, observers on.

    python benchmarks/replay_speed.py [--tokens N] [--rounds N] [--systems lru,slru,...]

One process, one core, its CPU time: what other programs take of the core is not counted, and of several rounds the best
counts, since they can only slow one down. The bar is 500 tokens/s. Memory is traced between 500 tokens and ten times
as many; what grows are the two doubles a step that percentiles need. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import tracemalloc

import numpy as np

from moebench import geometry, hardware
from moebench.engine.acquire import Experts
from moebench.engine.hooks import BROADCAST, FIRST_RESULT, Hooks
from moebench.engine.loop import replay
from moebench.harness import costs
from moebench.harness.memory import StateWatch, make_tiers, size
from moebench.metrics import Metrics
from moebench.plugins import Registry, load_plugins
from moebench.residency.ledger import Ledger
from moebench.step import DECODE
from moebench.systemspec import RunContext
from moebench.timeline.virtual import VirtualTimeline
from moebench.trace.format import Trace

BAR = 500  # tokens/s
CONTEXT = 1024  # positions repeat after this many tokens, so that state does not grow with the length of the run


def make_trace(shape: geometry.Geometry, tokens: int) -> Trace:
    """Decode rows with a skewed popularity per layer; a block of distinct tokens is repeated to the length wanted."""
    rng, block = np.random.default_rng(0), min(tokens, 600)
    popularity = np.log(1 / np.arange(1, shape.experts + 1) ** 0.9)
    scores = rng.gumbel(size=(block, shape.layers, shape.experts)) + popularity
    ranks = np.argpartition(-scores, shape.top_k, axis=2)[:, :, : shape.top_k]
    names = np.stack([rng.permutation(shape.experts) for _ in range(shape.layers)])
    chosen = np.take_along_axis(np.broadcast_to(names, scores.shape), ranks, 2).astype(np.int16)
    row = np.arange(tokens)
    meta = {"model": shape.name, "experts": shape.experts, "top_k": shape.top_k, "source": "benchmark"}
    return Trace(
        np.ascontiguousarray(chosen[row % block]),
        np.full(tokens, DECODE, np.int8),
        (row // CONTEXT).astype(np.int32),
        (row % CONTEXT).astype(np.int32),
        metadata=meta,
    )


class Clocked(Hooks):
    """Hooks that add up the seconds spent inside them."""

    def __init__(self, plugins: list[object]) -> None:
        super().__init__(plugins)
        self.seconds = 0.0
        for name in (*FIRST_RESULT, *BROADCAST):
            if (call := getattr(self, name)) is not None:
                setattr(self, name, self._clocked(call))

    def _clocked(self, call):
        def timed(*arguments):
            started = time.perf_counter()
            result = call(*arguments)
            self.seconds += time.perf_counter() - started
            return result

        return timed


def build(registry: Registry, system: str, shape: geometry.Geometry, trace: Trace, hooks: type[Hooks]) -> Experts:
    """One run as ``harness.session`` builds it: a quarter of the experts in memory, metrics and ledger watching."""
    spec, profile = registry.system(system), hardware.load(registry.hardware_path("m4pro"))
    ledger = Ledger()
    ledger.book("dense", shape.dense_bytes)
    sizes = size(shape, shape.slot_bytes, spec, "0.25", "shared", profile, 0, shape.dense_bytes, 1)
    tiers = make_tiers(shape, shape.slot_bytes, sizes, "shared", False, ledger)
    timeline = VirtualTimeline(
        costs.build(profile, shape, costs.StorageUse(costs.pieces(shape, "packed", profile.engine), profile.engine))
    )
    future = None
    if spec.oracle:
        future = [
            (layer, sorted((layer * shape.experts + row[layer]).tolist()))
            for row in trace.experts.astype(np.int64)
            for layer in range(shape.layers)
        ]
    plugin = spec.make(spec.config(), RunContext(shape, sizes.device, "shared", 0, future))
    watch = StateWatch(ledger, shape)
    metrics = Metrics(16, lambda: (timeline.storage_bytes, timeline.storage_requests))
    return Experts(shape, tiers, timeline, hooks([plugin, metrics, watch]))


def speed(registry: Registry, system: str, shape: geometry.Geometry, trace: Trace) -> float:
    """Tokens per second of CPU time."""
    experts = build(registry, system, shape, trace, Hooks)
    started = time.process_time()
    replay(trace, experts)
    return trace.tokens / (time.process_time() - started)


def hook_share(registry: Registry, system: str, shape: geometry.Geometry, trace: Trace) -> float:
    """Share of the time that passes inside hooks, the cost of looking at the clock included."""
    experts = build(registry, system, shape, trace, Clocked)
    started = time.perf_counter()
    replay(trace, experts)
    return experts.hooks.seconds / (time.perf_counter() - started)


def growth(registry: Registry, system: str, shape: geometry.Geometry, tokens: int) -> float:
    """Bytes that a run still holds per token, between ``tokens`` and ten times as many; the trace itself left out."""
    held = []
    for count in (tokens, 10 * tokens):
        trace = make_trace(shape, count)
        experts = build(registry, system, shape, trace, Hooks)
        tracemalloc.start()
        replay(trace, experts)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    return (held[1] - held[0]) / (9 * tokens)


def main() -> None:
    """Measure each system and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default="lru,slru,belady,ondemand")
    arguments = parser.parse_args()
    registry = load_plugins()
    shape = dataclasses.replace(geometry.load(registry.model_path("qwen3.6-35b-a3b")), top_k=4)
    systems, trace = arguments.systems.split(","), make_trace(shape, arguments.tokens)
    rates: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(arguments.rounds):
        for system in systems:
            rates[system].append(speed(registry, system, shape, trace))
    print(f"{'system':12s} {'tokens/s':>9s} {'inside hooks':>13s} {'bytes/token kept':>17s}   bar {BAR} tokens/s")
    rows = []
    for system in systems:
        row = {
            "system": system,
            "tokens_per_s": max(rates[system]),
            "rounds": rates[system],
            "hook_share": hook_share(registry, system, shape, trace),
            "bytes_per_token": growth(registry, system, shape, arguments.tokens),
        }
        rows.append(row)
        verdict = "ok" if row["tokens_per_s"] >= BAR else "below"
        numbers = f"{row['tokens_per_s']:9.0f} {row['hook_share']:13.0%} {row['bytes_per_token']:17.1f}"
        print(f"{system:12s} {numbers}   {verdict}")
    print(json.dumps({"tokens": arguments.tokens, "systems": rows}, separators=(",", ":")))


if __name__ == "__main__":
    main()
