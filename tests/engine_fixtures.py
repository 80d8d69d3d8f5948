"""Small traces, tiers and plugins for tests of the loop."""

from __future__ import annotations

import numpy as np

from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.movement import Rules
from moebench.geometry import Geometry
from moebench.hookspecs import hookimpl
from moebench.residency.tier import Tier
from moebench.systemspec import RunContext
from moebench.timeline.costs import Costs
from moebench.timeline.virtual import VirtualTimeline
from moebench.trace.format import Trace

GEOMETRY = Geometry("small", layers=4, experts=12, top_k=3, hidden=64, intermediate=64, other_parameters=1000)


def costs(**changes) -> Costs:
    """One read takes 1 ms alone; the device reaches four times that throughput at depth 8."""
    read = (0.0, *[1e-3 / min(d, 4) for d in range(1, 9)])
    base = dict(
        read_bytes=GEOMETRY.slot_bytes, expert_bytes=GEOMETRY.expert_bytes, read_s=read, block_s=5e-4, load_host_s=0.0,
        cached_s=1e-5, page_cache_bytes=0, copy_s=2e-4, copy_back_s=3e-4, copy_latency_s=1e-5,
        dense_layer_s=3e-4, dense_row_s=0.0,
        request_s=lambda nbytes, depth: nbytes / GEOMETRY.slot_bytes * 1e-3 / min(depth, 4),
        head_s=1e-4, state_byte_s=0.0, expert_s=1e-4, expert_row_s=0.0, layer_floor_s=0.0, host_sync_s=0.0,
    )  # fmt: skip
    return Costs(**{**base, **changes})


def make_trace(tokens=40, sequences=2, prefill=6, seed=0, geometry=GEOMETRY) -> Trace:
    """Routing with some reuse, from a seed."""
    rng = np.random.default_rng(seed)
    rows = np.empty((tokens, geometry.layers, geometry.top_k), np.int16)
    weight = 1.0 / np.arange(1, geometry.experts + 1)
    for t in range(tokens):
        for layer in range(geometry.layers):
            order = np.roll(np.arange(geometry.experts), layer)
            rows[t, layer] = order[rng.choice(geometry.experts, geometry.top_k, replace=False, p=weight / weight.sum())]
    each = tokens // sequences
    sequence = np.repeat(np.arange(sequences, dtype=np.int32), each)
    position = np.tile(np.arange(each, dtype=np.int32), sequences)
    rows = rows[: len(sequence)]
    phase = (position >= prefill).astype(np.int8)
    meta = {"model": "small", "experts": geometry.experts, "top_k": geometry.top_k, "source": "test"}
    return Trace(rows, phase, sequence, position, metadata=meta)


def make_experts(
    plugins, slots=20, scope="shared", host=0, timeline=None, geometry=GEOMETRY, keep_evicted=True, scratch=0, **rules
):
    """An ``Experts`` over tiers without bytes on a virtual clock."""

    def tier(name, count, by="shared"):
        return Tier(name, count, geometry.slot_bytes, geometry.layers, geometry.experts, by)

    tiers = [tier("device", slots, scope)] + ([tier("host", host)] if host else [])
    beside = tier("scratch", scratch) if scratch else None
    timeline, how = timeline or VirtualTimeline(costs()), Rules(keep_evicted and bool(host), **rules)
    return Experts(geometry, tiers, timeline, Hooks(plugins), how, scratch=beside)


def run_context(slots=20, scope="shared", future=None) -> RunContext:
    """What a system sees when it is built."""
    return RunContext(GEOMETRY, slots, scope, 0, future)


class Watch:
    """Checks, at every event and step, what must always hold."""

    def __init__(self) -> None:
        self.records, self.events, self.experts = [], [], None

    @hookimpl
    def acquired(self, layer, keys, ready):
        self.events.append((layer, tuple(keys), tuple(bool(r) for r in ready)))

    @hookimpl
    def end_step(self, record):
        self.records.append(record)
        if self.experts is not None:
            self.experts.check_integrity()


class Adversary:
    """Does the least helpful legal thing, at random: evicts anything, prefetches anything, refuses admission, shuffles,
    groups reads and compute, and computes anywhere.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    @hookimpl
    def evict(self, need, candidates):
        count = self.rng.integers(need, len(candidates) + 1)
        return self.rng.permutation(candidates)[:count]

    @hookimpl
    def prefetch(self, step, view):
        if self.rng.random() < 0.5:
            return None
        return self.rng.integers(0, view.geometry.keys, self.rng.integers(0, 8))

    @hookimpl
    def admit(self, keys):
        return self.rng.random(len(keys)) < 0.5

    @hookimpl
    def plan_reads(self, keys, view):
        if self.rng.random() < 0.5:
            return self.rng.permutation(keys).tolist()
        by_place = np.asarray(keys)[view.position(keys).argsort()]
        runs = np.split(by_place, np.flatnonzero(self.rng.random(len(keys) - 1) < 0.4) + 1)
        self.rng.shuffle(runs)
        return [tuple(run) for run in runs]

    @hookimpl
    def place(self, keys):
        return self.rng.random(len(keys)) < 0.5

    @hookimpl
    def order_compute(self, ready, pending):
        if len(ready) > 1 and self.rng.random() < 0.3:
            return self.rng.permutation(ready)[: self.rng.integers(1, len(ready) + 1)].tolist()
        both = [*ready, *pending]
        return both[self.rng.integers(len(both))]

    @hookimpl
    def demote(self, keys):
        return self.rng.random(len(keys)) < 0.5
