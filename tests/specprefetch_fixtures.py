"""SpecPrefetch built by hand: on tinymoe's committed trace with a modeled clock, and around random adapters."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from engine_fixtures import Watch, costs

from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import replay, replay_steps
from moebench.engine.movement import Rules
from moebench.geometry import Geometry
from moebench.residency.tier import Tier
from moebench.step import DECODE, Routing
from moebench.systems.specprefetch import SpecPrefetch, SpecPrefetchConfig
from moebench.systems.specprefetch.adapters import Shape
from moebench.systems.specprefetch.artefact import Artefact
from moebench.systems.specprefetch.equipment import equip
from moebench.systemspec import RunContext, Target
from moebench.timeline.virtual import VirtualTimeline
from moebench.trace.format import load

TINY = Geometry("tinymoe", layers=8, experts=32, top_k=4, hidden=128, intermediate=64, other_parameters=1000)
BASE = {"read_bytes": TINY.slot_bytes, "expert_bytes": TINY.expert_bytes, "dense_layer_s": 2e-3}
MODES = ("off", "pred0", "naive_prev_token", "gate_replay", "adapter", "oracle", "adversarial")


@cache
def held_out(tokens=260):
    """Tinymoe's committed trace of held-out prompts, its beginning."""
    trace = load(Path(str(resources.files("moebench.models.tinymoe"))) / "traces" / "held_out.safetensors")
    return trace.take(slice(0, tokens))


def demands(trace, batch=1, chunk=16):
    """All demands of a trace in the loop's order."""
    steps = replay_steps(trace, batch, chunk)
    return [
        (layer, [layer * trace.expert_count + e for e in Routing(trace.experts[rows, layer], None).demand(step.valid)])
        for step, rows, _ in steps
        for layer in range(trace.layers)
    ]


class Run:
    """One replay of the held-out trace; ``total`` sums a record's field over decode steps."""

    def __init__(
        self,
        trace=None,
        slots=64,
        scope="shared",
        host=0,
        batch=1,
        timeline=None,
        cls=SpecPrefetch,
        change=None,
        **options,
    ):  # fmt: skip
        trace = trace or held_out()
        config, geometry = SpecPrefetchConfig(**options), TINY
        equipment = equip(config, Target("tinymoe", geometry, trace=trace))
        future = demands(trace, batch) if config.mode == "oracle" else None
        self.equipment, self.watch = equipment, Watch()
        self.system = cls(config, RunContext(geometry, slots, scope, 0, future, batch, None, equipment))
        tiers = [Tier("device", slots, geometry.slot_bytes, geometry.layers, geometry.experts, scope)]
        if host:
            tiers.append(Tier("host", host, geometry.slot_bytes, geometry.layers, geometry.experts))
        self.timeline = timeline or VirtualTimeline(costs(**{**BASE, **(change or {})}))
        self.experts = Experts(geometry, tiers, self.timeline, Hooks([self.system, self.watch]), Rules(bool(host)))
        read, copy = self.timeline.costs.read_s[1], self.timeline.costs.copy_s if host else 0.0
        self.experts.read_estimate_s, self.experts.copy_estimate_s = read, copy
        self.watch.experts = self.experts
        replay(trace, self.experts, batch, 16)
        self.counts = self.system.report()

    def total(self, name):
        """Sum over decode steps; lists are summed too."""
        values = [getattr(r, name) for r in self.watch.records if r.step.phase == DECODE]
        return sum(sum(v) if isinstance(v, list) else v for v in values)

    @property
    def hit_rate(self):
        """Of decode steps."""
        return self.total("hits") / self.total("requests")

    @property
    def all_bytes(self):
        """Read in the whole run."""
        return sum(r.read_bytes for r in self.watch.records)


def artefact(shape=None, seed=0, zero_b=False, **changes):
    """Random adapters and routers for a small model."""
    shape = shape or Shape(layers=4, experts=8, hidden=64, rank=4, horizon=2)
    rng = np.random.default_rng(seed)

    def matrix(rows, columns, scale):
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float16)

    adapters = {}
    for name in shape.names:
        b = matrix(*shape.sides["B"], 0.5)
        adapters[name] = (matrix(*shape.sides["A"], 0.3), b * 0 if zero_b else b)
    gates = tuple(matrix(shape.experts, shape.hidden, 0.2) for _ in range(shape.layers))
    return Artefact(**{"model": "small", "weights_hash": "abc", "top_k": 2, "provenance": {"seed": seed}, **changes},
                    shape=shape, adapters=adapters, gates=gates)  # fmt: skip
