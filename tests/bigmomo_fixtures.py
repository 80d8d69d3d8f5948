"""BigMoMo on models that compute and on traces, with every knob: tinymoe with its draft, and its committed trace."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from engine_fixtures import Watch, costs

from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop, replay
from moebench.engine.movement import Rules
from moebench.geometry import Geometry
from moebench.harness.relocation import make_relayout
from moebench.residency.places import Places
from moebench.residency.tier import Tier
from moebench.step import PREFILL
from moebench.store.engines import open_engine
from moebench.store.overlay import Overlay
from moebench.store.pages import aligned_buffer
from moebench.store.relocate import RelocatingEngine
from moebench.systems.bigmomo import BigMoMo, BigMoMoConfig, handling
from moebench.systems.bigmomo.equipment import equip
from moebench.systemspec import RunContext, Target
from moebench.timeline.filled import FilledTimeline
from moebench.timeline.virtual import VirtualTimeline
from moebench.timeline.wall import WallTimeline
from moebench.trace.format import load

TINY = Geometry("tinymoe", layers=8, experts=32, top_k=4, hidden=128, intermediate=64, other_parameters=1000)
BASE = {"write_unit_bytes": 4096, "write_unit_s": 1e-5, "map_s": 1e-4, "on_chip_s": 1e-4, "tile_rows": 32}
PROMPTS = ("sort: 4 1 3 =", "a = 3; b = a + 4; b =")
LATENCY_S = 2e-4


def request_s(nbytes: int, depth: int) -> float:
    """A drive of 0.1 GB/s a request and some latency, which four requests at a time share."""
    return (nbytes / 1e8 + LATENCY_S) / min(depth, 4)


@cache
def held_out(tokens=260):
    """Tinymoe's committed trace of held-out prompts, its beginning."""
    trace = load(Path(str(resources.files("moebench.models.tinymoe"))) / "traces" / "held_out.safetensors")
    return trace.take(slice(0, tokens))


class Replayed:
    """One replay of a trace under bigmomo; ``total`` sums a record's field over passes after the prompts."""

    def __init__(self, trace=None, slots=96, scope="per_layer", geometry=TINY, seed=0, **options):
        trace, config = trace or held_out(), BigMoMoConfig(**options)
        equipment = equip(config, Target(geometry.name, geometry, trace=trace))
        run = RunContext(geometry, slots, scope, seed, equipment=equipment, request_s=request_s)
        self.system, self.watch, rules = BigMoMo(config, run), Watch(), handling(config)
        each = {"read_bytes": geometry.slot_bytes, "expert_bytes": geometry.expert_bytes, "request_s": request_s}
        read_s = (0.0, *[request_s(geometry.slot_bytes, depth) for depth in range(1, 33)])
        self.timeline = VirtualTimeline(costs(**{**BASE, **each, "read_s": read_s}), Places.in_order(geometry.keys))
        plugins, relayout = [self.system, self.watch], None
        if rules.relocation_bytes:
            relayout = make_relayout(self.timeline, None, geometry.expert_bytes, rules.relocation_bytes, 0)
            plugins.append(relayout)
        tiers = [Tier("device", slots, geometry.slot_bytes, geometry.layers, geometry.experts, scope)]
        self.experts = Experts(
            geometry, tiers, self.timeline, Hooks(plugins), Rules(pool=rules.pool), self.timeline.places
        )
        self.experts.relayout, self.watch.experts = relayout, self.experts
        self.experts.read_estimate_s = read_s[1]
        replay(trace, self.experts, 1, 16, equipment.acceptance, seed)
        self.counts = {**self.system.report(), **(relayout.report() if relayout else {})}

    @property
    def passes(self):
        """Records of all passes after the prompts."""
        return [r for r in self.watch.records if r.step.phase != PREFILL]

    def total(self, name):
        """Sum over passes after the prompts; lists are summed too."""
        values = [getattr(r, name) for r in self.passes]
        return sum(sum(v) if isinstance(v, list) else v for v in values)

    @property
    def emitted(self):
        """Tokens after the first of each request."""
        return sum(r.step.emits for r in self.passes)


class Live:
    """Tinymoe at int4 with its pack, backend and draft; answers the same prompts under any plugin and cache size."""

    def __init__(self):
        from moebench.backends.torch_model import TorchBackend
        from moebench.harness.assets import load_live
        from moebench.harness.plan import embedded_folder

        self.model = load_live(embedded_folder(), "tinymoe", "int4", "packed")
        self.pack, self.geometry = self.model.pack, self.model.geometry
        self.backend = TorchBackend(self.pack, self.pack.dense_path, self.model.config, numerics="row_invariant")
        self.target = Target(
            "tinymoe", self.geometry, self.pack.manifest.model["weights_hash"], self.model.config
        )  # fmt: skip
        self.prompts = [self.model.tokenizer(p)["input_ids"] for p in PROMPTS]

    def plain(self, tokens=20):
        """Greedy answers with everything kept, and their logits."""
        return self.answer([], self.geometry.keys, "shared", tokens)

    def bigmomo(self, slots, scope="per_layer", tokens=20, clock="virtual", folder=None, drafter=None, **options):
        """Answers under bigmomo; ``folder`` is where an overlay may live, without it nothing changes places."""
        config = BigMoMoConfig(**options)
        equipment = equip(config, self.target)
        if equipment.draft is not None and drafter is None:
            drafter = self.backend.drafter(equipment.draft)
        if drafter is not None:
            drafter.reset(1)
        run = RunContext(
            self.geometry, slots, scope, ops=self.backend.ops, equipment=equipment, drafter=drafter, request_s=request_s
        )
        self.system = BigMoMo(config, run)
        rules = handling(config)
        return self.answer([self.system], slots, scope, tokens, clock, folder, rules)

    def answer(self, plugins, slots, scope, tokens, clock="virtual", folder=None, rules=None):
        """Tokens and logits of all prompts, one after the other."""
        pack, geometry = self.pack, self.geometry
        arena = aligned_buffer(slots * pack.slot_bytes).reshape(slots, pack.slot_bytes)
        arena[:] = 0xFF  # poison: bytes nobody loaded are NaN
        tiers = [Tier("device", slots, pack.slot_bytes, geometry.layers, geometry.experts, scope, arena)]
        moves = rules.relocation_bytes if rules and folder else 0
        if moves:
            overlay = Overlay.create(pack, folder)
            engine = RelocatingEngine(open_engine("pread", overlay), overlay)
        else:
            engine = open_engine("pread", pack)
        places = Places(pack.position(np.arange(pack.keys)))
        each = costs(**{**BASE, "request_s": request_s})
        if clock == "wall":
            timeline = WallTimeline(engine, lambda name, slot: arena[slot])
        else:
            timeline = FilledTimeline(each, engine, lambda name, slot: arena[slot], places)
        self.relayout = make_relayout(timeline, engine, geometry.expert_bytes, moves, 0) if moves else None
        self.engine, self.watch = engine, Watch()
        hooks = Hooks([*plugins, self.watch, *([self.relayout] if self.relayout else [])])
        try:
            experts = Experts(geometry, tiers, timeline, hooks, Rules(pool=rules.pool if rules else 0), places)
            experts.relayout = self.relayout
            if clock == "virtual":
                experts.read_estimate_s = each.read_s[1]
            loop = Loop(self.backend, experts, 16)
            out = [loop.generate([prompt], tokens, keep_logits=True) for prompt in self.prompts]
            experts.drain()
            experts.check_integrity()
            engine.check_integrity()
        finally:
            timeline.close()
        return [g.tokens[0] for g in out], [np.concatenate(g.logits) for g in out]
