"""A session: one system with its tiers, hooks, timeline and loop, ready to run requests. Built anew for every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moebench.budget import parse_bytes
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.movement import Rules
from moebench.geometry import Geometry
from moebench.harness import costs as cost_model
from moebench.harness.memory import StateWatch, make_tiers, require_tiers, size, staging_slots
from moebench.harness.plan import Cell
from moebench.harness.relocation import make_relayout, open_engine, require_movable
from moebench.metrics import Metrics
from moebench.residency.ledger import Ledger
from moebench.residency.places import Places
from moebench.systemspec import Equipment, RunContext
from moebench.timeline.base import Timeline
from moebench.timeline.virtual import VirtualTimeline
from moebench.units import align_up

ACTIVATION_BYTES = 2  # bf16


@dataclass
class Session:
    """What one run is made of. ``close`` stops threads; always call it."""

    experts: Experts
    timeline: Timeline
    metrics: Metrics
    ledger: Ledger
    hooks: Hooks

    def close(self) -> None:
        """Stop the timeline and its engine."""
        self.timeline.close()


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
) -> Session:
    """Size, book and connect everything. ``pack`` is None on runs that move no bytes; ``context`` is the longest
    sequence and ``longest_prompt`` the longest prompt, both in tokens; 0 on runs in which nothing computes.
    ``equipment`` is what the system brings, ``ops`` the arithmetic of a backend that computes, ``drafter`` a model that
    drafts for it.
    """
    equipment = equipment or Equipment()
    held = dict(equipment.held_bytes)
    if drafter is not None:
        drafter.reset(batch)
        remembered = batch * context * drafter.kv_bytes_per_token
        held["draft"] = held.get("draft", 0) + drafter.held_bytes + remembered
    geometry = replace(geometry, top_k=equipment.top_k or geometry.top_k)
    config, spec, profile = cell.config, cell.spec, cell.profile
    real = pack is not None
    handling = spec.handling(config.knobs)
    # A CPU box has one memory: it has two tiers only where the run splits it.
    two = config.device_budget != "auto" or not (profile.unified or cell.clock == "wall")
    require_tiers(spec.id, handling, two, config.codec)
    cuts_reads = cell.engine in ("mmap", "pread", "direct")
    options: dict[str, Any] = {"block_bytes": 0} if handling.whole_reads and cuts_reads else {}
    if real and pack.coded and two:  # the host keeps what is stored, the way up decodes
        options["coded"] = True
    if moves := handling.relocation_bytes:
        require_movable(config)
    engine = None
    if real:
        factory = registry.engine(cell.engine)
        relocates = moves and cell.clock == "wall"
        engine = open_engine(factory, pack, **options) if relocates else factory(pack, **options)
    try:
        slot_bytes = max(pack.slot_bytes, engine.buffer_bytes) if real else geometry.slot_bytes
        staging = engine.staging_bytes if engine is not None else 0
        if moves and cell.clock == "virtual":
            staging += 2 * slot_bytes  # the two experts of a swap
        ledger = Ledger(None if config.memory is None else parse_bytes(config.memory, "memory"))
        activations = _activation_bytes(geometry, min(config.chunk, longest_prompt), batch) if longest_prompt else 0
        state = batch * (context * geometry.kv_bytes_per_token + geometry.fixed_state_bytes)
        fixed = dense_bytes + activations + state + sum(held.values())
        sizes = size(
            geometry, slot_bytes, spec, config.budget, config.scope, profile, staging, fixed, 1 + two,
            config.device_budget, handling,
        )  # fmt: skip
        ledger.book("dense", dense_bytes)
        ledger.book("activations", activations)
        ledger.book("staging", staging)
        for category, nbytes in held.items():
            ledger.book(category, nbytes)
        tiers = make_tiers(geometry, slot_bytes, sizes, config.scope, real, ledger)
        ledger.set("kv", state)  # what it will grow to must fit too
        ledger.set("kv", 0)
        ledger.forget_peak()
        arenas = {tier.name: tier for tier in tiers}
        scratch = tiers.pop() if sizes.scratch else None

        def buffer(tier: str, slot: int):
            return arenas[tier].arena[slot]

        places = Places(pack.position(np.arange(pack.keys))) if real else Places.in_order(geometry.keys)
        if cell.clock == "wall":
            from moebench.timeline.wall import WallTimeline

            timeline: Any = WallTimeline(engine, buffer)
        else:
            cache = cost_model.page_cache_bytes(profile, ledger.total_bytes + state)
            extents, stored = cost_model.pieces(geometry, config.layout, cell.engine), 0
            if config.codec != "none":
                stored = int(pack.mean_stored_bytes) if real else cost_model.coded_bytes(geometry)
                extents = (align_up(stored),)
            use = cost_model.StorageUse(
                extents, cell.engine, cache, in_place=spec.engine == "mmap", whole=handling.whole_reads,
                stored_bytes=stored,
            )  # fmt: skip
            stack = "" if config.stack == "auto" else config.stack
            beside = equipment.held_bytes.get("adapters", 0)
            costs = cost_model.build(
                profile, geometry, use, dense_bits, stack, beside, tiers=1 + two, on_host=handling.on_host
            )
            if real:
                from moebench.timeline.filled import FilledTimeline

                timeline = FilledTimeline(costs, engine, buffer, places)
            else:
                timeline = VirtualTimeline(costs, places)
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    foreseen = future if spec.foresees(config.knobs) else None
    alone = len(cost_model.pieces(geometry, config.layout, cell.engine)) > 1 or cell.engine == "mmap"
    run = RunContext(
        geometry, sizes.device, config.scope, config.seed, foreseen, batch, ops, equipment, drafter,
        request_s=None if alone else cost_model.request_seconds(profile),
    )  # fmt: skip
    metrics = Metrics(warmup_tokens, lambda: (timeline.storage_bytes, timeline.storage_requests))
    watch = StateWatch(ledger, geometry, kv_bytes)
    try:
        plugins = [spec.make(config.knobs, run), metrics, watch, *observers]
        relayout = None
        if moves:
            relayout = make_relayout(timeline, engine, geometry.expert_bytes, moves, warmup_tokens)
            plugins.append(relayout)
        hooks = Hooks(plugins)
        rules = Rules(
            keep_evicted=handling.host_cache and sizes.host > max(staging_slots(geometry), handling.pool),
            keep_landed=handling.host_cache, late_eviction=handling.late_eviction, pool=handling.pool,
            wave=handling.wave,
        )  # fmt: skip
        experts = Experts(geometry, tiers, timeline, hooks, rules, places, scratch)
        experts.relayout = relayout
        if isinstance(timeline, VirtualTimeline):
            experts.read_estimate_s, experts.copy_estimate_s = timeline.costs.read_s[1], timeline.costs.copy_s
        hooks.prepare(run)
        if spec.sizing == "full":
            experts.preload()
    except BaseException:
        timeline.close()
        raise
    return Session(experts, timeline, metrics, ledger, hooks)


def _activation_bytes(geometry: Geometry, chunk: int, batch: int) -> int:
    """Largest transient of a pass: hidden states, routed outputs and gate/up products of a chunk, and one row of
    logits each.
    """
    rows = chunk * batch
    per_row = geometry.hidden * (4 + geometry.top_k) + 2 * geometry.intermediate * geometry.top_k
    return rows * per_row * ACTIVATION_BYTES + batch * geometry.vocabulary * 4
