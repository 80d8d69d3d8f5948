"""From a budget to slots: how many experts each tier holds, and what the ledger books before the first request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moebench.backends.device import DeviceSlots
from moebench.budget import parse_budget
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.hardware import HardwareProfile
from moebench.hookspecs import hookimpl
from moebench.residency.ledger import BudgetError, Ledger
from moebench.residency.tier import Tier
from moebench.store.pages import aligned_buffer, committed
from moebench.systemspec import Handling, SystemSpec
from moebench.units import GIB, human_bytes

STAGING_SLOTS = 16  # host slots that reads land in on the way to a device of its own memory, at the least


@dataclass(frozen=True)
class Sizes:
    """Slots per tier; ``host`` is 0 where there is one. ``scratch`` are host slots of a system that computes there."""

    device: int
    host: int
    scratch: int = 0


def staging_slots(geometry: Geometry) -> int:
    """Host slots that only serve as landing place of reads; a host tier beyond them is a cache."""
    return max(STAGING_SLOTS, 2 * geometry.top_k)


def require_tiers(system: str, handling: Handling, two: bool, codec: str) -> None:
    """Refuse a handling that the tiers of a run give no meaning."""
    if not two and (handling.on_host or not handling.host_cache):
        raise UsageError(
            f"{system}: these options are about a host tier, and this run has one memory; device_budget= splits it"
        )
    if handling.on_host and codec != "none":
        raise UsageError(f"{system}: experts lie compressed in host memory, nothing computes there; use codec=none")


def size(
    geometry: Geometry,
    slot_bytes: int,
    spec: SystemSpec,
    budget: str,
    scope: str,
    profile: HardwareProfile,
    staging_bytes: int,
    fixed_bytes: int,
    tiers: int,
    device_budget: str = "auto",
    handling: Handling = Handling(),  # noqa: B008 - frozen
) -> Sizes:
    """Slots that ``budget`` buys, staging and temporaries included.

    ``fixed_bytes`` is what dense weights, KV cache and activations take of the device; ``device_budget`` is the device
    tier's part where two tiers share one memory, or less than a device's own holds. Raises ``BudgetError`` that
    states the smallest legal budget: one layer's demand for one token (one such set per layer where slots are split by
    layer).
    """
    slot, every = slot_bytes, geometry.keys
    least = geometry.top_k * (geometry.layers if scope == "per_layer" else 1)
    staging = max(staging_slots(geometry), handling.pool) if tiers == 2 else 0
    scratch = geometry.top_k if handling.on_host else 0
    if spec.sizing == "full":
        device, host = every, staging
    elif spec.sizing == "minimal":
        device, host = least, staging
    else:
        nbytes = parse_budget(budget, geometry.routed_bytes)
        beside = staging + scratch
        device, host = min(every, (nbytes - staging_bytes) // slot - beside), staging
        if device < least:
            smallest = (least + beside) * slot + staging_bytes
            who = "each layer's" if scope == "per_layer" else "one layer's"
            raise BudgetError(
                f"budget {budget} is {human_bytes(nbytes)}; {geometry.name} needs at least {human_bytes(smallest)}, "
                f"budget={smallest}B: {who} demand for one token ({least} experts of {human_bytes(slot)}) "
                f"and staging ({human_bytes(beside * slot + staging_bytes)})"
            )
    if tiers == 2:
        room = device if profile.unified else int(profile.device_gib * GIB - fixed_bytes) // slot
        if device_budget != "auto":
            whole = (device + staging + scratch) * slot + staging_bytes
            part = parse_budget(device_budget, whole, "device_budget", "the budget")
            if part > whole:
                raise BudgetError(f"device_budget {device_budget} is more than the budget, {human_bytes(whole)}")
            if part < least * slot:
                raise BudgetError(
                    f"device_budget {device_budget} is {human_bytes(part)}; {geometry.name} needs at least "
                    f"{human_bytes(least * slot)}, device_budget={least * slot}B"
                )
            room = min(room, part // slot)
        if room < least:
            raise BudgetError(
                f"{profile.title} has no room for one layer's experts of {geometry.name} beside its dense weights"
            )
        if device > room and spec.sizing == "full":
            raise BudgetError(
                f"{geometry.name} under {spec.id} needs {human_bytes(device * slot)} of device memory for experts, "
                f"{profile.title} has {human_bytes(room * slot)} beside the dense weights"
            )
        if device > room:
            device, host = room, (device - room if handling.host_cache else 0) + staging
    held = (device + host + scratch) * slot + staging_bytes + fixed_bytes
    # RAM that the system and others use is not ours; on a device of its own memory the dense weights are beside it
    memory = profile.ram_gib - profile.reserve_gib + (profile.device_gib if tiers == 2 and not profile.unified else 0)
    if held > memory * GIB:
        rest = math.floor((memory - fixed_bytes / GIB) * 10) / 10
        advice = f"; set budget={rest}GiB at most" if spec.sizing == "budget" and rest > 0 else ""
        raise BudgetError(
            f"{geometry.name} under {spec.id} holds {held / GIB:.1f} GiB, "
            f"more than the {memory:.1f} GiB that {profile.title} has for it{advice}"
        )
    return Sizes(device, host, scratch)


def make_tiers(
    geometry: Geometry,
    slot_bytes: int,
    sizes: Sizes,
    scope: str,
    real: bool,
    ledger: Ledger,
    allocate: Callable[[int], np.ndarray] = aligned_buffer,
    apart: DeviceSlots | None = None,
) -> list[Tier]:
    """Build and book the tiers; ``real`` ones have an arena of 4096-aligned slots, made by ``allocate(nbytes)``, or by
    ``apart`` where a device has a memory of its own. Host slots are always shared.
    """
    tiers = []
    for name, category, slots, by in (
        ("device", "expert slots", sizes.device, scope),
        ("host", "host slots", sizes.host, "shared"),
        ("scratch", "host slots", sizes.scratch, "shared"),
    ):
        if not slots:
            continue
        held = slots - slots % (geometry.layers if by == "per_layer" else 1)  # layers own equal parts
        arena = None
        if real:
            nbytes = held * slot_bytes
            arena = (
                apart.tier(name, held, slot_bytes) if apart else committed(allocate(nbytes)).reshape(held, slot_bytes)
            )
        tier = Tier(name, slots, slot_bytes, geometry.layers, geometry.experts, by, arena)
        ledger.book(category, tier.capacity_bytes)
        tiers.append(tier)
    return tiers


class StateWatch:
    """An observer that keeps the ledger's KV line true: from the backend's own count, or from positions and the
    geometry.
    """

    def __init__(self, ledger: Ledger, geometry: Geometry, kv_bytes=None) -> None:
        self.ledger, self.geometry, self.kv_bytes = ledger, geometry, kv_bytes
        self._lengths: dict[int, int] = {}

    @hookimpl
    def begin_request(self, sequences: Sequence[int], view) -> None:
        """Old sequences release their state."""
        self._lengths = {}

    @hookimpl
    def end_step(self, step, record, view) -> None:
        """Book the state after each pass."""
        if self.kv_bytes is not None:
            self.ledger.set("kv", self.kv_bytes())
            return
        if step.rows == 1:
            self._lengths[int(step.sequence[0])] = int(step.position[0]) + 1
        else:  # siblings of a draft stand at one position, and each has its keys and values
            for sequence in np.unique(step.sequence).tolist():
                position = step.position[step.sequence == sequence]
                self._lengths[sequence] = int(position[0]) + len(position)
        geometry = self.geometry
        tokens = sum(self._lengths.values())
        self.ledger.set("kv", tokens * geometry.kv_bytes_per_token + len(self._lengths) * geometry.fixed_state_bytes)
