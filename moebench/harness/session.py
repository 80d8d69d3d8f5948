"""A session: one system with its tiers, hooks, timeline and loop, ready to run requests. Built anew for every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moebench.backends.device import Device, DeviceSlots
from moebench.budget import parse_bytes
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.movement import Rules
from moebench.geometry import Geometry
from moebench.harness import costs as cost_model
from moebench.harness.clocks import open_clock
from moebench.harness.details import Anatomy
from moebench.harness.frame import Frame
from moebench.harness.memory import Sizes, StateWatch, make_tiers, size, staging_slots
from moebench.harness.plan import Cell
from moebench.harness.relocation import make_relayout, open_engine
from moebench.metrics import Metrics
from moebench.residency.ledger import Ledger
from moebench.residency.places import Places
from moebench.residency.tier import Tier
from moebench.store.engines import CUTS, DEPTH
from moebench.store.pages import aligned_buffer
from moebench.systemspec import Equipment, RunContext
from moebench.timeline.base import Timeline
from moebench.timeline.virtual import VirtualTimeline


@dataclass
class Session:
    """What one run is made of. ``close`` stops threads; always call it."""

    experts: Experts
    timeline: Timeline
    metrics: Metrics
    ledger: Ledger
    hooks: Hooks
    anatomy: Anatomy

    def close(self) -> None:
        """Stop the timeline and its engine."""
        self.timeline.close()


@dataclass(frozen=True, eq=False)
class Memory:
    """What a session holds: slots, their tiers (the scratch slots apart), and the ledger that booked all."""

    sizes: Sizes
    tiers: list[Tier]
    scratch: Tier | None
    ledger: Ledger


def open_session(
    cell: Cell,
    geometry: Geometry,
    registry: Any,
    *,
    pack: Any = None,
    dense_bytes: int,
    dense_bits: float | None = None,
    kv_bytes: Any = None,
    future: Sequence[tuple[int, Sequence[int]]] | None = None,
    observers: Sequence[object] = (),
    warmup_tokens: int = 0,
    batch: int = 1,
    context: int = 0,
    longest_prompt: int = 1,
    equipment: Equipment | None = None,
    ops: Any = None,
    drafter: Any = None,
    allocate: Callable[[int], np.ndarray] = aligned_buffer,
    device: Device | None = None,
    transient_bytes: int = 0,
) -> Session:
    """Size, book and connect everything. ``pack`` is None on runs that move no bytes; ``context`` is the longest
    sequence and ``longest_prompt`` the longest prompt, both in tokens; 0 on runs in which nothing computes.
    ``equipment`` is what the system brings, ``ops`` the arithmetic of a backend that computes, ``drafter`` a model that
    drafts for it, ``allocate(nbytes)`` its memory for experts on the host, ``device`` one of its own memory that it
    computes on, ``transient_bytes`` what it takes for a moment beside a pass's rows.
    """
    equipment = equipment or Equipment()
    geometry = replace(geometry, top_k=equipment.top_k or geometry.top_k)
    frame = Frame(cell, geometry, pack, equipment, batch, context, longest_prompt)
    held = dict(equipment.held_bytes)
    if drafter is not None:
        drafter.reset(batch)
        remembered = batch * context * drafter.kv_bytes_per_token
        held["draft"] = held.get("draft", 0) + drafter.held_bytes + remembered
    engine = _engine(frame, registry)
    apart = None if device is None else DeviceSlots(device, allocate)
    try:
        memory = _book(frame, engine, (dense_bytes, transient_bytes), held, allocate, apart)
        places = Places.in_order(geometry.keys) if pack is None else Places(pack.position(np.arange(pack.keys)))
        rows = {tier.name: tier.rows for tier in (*memory.tiers, memory.scratch) if tier is not None}
        filled = memory.ledger.total_bytes + frame.state_bytes
        timeline = open_clock(frame, engine, lambda tier, slot: rows[tier][slot], places, filled, dense_bits, apart)
    except BaseException:
        if apart is not None:
            apart.close()
        if engine is not None:
            engine.close()
        raise
    run = RunContext(
        geometry, memory.sizes.device, cell.config.scope, cell.config.seed,
        future if cell.spec.foresees(cell.config.knobs) else None, batch, ops, equipment, drafter, _request_s(frame),
    )  # fmt: skip
    metrics = Metrics(warmup_tokens, lambda: (timeline.storage_bytes, timeline.storage_requests))
    anatomy, watch = Anatomy(metrics, timeline), StateWatch(memory.ledger, geometry, kv_bytes)
    try:
        plugins = [cell.spec.make(cell.config.knobs, run), anatomy, metrics, watch, *observers]  # last is called first
        experts = _loop(frame, memory, timeline, engine, places, plugins, warmup_tokens)
        anatomy.hooks = experts.hooks
        if cell.spec.sizing == "full":
            experts.preload()
    except BaseException:
        timeline.close()
        raise
    return Session(experts, timeline, metrics, memory.ledger, experts.hooks, anatomy)


def _engine(frame: Frame, registry: Any) -> Any:
    """The open read engine, on a private overlay where experts change places; None on runs that move no bytes."""
    cell, pack, handling = frame.cell, frame.pack, frame.handling
    if pack is None:
        return None
    options: dict[str, Any] = {}
    name = cell.engine
    if cell.clock == "virtual" and pack.manifest.extents.whole and not pack.coded:
        name = "pread"  # time is the declared engine's all the same; whole experts take no staging with any engine
    if handling.whole_reads and name in CUTS:
        options["block_bytes"] = 0
    if cell.config.depth:
        options[DEPTH[name]] = cell.config.depth
    if pack.coded and frame.two_tiers:  # the host keeps what is stored, the way up decodes
        options["coded"] = True
    factory = registry.engine(name)
    relocates = handling.relocation_bytes and cell.clock == "wall"
    return open_engine(factory, pack, **options) if relocates else factory(pack, **options)


def _book(
    frame: Frame, engine: Any, own: tuple[int, int], held: Mapping[str, int], allocate: Callable[[int], np.ndarray],
    apart: DeviceSlots | None,
) -> Memory:  # fmt: skip
    """Sizes, ledger and tiers; ``own`` are the model's dense and transient bytes, ``held`` those of what system and
    drafter hold, by category.
    """
    config, geometry, handling = frame.cell.config, frame.geometry, frame.handling
    slot_bytes, staging = geometry.slot_bytes, 0
    if engine is not None:
        slot_bytes, staging = max(frame.pack.slot_bytes, engine.buffer_bytes), engine.staging_bytes
    if handling.relocation_bytes and frame.cell.clock == "virtual":
        staging += 2 * slot_bytes  # the two experts of a swap
    ledger = Ledger(None if config.memory is None else parse_bytes(config.memory, "memory"))
    dense_bytes, transient_bytes = own
    activations = frame.activation_bytes + transient_bytes
    fixed = dense_bytes + activations + frame.state_bytes + sum(held.values())
    sizes = size(
        geometry, slot_bytes, frame.cell.spec, config.budget, config.scope, frame.cell.profile, staging, fixed,
        1 + frame.two_tiers, config.device_budget, handling,
    )  # fmt: skip
    ledger.book("dense", dense_bytes)
    ledger.book("activations", activations)
    ledger.book("staging", staging)
    for category, nbytes in held.items():
        ledger.book(category, nbytes)
    tiers = make_tiers(geometry, slot_bytes, sizes, config.scope, engine is not None, ledger, allocate, apart)
    ledger.set("kv", frame.state_bytes)  # what it will grow to must fit too
    ledger.set("kv", 0)
    ledger.forget_peak()
    scratch = tiers.pop() if sizes.scratch else None
    return Memory(sizes, tiers, scratch, ledger)


def _request_s(frame: Frame) -> Any:
    """Seconds of one storage request; None where no request can read several experts."""
    cell = frame.cell
    alone = len(cost_model.pieces(frame.geometry, cell.config.layout, cell.engine)) > 1 or cell.engine == "mmap"
    return None if alone else cost_model.request_seconds(cell.profile)


def _loop(
    frame: Frame, memory: Memory, timeline: Any, engine: Any, places: Places, plugins: list[object], warmup: int
) -> Experts:
    """Hooks bound and joined with tiers and timeline to what serves experts; the first plugin is the system."""
    geometry, handling, relayout, system = frame.geometry, frame.handling, None, plugins[0]
    if handling.relocation_bytes:
        relayout = make_relayout(timeline, engine, geometry.expert_bytes, handling.relocation_bytes, warmup)
        plugins = [*plugins, relayout]
    rules = Rules(
        keep_evicted=handling.host_cache and memory.sizes.host > max(staging_slots(geometry), handling.pool),
        keep_landed=handling.host_cache,
        late_eviction=handling.late_eviction,
        pool=handling.pool,
        wave=handling.wave,
    )
    experts = Experts(geometry, memory.tiers, timeline, Hooks(plugins, system), rules, places, memory.scratch)
    experts.relayout = relayout
    if isinstance(timeline, VirtualTimeline):
        experts.estimates = timeline.costs.step_s > 0  # a machine whose loop was measured: as it would measure itself
        if not experts.estimates:
            experts.read_estimate_s, experts.copy_estimate_s = timeline.costs.read_s[1], timeline.costs.copy_s
    return experts
