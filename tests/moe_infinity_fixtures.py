"""MoE-Infinity built by hand around small collections, on small traces."""

from __future__ import annotations

import dataclasses

import numpy as np
from engine_fixtures import GEOMETRY, Watch, costs, make_experts, make_trace

from moebench.engine.loop import replay
from moebench.hookspecs import hookimpl
from moebench.systems.moe_infinity import MoeInfinity, MoeInfinityConfig
from moebench.systems.moe_infinity.counting import count
from moebench.systemspec import Equipment, RunContext
from moebench.timeline.virtual import VirtualTimeline

FLOAT = 4


def others(sequences=12, seed=9):
    """Matrices of other requests to the router of ``make_trace``, float64 [N, L, E]."""
    return count(make_trace(30 * sequences, sequences, seed=seed)).astype(np.float64)


def context(config, start=None, slots=20, scope="shared", batch=1, geometry=GEOMETRY):
    """The run that a session would make, with ``start`` as the collection."""
    start = others() if start is None else start
    capacity = config.capacity or len(start)
    held = {"predictor": capacity * geometry.keys * FLOAT} if config.matches else {}
    return RunContext(geometry, slots, scope, batch=batch, equipment=Equipment(held, content=start))


class Logged(MoeInfinity):
    """The system, with all that it answers written down and its invariants checked at every answer."""

    def __init__(self, config, run):
        super().__init__(config, run)
        self.reads, self.victims, self.demoted = [], [], []

    @hookimpl
    def prefetch(self, step, point, view):
        keys = super().prefetch(step, point, view)
        if keys is not None:
            self.reads.append((step, point, keys.tolist(), view.resident(keys).any() or view.in_flight(keys).any()))
        return keys

    @hookimpl
    def evict(self, tier, need, candidates, view):
        fresh = self.fresh.copy()
        victims = super().evict(tier, need, candidates, view)
        self.victims.append((tier, victims.tolist(), view.reading_ahead, fresh, set(candidates.tolist())))
        return victims

    @hookimpl
    def demote(self, keys, view):
        stay = super().demote(keys, view)
        self.demoted.append(stay)
        return stay


def run(config=None, trace=None, slots=20, scope="shared", batch=1, host=0, start=None, cls=Logged, chunk=4, **changes):
    """Replay a trace; returns the plugin, the watch and the loop."""
    config = config or MoeInfinityConfig()
    trace = trace or make_trace(120, 4)
    system, watch = cls(config, context(config, start, slots, scope, batch)), Watch()
    timeline = VirtualTimeline(costs(**changes))
    experts = make_experts([system, watch], slots=slots, scope=scope, host=host, timeline=timeline)
    experts.read_estimate_s, experts.copy_estimate_s = timeline.costs.read_s[1], timeline.costs.copy_s
    watch.experts = experts
    replay(trace, experts, batch=batch, chunk=chunk)
    return system, watch, experts


def total(watch, name, phase=1):
    """A counter of the records of one phase, added up."""
    values = [getattr(record, name) for record in watch.records if record.step.phase == phase]
    return sum(sum(v) if isinstance(v, list) else v for v in values)


def options(**changes):
    """A configuration."""
    return dataclasses.replace(MoeInfinityConfig(), **changes)
