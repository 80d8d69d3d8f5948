"""The clock of a run: one that measures, one that models, or one that models while real bytes move.

Knows profiles and packs; knows no tiers, no hooks and no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moebench.backends.device import DeviceSlots
from moebench.harness import costs as cost_model
from moebench.harness.frame import Frame
from moebench.residency.places import Places
from moebench.timeline.costs import Costs
from moebench.timeline.virtual import VirtualTimeline
from moebench.units import align_up

Buffer = Callable[[str, int], np.ndarray]  # the bytes of (tier, slot)


def open_clock(
    frame: Frame, engine: Any, buffer: Buffer, places: Places, held_bytes: int, dense_bits: float | None,
    apart: DeviceSlots | None = None,
) -> Any:  # fmt: skip
    """The timeline of a run; ``engine`` is None where no bytes move. ``held_bytes`` is what the page cache cannot have
    of a modeled machine, and its dense weights have ``dense_bits`` each (None: as many as its experts'). ``apart`` are
    the slots of a device of its own memory.
    """
    if frame.cell.clock == "wall":
        from moebench.timeline.moves import DeviceMoves
        from moebench.timeline.wall import WallTimeline

        return WallTimeline(engine, buffer, None if apart is None else DeviceMoves(engine, apart))
    costs = modeled_costs(frame, held_bytes, dense_bits)
    if engine is None:
        return VirtualTimeline(costs, places)
    from moebench.timeline.filled import FilledTimeline

    return FilledTimeline(costs, engine, buffer, places)


def modeled_costs(frame: Frame, held_bytes: int, dense_bits: float | None) -> Costs:
    """What operations cost on the machine that the cell declares."""
    cell, geometry, config = frame.cell, frame.geometry, frame.cell.config
    own = frame.pack.manifest.extents if frame.pack is not None and geometry.stored_bytes else None
    extents, stored = cost_model.pieces(geometry, config.layout, cell.engine, own), 0
    if config.codec != "none":
        stored = cost_model.coded_bytes(geometry) if frame.pack is None else int(frame.pack.mean_stored_bytes)
        extents = (align_up(stored),)
    use = cost_model.StorageUse(
        extents,
        cell.engine,
        cost_model.page_cache_bytes(cell.profile, held_bytes),
        in_place=cell.spec.engine == "mmap",
        whole=frame.handling.whole_reads,
        stored_bytes=stored,
    )
    found = cost_model.build(
        cell.profile,
        geometry,
        use,
        dense_bits,
        "" if config.stack == "auto" else config.stack,
        frame.equipment.held_bytes.get("adapters", 0),
        frame.equipment.adapted,
        tiers=1 + frame.two_tiers,
        on_host=frame.handling.on_host,
    )
    hooks = {**cell.profile.hooks, **(cell.profile.live_hooks if cell.computes else {})}
    if cell.spec.id in hooks:
        found = replace(found, hook_s=hooks[cell.spec.id].value * 1e-6)
    return found if cell.computes else cost_model.reads_only(found)
