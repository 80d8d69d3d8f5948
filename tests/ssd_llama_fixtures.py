"""Runs of ssd_llama on small tiers: on a modeled clock without bytes, and through the harness on a random pack."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from engine_fixtures import GEOMETRY, Watch, costs

from moebench import hardware
from moebench.config import RunConfig, WorkloadConfig
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import replay
from moebench.engine.movement import Rules
from moebench.geometry import Geometry
from moebench.harness.plan import Cell
from moebench.harness.session import open_session
from moebench.plugins import load_plugins
from moebench.residency.tier import Tier
from moebench.store.engines import open_engine
from moebench.systems.ssd_llama import SsdLlama, SsdLlamaConfig, handling
from moebench.systemspec import RunContext
from moebench.timeline.virtual import VirtualTimeline
from moebench.trace.format import Trace, load

WHOLE = load(Path(str(resources.files("moebench.models.tinymoe"))) / "traces" / "held_out.safetensors")
CUT = int(WHOLE.sequence_starts[2])  # two requests
HELD_OUT = Trace(
    *(c[:CUT] for c in (WHOLE.experts, WHOLE.phase, WHOLE.sequence, WHOLE.position)), metadata=WHOLE.metadata
)
TINY = Geometry("tinymoe", layers=8, experts=32, top_k=4, hidden=1024, intermediate=64, other_parameters=1000)
SMALL = Geometry("small", layers=3, experts=24, top_k=2, hidden=128, intermediate=64, other_parameters=1000)
ALL = 1 << 20  # tokens of a prompt pass


class Residency(Watch):
    """What each tier holds after every step (bool [tiers, keys]), and who was made to leave which tier."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[np.ndarray] = []

    def look(self, experts) -> None:
        """Look at these tiers from now on."""
        self.experts = experts
        inner = experts.hooks.end_step

        def end_step(step, record, view):
            inner(step, record, view)
            self.held.append(np.stack([tier.slot_of >= 0 for tier in experts.tiers]))

        experts.hooks.end_step = end_step


def build(config=None, slots=64, host=0, geometry=TINY, plugins=(), **changes):
    """(system, watch, experts) over tiers without bytes, moved as the system's own handling says."""
    config = config or SsdLlamaConfig()
    how = handling(config)

    def tier(name, count):
        return Tier(name, count, geometry.slot_bytes, geometry.layers, geometry.experts)

    tiers = [tier("device", slots)] + ([tier("host", host)] if host else [])
    beside = tier("scratch", geometry.top_k) if how.on_host else None
    rules = Rules(bool(host) and how.host_cache, how.host_cache, pool=how.pool, wave=how.wave)
    system, watch = SsdLlama(config, RunContext(geometry, slots, "shared")), Residency()
    hooks = Hooks([system, watch, *plugins])
    sizes = dict(read_bytes=geometry.slot_bytes, expert_bytes=geometry.expert_bytes)
    sizes["request_s"] = lambda nbytes, depth: nbytes / geometry.slot_bytes * 1e-3 / min(depth, 4)
    clock = VirtualTimeline(costs(**{**sizes, "host_expert_s": 1e-3, "host_trip_s": 1e-5, **changes}))
    experts = Experts(geometry, tiers, clock, hooks, rules, scratch=beside)
    watch.look(experts)
    return system, watch, experts


def run(config=None, trace=HELD_OUT, chunk=ALL, **sizes):
    """The same, after a trace."""
    system, watch, experts = build(config, **sizes)
    replay(trace, experts, 1, chunk)
    return system, watch, experts


def total(watch, name, phase=None) -> float:
    """Sum of one counter over the steps (of one phase)."""
    return sum(getattr(r, name) for r in watch.records if phase is None or r.step.phase == phase)


def decode_trace(rows, geometry) -> Trace:
    """One sequence of decode steps from experts [tokens, layers, k]."""
    rows = np.asarray(rows, np.int16)
    count = len(rows)
    meta = {"model": "made", "experts": geometry.experts, "top_k": rows.shape[2], "source": "test"}
    return Trace(
        rows, np.ones(count, np.int8), np.zeros(count, np.int32), np.arange(count, dtype=np.int32), metadata=meta
    )


def open_replay(pack, geometry, knobs=None, engine="pread", clock="wall", options=None, **config):
    """A session of the harness on a pack, as ``moebench run`` opens it on a machine of one memory."""
    registry, knobs = load_plugins(), knobs or SsdLlamaConfig()
    spec = registry.system("ssd_llama")
    profile = hardware.load(registry.hardware_path("m4pro"))
    settings = dict(
        model=geometry.name, budget="0.6", scope="shared", workload=WorkloadConfig(new_tokens=64), chunk=ALL
    )
    whole = RunConfig("ssd_llama", "m4pro", knobs, **settings | config)
    cell = Cell(whole, spec, profile, clock, "test", engine, geometry=geometry)
    engines = SimpleNamespace(engine=lambda name: partial(open_engine, name, **(options or {})))
    return open_session(cell, geometry, engines, pack=pack, dense_bytes=0, kv_bytes=lambda: 0, longest_prompt=0)


def options(**changes) -> SsdLlamaConfig:
    """Its options, changed."""
    return replace(SsdLlamaConfig(), **changes)


__all__ = ["GEOMETRY", "HELD_OUT", "SMALL", "TINY", "build", "decode_trace", "open_replay", "options", "run", "total"]
