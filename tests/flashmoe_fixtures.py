"""Eviction nets made by hand or at random, and small traces, for tests of FlashMoE."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from engine_fixtures import GEOMETRY, Watch, costs, make_experts, make_trace

from moebench.engine.loop import replay
from moebench.hookspecs import hookimpl
from moebench.systems.flashmoe import FlashMoe, FlashMoeConfig
from moebench.systems.flashmoe.nets import Nets, parameters
from moebench.systemspec import Equipment, RunContext
from moebench.timeline.virtual import VirtualTimeline


def random_nets(kind="joint", layers=GEOMETRY.layers, experts=GEOMETRY.experts, hidden=8, seed=0, scale=4000) -> Nets:
    """Weights of about one."""
    rng = np.random.default_rng(seed)
    shape = (layers, parameters(kind, experts, hidden))
    return Nets(kind, experts, hidden, rng.integers(-scale, scale, shape).astype(np.int16))


class Logged(FlashMoe):
    """FlashMoE that writes down whom it evicted, per demand."""

    def __init__(self, config, run) -> None:
        super().__init__(config, run)
        self.gone: list[list[int]] = []

    @hookimpl
    def acquired(self, step, keys, ready):
        super().acquired(step, keys, ready)
        self.gone.append([])

    @hookimpl
    def evict(self, tier, need, candidates, view):
        out = super().evict(tier, need, candidates, view)
        if tier == view.tiers[0]:
            self.gone[-1] += out.tolist()
        return out


def system(config, nets, geometry=GEOMETRY, slots=20, cls=Logged, scope="per_layer") -> FlashMoe:
    """The plugin of one run."""
    return cls(config, RunContext(geometry, slots, scope, equipment=Equipment(content=nets)))


def run(nets, trace=None, slots=24, host=0, late=True, net="auto", chunk=4, batch=1, geometry=GEOMETRY, **changes):
    """Replay a trace through the loop; returns the plugin, the watch and the loop's experts."""
    trace = trace or make_trace(60, geometry=geometry)
    late = late and net != "none"
    plugin = system(FlashMoeConfig(net=net, late=late or net == "none"), nets, geometry, slots)
    watch = Watch()
    timeline = VirtualTimeline(costs(**changes))
    experts = make_experts([plugin, watch], slots, "per_layer", host, timeline, geometry)
    experts.rules, watch.experts = replace(experts.rules, late_eviction=late), experts
    replay(trace, experts, batch=batch, chunk=chunk)
    return plugin, watch, experts


def with_requests(trace, count):
    """The trace cut into ``count`` requests of equal length, without prompts."""
    each = -(-trace.tokens // count)
    row = np.arange(trace.tokens, dtype=np.int32)
    return replace(trace, sequence=row // each, position=row % each, phase=np.ones(trace.tokens, np.int8))
