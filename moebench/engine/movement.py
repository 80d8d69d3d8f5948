"""Movement of experts between storage and tiers: room, victims, transfers, prefetch.

Knows hooks, tickets and tiers; knows no layer's demand, no system, no device and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from moebench.engine.answers import keys_of, mask_of
from moebench.engine.hooks import Hooks
from moebench.engine.record import StepRecord
from moebench.engine.view import View
from moebench.errors import PluginError
from moebench.geometry import Geometry
from moebench.residency.places import Places
from moebench.residency.tier import Tier
from moebench.step import PHASES, Step
from moebench.timeline.base import DEMAND, PREFETCH, Ticket, Timeline

if TYPE_CHECKING:
    from moebench.engine.relayout import Relayout

WINDOW_WEIGHT = 0.2


@dataclass(frozen=True)
class Rules:
    """How experts move.

    With two tiers every read lands in a host slot and is copied up, so that the host slots are staging area and, with
    ``keep_evicted``, victim cache in one; without ``keep_landed`` a host slot is free as soon as it was copied up.
    ``pool``: at most so many transfers into the device tier at a time, the buffers that they pin; 0 for no bound.
    ``wave``: at most so many missing experts of a demand at a time, so that they need no more slots; 0 for no bound.
    ``late_eviction``: the reads of a demand are issued before its victims are asked for.
    """

    keep_evicted: bool = False
    keep_landed: bool = True
    late_eviction: bool = False
    pool: int = 0
    wave: int = 0


class Movement:
    """Tiers, one or (device, host), and what is on its way into them.

    ``scratch`` are host slots that hold an expert of the device for one layer, where a system computes on the host.
    """

    def __init__(
        self,
        geometry: Geometry,
        tiers: Sequence[Tier],
        timeline: Timeline,
        hooks: Hooks,
        rules: Rules = Rules(),
        places: Places | None = None,
        scratch: Tier | None = None,
    ) -> None:
        self.geometry, self.tiers, self.timeline, self.hooks = geometry, list(tiers), timeline, hooks
        self.device = self.tiers[0]
        self.host = self.tiers[1] if len(self.tiers) > 1 else None
        self.rules, self.scratch = rules, scratch
        self.places = places or Places.in_order(geometry.keys)
        self.in_flight: dict[int, Ticket] = {}  # transfers into the device tier
        self.loading: dict[int, Ticket] = {}  # reads into the host tier
        self.temporary: set[int] = set()
        self._wave: set[int] = set()
        self._run_of: dict[int, int] = {}  # which request of a wave reads a key
        self._reading_ahead = False  # a prefetch never waits and never copies victims down
        self.windows = [[0.0] * geometry.layers for _ in PHASES]
        self.read_estimate_s = self.copy_estimate_s = self.compute_estimate_s = 0.0
        self.relayout: Relayout | None = None  # who asks for swaps on storage, where a system re-organises it
        self.view = View(self)
        self.step: Step | None = None
        self.record = StepRecord(None, 0.0)  # what happens before the first step is nobody's
        self._last: tuple[int, float] | None = None
        self._since: float | None = None
        self._timed = timeline.clock == "wall"
        self.estimates = self._timed  # whether what a read takes is learnt from those that were waited for
        self._left_s = 0.0  # when whoever computes went on, on a measured clock

    def tier(self, name: str | None) -> Tier:
        """A tier by name; the fastest for None. Raises ``KeyError`` with the names."""
        if name is None:
            return self.device
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(f"tier {name!r} is not one of {', '.join(t.name for t in self.tiers)}")

    def _settle(self) -> None:
        """Complete the transfers that have finished since: wanted or not, they are resident now, and may be evicted."""
        for key in [k for k, ticket in self.in_flight.items() if self.timeline.is_ready(ticket)]:
            self._await(key)

    def _make_room(self, layer: int, need: int, wait: bool) -> int:
        """Free slots for ``need`` experts of ``layer`` and return how many are free.

        A demand waits, if nothing else is left to evict, for prefetches outside its wave; a prefetch makes what room it
        can.
        """
        device = self.device
        while (short := need - device.free_slots(layer)) > 0:
            candidates = device.evictable(layer)
            if len(candidates) and self._evict(device, layer, min(short, len(candidates)), candidates):
                continue
            if wait and (other := self._flying_elsewhere(layer)) is not None:
                self._await(other)
            else:
                break
        return device.free_slots(layer)

    def _flying_elsewhere(self, layer: int) -> int | None:
        """The oldest transfer that holds a slot ``layer`` could use and that the wave does not need."""
        for key in self.in_flight:
            same = self.device.scope == "shared" or key // self.geometry.experts == layer
            if same and key not in self._wave:
                return key
        return None

    def _evict(self, tier: Tier, layer: int, need: int, candidates: np.ndarray) -> int:
        """Free up to ``need`` slots and return how many: a system may hold back what it needs soon."""
        chosen = self.hooks.evict(tier.name, need, candidates, self.view) if self.hooks.evict is not None else None
        if chosen is None:
            victims = candidates[:need].tolist()
        else:
            victims = keys_of("evict", chosen, self.geometry.keys)
            if len(set(victims)) < len(victims) or not tier.may_leave(victims, layer):
                raise PluginError(f"evict returned {victims[:8]}; it may only return distinct ones of its candidates")
        self.record.evictions += len(victims)
        if tier is self.device and self.rules.keep_evicted and not self._reading_ahead:
            self._demote(victims)
        tier.drop(victims)
        return len(victims)

    def _demote(self, victims: list[int]) -> None:
        """Copy what leaves the device down to the host, unless the host still has it or the system drops it."""
        gone = [k for k in victims if k not in self.host]
        if not gone:
            return
        stay = self.hooks.demote(gone, self.view) if self.hooks.demote is not None else None
        if stay is not None:
            stay = mask_of("demote", stay, len(gone))
        for i, key in enumerate(gone):
            if (stay is None or stay[i]) and self._host_room(key, victims):
                slot = self.host.take(key)
                ticket = self.timeline.copy(key, ("device", self.device.slot(key)), ("host", slot), None)
                self.record.stall_s += self.timeline.wait(ticket)
                self.host.complete(key)
                self.record.copies += 1

    def _host_room(self, key: int, leaving: Sequence[int] = ()) -> bool:
        """Free one host slot; False if every host slot is in flight and, for a prefetch, always rather than wait.

        What the device holds too goes first, but not what is ``leaving`` it now or after this wave.
        """
        layer = key // self.geometry.experts
        while not self.host.free_slots(layer):
            candidates = self.host.evictable(layer)
            if self.in_flight:
                candidates = candidates[~np.isin(candidates, [*self.in_flight])]
            above = self.device.slot_of[candidates] >= 0
            short = [*leaving, *self.temporary]
            doubled = candidates[above & ~np.isin(candidates, short)] if short else candidates[above]
            if self._wave:  # what it needs, and the device has not got yet, stays: it would be read again
                candidates = candidates[above | ~np.isin(candidates, [*self._wave])]
            if len(doubled):  # the device holds it too: nothing is lost
                self.host.drop(doubled[:1].tolist())
            elif len(candidates):
                if not self._evict(self.host, layer, 1, candidates):
                    raise PluginError("evict named no expert to leave the host tier; it may hold back device ones only")
            elif self._reading_ahead:
                return False
            elif self.loading:
                self._landed(next(iter(self.loading)))
            elif self.in_flight:
                self._await(next(iter(self.in_flight)))
            else:
                return False
        return True

    def _fetch(self, keys: list[int], priority: int) -> None:
        """Issue the transfers that bring ``keys`` into their device slots, at most ``pool`` at a time."""
        device, pool = self.device, self.rules.pool
        while keys:
            now = keys
            if pool and len(self.in_flight) + len(keys) > pool:  # a buffer is free when its transfer is complete
                self._settle()
                while len(self.in_flight) >= pool:
                    self._await(next(iter(self.in_flight)))
                    self.record.pool_waits += 1
                now = keys[: pool - len(self.in_flight)]
            keys = keys[len(now) :]
            if self.host is None:
                self._read([(k, device.take(k)) for k in now], self.in_flight, device.name, priority)
                continue
            for run in self._runs(now):
                self._lift([k for k in run if k in self.host])
                absent = [k for k in run if k not in self.host]
                while absent:
                    loaded = self._load(absent, priority)
                    self._lift(loaded)  # from here on their host slots are in use
                    absent = absent[len(loaded) :]

    def _lift(self, keys: list[int]) -> None:
        """Issue the copies of experts up from the host tier, behind the reads that bring them there."""
        host, device = self.host, self.device
        for key in keys:
            after = self.loading.get(key)
            source, target = (host.name, host.slot(key)), (device.name, device.take(key))
            self.in_flight[key] = self.timeline.copy(key, source, target, after)
            self.record.copies += 1

    def _runs(self, keys: list[int]) -> list[list[int]]:
        """What one request reads; an expert of no run is one by itself."""
        return [list(run) for _, run in groupby(keys, lambda k: self._run_of.get(k, -1 - k))]

    def _read(self, taken: list[tuple[int, int]], into: dict[int, Ticket], tier: str, priority: int) -> None:
        """Issue reads of (key, slot) pairs; neighbours that a system reads together are one request."""
        together: Sequence[int] = ()
        if self._run_of:
            together = list(map(len, self._runs([key for key, _ in taken])))
        keys, slots = zip(*taken, strict=True) if taken else ((), ())
        tickets = self.timeline.read(keys, slots, tier, priority, together)
        into.update(zip(keys, tickets, strict=True))
        self.record.read_bytes += sum(t.nbytes for t in tickets)

    def _load(self, run: list[int], priority: int) -> list[int]:
        """Start reading as much of a run as host slots can be freed for; returns those keys, at least one."""
        taken = []
        for key in run:
            if not self._host_room(key):
                break
            taken.append((key, self.host.take(key)))
        if not taken:
            raise PluginError("the host tier has no slot that may be reused; raise budget=")
        self._read(taken, self.loading, self.host.name, priority)
        return run[: len(taken)]

    def _fetch_late(self, layer: int, keys: list[int]) -> int:
        """Issue what reads of a demand can start before its victims are known, then choose victims; returns how many
        of ``keys``, the last ones, still have to be fetched.

        With a host tier all reads go there. With one memory a read needs its slot at once: it takes one that was kept
        free, and the choice of victims frees the next one.
        """
        if self.host is not None:
            for run in self._runs(keys):
                absent = [k for k in run if k not in self.host]
                while absent:
                    absent = absent[len(self._load(absent, DEMAND)) :]
            return len(keys)
        early = keys[: self.device.free_slots(layer)]
        self._fetch(early, DEMAND)
        rest = len(keys) - len(early)
        held = self.geometry.experts if self.device.scope == "per_layer" else self.geometry.keys
        spare = self.device.group_slots < held  # where everything has a slot, no victim is ever needed
        self._make_room(layer, rest + spare, wait=False)
        return rest

    def _promote(self, key: int) -> None:
        self.timeline.promote(self.in_flight[key])
        if key in self.loading:
            self.timeline.promote(self.loading[key])

    def _forget(self, key: int) -> None:
        """Free the slots of a transfer that brings nothing."""
        if self.in_flight.pop(key, None) is not None:
            self.device.drop((key,))
        if self.loading.pop(key, None) is not None:
            self.host.drop((key,))

    def _lost(self, key: int, read: Ticket) -> bool:
        """Free the slots of a failed transfer; True if it was a prefetch, which is read again where the wave needs it.

        An error of a demand is for the caller to raise.
        """
        self._forget(key)
        if read.priority != PREFETCH:
            return False
        self.record.lost += 1
        if key in self._wave:
            self._fetch([key], DEMAND)
            self.record.demand_reads += 1
            self._await(key)
        return True

    def _await(self, key: int) -> None:
        """Wait for one transfer into the device tier and mark its slot ready; a failed demand raises."""
        ticket = self.in_flight[key]
        read = self.loading.get(key, ticket)
        try:
            stall = self.timeline.wait(ticket)
        except Exception:
            if self._lost(key, read):
                return
            raise
        self.record.stall_s += stall
        del self.in_flight[key]
        if self.estimates and stall:
            took = self.timeline.now() - ticket.issued_s
            old = self.read_estimate_s
            self.read_estimate_s = took if old == 0.0 else old + WINDOW_WEIGHT * (took - old)
        self.device.complete(key)
        if key in self._wave:
            self.device.lease((key,))
        if key in self.loading:
            self._landed(key)
        elif self.host is not None and not self.rules.keep_landed and key in self.host:
            self.host.drop((key,))

    def _landed(self, key: int) -> None:
        """Wait for one read into the host tier and mark its slot ready; a failed demand raises."""
        read = self.loading[key]
        try:
            self.record.stall_s += self.timeline.wait(read)
        except Exception:
            if self._lost(key, read):
                return
            raise
        del self.loading[key]
        self.host.complete(key)
        if not self.rules.keep_landed and key not in self.in_flight:
            self.host.drop((key,))

    def drain(self) -> None:
        """Wait for everything in flight; used between requests and before closing."""
        for key in list(self.in_flight):
            self._await(key)
        for key in list(self.loading):
            self._landed(key)

    def check_integrity(self) -> None:
        """Raise unless tiers are whole and in-flight slots match the tickets."""
        for tier in (*self.tiers, *([self.scratch] if self.scratch is not None else [])):
            tier.check_integrity()
        flying = {k for k in self.in_flight if self.device.is_in_flight(k)}
        if flying != set(self.in_flight) or int((self.device.state == 3).sum()) != len(flying):
            raise AssertionError("in-flight slots and tickets disagree")
