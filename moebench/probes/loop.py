"""What the loop itself takes of a pass, a layer, an expert, a load, a wait and a hook: replays of experts that are
resident, and of experts that all have to be read, under the observers that every run has.

Knows the loop and its timeline; knows no system but one that decides nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import replay
from moebench.geometry import Geometry
from moebench.harness.details import Anatomy
from moebench.harness.memory import StateWatch
from moebench.hookspecs import hookimpl
from moebench.metrics import Metrics
from moebench.probes.file import ProbeFile
from moebench.probes.samples import Samples, times
from moebench.residency.ledger import Ledger
from moebench.residency.tier import Tier
from moebench.step import DECODE
from moebench.store.engines import open_engine
from moebench.store.pages import aligned_buffer
from moebench.timeline.base import COPY, STALL
from moebench.timeline.base import DECODE as DECODING
from moebench.timeline.wall import WallTimeline
from moebench.trace.format import Trace
from moebench.units import PAGE

STEPS, ENGINE = 48, "direct"
SHALLOW, DEEP, FEW, WIDE = (2, 1), (16, 1), (16, 2), (16, 8)  # layers and experts of a token


class Plain:
    """A system that follows the hooks of a cache and decides nothing."""

    @hookimpl
    def acquired(self, keys, ready) -> None:
        """Told, and kept nowhere."""

    @hookimpl
    def evict(self, need, candidates):
        """Any victims."""


class Durations:
    """An observer of what steps take, waits left out."""

    def __init__(self) -> None:
        self.timeline: WallTimeline | None = None
        self.busy_us: list[float] = []
        self._waited = 0.0

    @hookimpl
    def end_step(self, step, record) -> None:
        """A pass ended."""
        assert self.timeline is not None
        spent = self.timeline.spent
        waited = spent[STALL] + spent[COPY] + spent[DECODING]
        self.busy_us.append((record.duration_s - waited + self._waited) * 1e6)
        self._waited = waited


class Overheads(NamedTuple):
    """Microseconds of the loop by what they are taken for."""

    step: float
    layer: float
    request: float
    wait: float
    load: float


def overheads(file: ProbeFile) -> Overheads:
    """One sample of each, from the medians of replays that differ in one thing."""
    shallow, deep, wide = (_busy_us(file, *shape, resident=True) for shape in (SHALLOW, DEEP, WIDE))
    few, many = (_busy_us(file, *shape, resident=False) for shape in (FEW, WIDE))
    layers, experts = WIDE
    request = (wide - deep) / (layers * (experts - 1))
    layer = (deep - shallow) / (DEEP[0] - SHALLOW[0]) - request
    step = shallow - SHALLOW[0] * (layer + request)
    load = (many - few) / (layers * (experts - FEW[1])) - request
    wait = (few - step) / layers - layer - FEW[1] * (request + load)
    return Overheads(*(max(0.0, value) for value in (step, layer, request, wait, load)))


def hook_call(seconds: float) -> Samples:
    """Microseconds of one hook of a system that does nothing, measured as every run measures its system's."""
    plugin = Plain()
    call: Any = vars(Hooks([plugin], plugin))["acquired"]
    return times(lambda: [call(None, 0, None, None, None) for _ in range(1000)], 1000, seconds)


def _busy_us(file: ProbeFile, layers: int, experts: int, resident: bool) -> float:
    """Median microseconds of a pass, without what it waits for; of twice as many experts every second pass needs the
    same.
    """
    each = 2 * experts
    geometry = Geometry("calibration", layers, each, experts, 64, 64, 0)
    pack = file.pack(PAGE)
    slots = geometry.keys if resident else experts
    arena = aligned_buffer(slots * PAGE).reshape(slots, PAGE)
    tier = Tier("device", slots, PAGE, layers, each, "shared", arena)
    timeline = WallTimeline(open_engine(ENGINE, pack), lambda name, slot: arena[slot])
    try:
        metrics = Metrics(0, lambda: (timeline.storage_bytes, timeline.storage_requests))
        anatomy, watch = Anatomy(metrics, timeline), Durations()
        system = Plain()
        hooks = Hooks([system, watch, anatomy, metrics, StateWatch(Ledger(None), geometry)], system)
        anatomy.hooks, watch.timeline = hooks, timeline
        loop = Experts(geometry, [tier], timeline, hooks)
        if resident:
            loop.preload()
        replay(_trace(layers, experts), loop)
    finally:
        timeline.close()
    return float(np.median(watch.busy_us[STEPS // 4 :]))


def _trace(layers: int, experts: int) -> Trace:
    """Tokens that take the first and the last half of the experts by turns."""
    ids = np.arange(experts, dtype=np.int16) + (np.arange(STEPS, dtype=np.int16) % 2 * experts)[:, None, None]
    return Trace(
        experts=np.ascontiguousarray(np.broadcast_to(ids, (STEPS, layers, experts))),
        phase=np.full(STEPS, DECODE, np.int8),
        sequence=np.zeros(STEPS, np.int32),
        position=np.arange(STEPS, dtype=np.int32),
        metadata={"model": "calibration", "experts": 2 * experts, "top_k": experts, "source": "moebench calibrate"},
    )
