"""What the harness itself takes for a step as budget, experts, layers and context grow: disk and model left out.

    python benchmarks/growth.py [--tokens N] [--rounds N] [--systems lru,ssd_llama,...]

The measuring loop runs a routing trace through its hooks with an engine whose reads are over at once and a model that
computes nothing: what is left is the loop, the hooks of the system, tickets and observers. Processor time a step after
the cache has filled, best of the rounds; everything starts from one point (24 layers of 128 experts, top 8, a quarter
of them in memory, 1024 tokens of context) and one thing grows. The last column is the exponent of that growth between
the first and the last value: 1 is linear. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
from replay_speed import make_trace

from moebench import geometry
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import replay_steps
from moebench.engine.movement import Rules
from moebench.metrics import Metrics
from moebench.plugins import Registry, load_plugins
from moebench.residency.tier import Tier
from moebench.step import Routing
from moebench.systemspec import RunContext
from moebench.timeline.wall import WallTimeline

BASE = {"budget": 0.25, "experts": 128, "layers": 24, "context": 1024}
AXES = {
    "budget": (0.05, 0.1, 0.25, 0.5, 0.9),
    "experts": (32, 64, 128, 256, 512),
    "layers": (6, 12, 24, 48, 96),
    "context": (1024, 8192, 65536, 262144),
}
WARM = 0.5  # share of the tokens before the clock runs


class Instant:
    """A read engine whose reads are over at once."""

    coded, calls, requests, bytes_read, staging_bytes = False, 0, 0, 0, 0

    def __init__(self, shape: geometry.Geometry) -> None:
        self.pack = SimpleNamespace(expert_bytes=shape.expert_bytes, read_bytes=lambda key: shape.slot_bytes)

    def submit_all(self, keys: Sequence[int], buffers: Sequence[Any], priority: int) -> list[Future[int]]:
        """Nothing to do."""
        self.calls += len(keys)
        futures: list[Future[int]] = [Future() for _ in keys]
        for future in futures:
            future.set_result(0)
        return futures

    def close(self) -> None:
        """Nothing is open."""


def step_us(registry: Registry, system: str, point: dict[str, float], tokens: int) -> float:
    """Microseconds of processor time of one decode step."""
    shape = geometry.load(registry.model_path("qwen3-30b-a3b"))
    shape = dataclasses.replace(shape, layers=int(point["layers"]), experts=int(point["experts"]))
    trace = make_trace(shape, tokens)
    trace = dataclasses.replace(trace, position=trace.position + np.int32(point["context"]))
    spec = registry.system(system)
    config, slots = spec.config(), max(shape.top_k, round(point["budget"] * shape.keys))
    handling = spec.handling(config)
    tier = Tier("device", slots, shape.slot_bytes, shape.layers, shape.experts)
    timeline = WallTimeline(Instant(shape), lambda name, slot: None)  # type: ignore[arg-type, return-value]
    plugin = spec.make(config, RunContext(shape, slots, "shared", 0, None))
    metrics = Metrics(16, lambda: (timeline.storage_bytes, timeline.storage_requests))
    rules = Rules(pool=handling.pool, wave=handling.wave, late_eviction=handling.late_eviction)
    experts = Experts(shape, [tier], timeline, Hooks([plugin, metrics], plugin), rules)
    warm, counted, started = int(WARM * tokens), 0, 0.0
    for number, (step, rows, new) in enumerate(replay_steps(trace, 1, 32)):
        if number == warm:
            started = time.process_time()
        if new is not None:
            experts.begin_request(new)
        experts.begin(step)
        for layer in range(shape.layers):
            for _ in experts.serve(layer, None, Routing(trace.experts[rows][:, layer], None))[1]:
                pass
        experts.end()
        counted += number >= warm
    spent = time.process_time() - started
    timeline.close()
    return spent / counted * 1e6


def exponent(values: tuple[float, ...], times: list[float]) -> float:
    """Of the growth between the ends."""
    return math.log(times[-1] / times[0]) / math.log(values[-1] / values[0])


def main() -> None:
    """Measure all axes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default="lru,decayed_lfu,ssd_llama")
    arguments = parser.parse_args()
    registry, rows = load_plugins(), []
    for axis, values in AXES.items():
        print(f"{axis:<14}" + "".join(f"{value:>12g}" for value in values) + "    exponent")
        for system in arguments.systems.split(","):
            times = []
            for value in values:
                point = {**BASE, axis: value}
                runs = [step_us(registry, system, point, arguments.tokens) for _ in range(arguments.rounds)]
                times.append(min(runs))
            rows.append(
                {"axis": axis, "system": system, "values": values, "us": times, "exponent": exponent(values, times)}
            )
            print(
                f"{system:<14}" + "".join(f"{us:9.0f} us" for us in times) + f"{rows[-1]['exponent']:12.2f}", flush=True
            )
    print(json.dumps({"base": BASE, "tokens": arguments.tokens, "rows": rows}, separators=(",", ":")))


if __name__ == "__main__":
    main()
