"""Acquisition: from a routing to experts that may be computed on, wave by wave.

The atomic unit is (step, layer, wave): what it needs is never a victim. A layer whose demand exceeds the slots runs in
waves, and every expert is loaded once. Knows hooks, tickets and tiers; knows no system, no device and no file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moebench.engine.hooks import Hooks
from moebench.engine.record import StepRecord
from moebench.engine.view import View
from moebench.geometry import Geometry
from moebench.residency.tier import Tier
from moebench.step import Routing, Step
from moebench.timeline.base import DEMAND, PREFETCH, Ticket, Timeline

WINDOW_WEIGHT = 0.2


class Experts:
    """Serves the experts of each layer to whoever computes: a live backend, or the replay driver.

    ``tiers`` is one tier, or (device, host): then every read lands in a host slot and is copied up, so that the host
    slots are staging area and, with ``keep_evicted``, victim cache in one. ``begin`` and ``end`` frame a step.
    """

    def __init__(
        self, geometry: Geometry, tiers: Sequence[Tier], timeline: Timeline, hooks: Hooks, keep_evicted: bool = False
    ) -> None:
        self.geometry, self.tiers, self.timeline, self.hooks = geometry, list(tiers), timeline, hooks
        self.device = self.tiers[0]
        self.host = self.tiers[1] if len(self.tiers) > 1 else None
        self.keep_evicted = keep_evicted
        self.in_flight: dict[int, Ticket] = {}  # transfers into the device tier
        self.loading: dict[int, Ticket] = {}  # reads into the host tier
        self.temporary: set[int] = set()
        self._wave: set[int] = set()
        self._reading_ahead = False  # a prefetch never waits and never copies victims down
        self.windows = [0.0] * geometry.layers
        self.read_estimate_s = self.copy_estimate_s = 0.0
        self.view = View(self)
        self.step: Step | None = None
        self.record = StepRecord(None, 0.0)  # what happens before the first step is nobody's
        self._last: tuple[int, float] | None = None
        self._since: float | None = None
        self._timed = timeline.clock == "wall"

    def tier(self, name: str | None) -> Tier:
        """A tier by name; the fastest for None. Raises ``KeyError`` with the names."""
        if name is None:
            return self.device
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(f"tier {name!r} is not one of {', '.join(t.name for t in self.tiers)}")

    # --- steps -----------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Start a forward pass."""
        self.step = step
        # A measured step lasts from the end of the one before it, so that sampling and observers are in it.
        self.record = StepRecord(step, self.timeline.now() if self._since is None else self._since)
        layers = self.geometry.layers
        self.record.requests, self.record.hits, self.record.late = [0] * layers, [0] * layers, [0] * layers
        self._last = None
        self._state_bytes = self._touched(step)
        self._settle()
        self.hooks.begin_step(step, self.view)
        self._prefetch("begin")

    def begin_request(self, sequences: np.ndarray) -> None:
        """A batch of new requests starts: its clock begins here."""
        self._since = self.timeline.now()
        self.hooks.begin_request(sequences, self.view)

    def _touched(self, step: Step) -> int:
        """Bytes of KV cache and recurrent state that one pass goes through, over all its sequences."""
        geometry = self.geometry
        if step.rows == 1:
            tokens, sequences = int(step.position[0]) + 1, 1
        else:
            last = dict(zip(step.sequence.tolist(), step.position.tolist(), strict=True))  # rows ascend
            tokens, sequences = sum(last.values()) + len(last), len(last)
        return tokens * geometry.kv_bytes_per_token + 2 * sequences * geometry.fixed_state_bytes

    def end(self) -> StepRecord:
        """Finish the pass: the model's head, prefetch point "end", observers."""
        step, record = self.step, self.record
        self.timeline.compute_dense(0, step.rows, self._state_bytes, final=True)
        self._prefetch("end")
        record.ended_s = self._since = self.timeline.now()
        self.hooks.end_step(step, record, self.view)
        return record

    # --- one layer -------------------------------------------------------------------------------------------------

    def serve(
        self, layer: int, hidden: Any, native: Routing
    ) -> tuple[Routing, Iterator[tuple[int, np.ndarray | None]]]:
        """Decide the routing of one MoE layer and yield its experts as (id, bytes), each once, in any order."""
        hooks, step = self.hooks, self.step
        self.timeline.compute_dense(1, step.rows, self._state_bytes, final=False)
        started = time.perf_counter() if self._timed else 0.0
        routing = native
        if hooks.route is not None:
            routing = hooks.route(step, layer, hidden, native, self.view) or native
        if routing is native:
            self.timeline.host_sync()
        self._observe_window(layer)
        demand = routing.demand(step.valid)
        base = layer * self.geometry.experts
        keys = [base + e for e in demand]
        pairs = len(demand) if step.rows == 1 else int((routing.experts[step.valid] >= 0).sum())
        if self._timed:
            self.record.harness_s += time.perf_counter() - started
        return routing, self._acquire(layer, base, keys, pairs)

    def _acquire(self, layer: int, base: int, keys: list[int], pairs: int) -> Iterator[tuple[int, np.ndarray | None]]:
        started = time.perf_counter() if self._timed else 0.0
        record, device = self.record, self.device
        self._settle()
        slots, states = device._slot_of, device._state
        ready = [slots[k] >= 0 and states[slots[k]] == 1 for k in keys]
        joined = sum(slots[k] >= 0 for k in keys) - sum(ready)
        record.requests[layer], record.hits[layer], record.late[layer] = len(keys), sum(ready), joined
        self.hooks.acquired(self.step, layer, keys, ready, self.view)
        if self._timed:
            record.harness_s += time.perf_counter() - started
        rows_each = pairs / max(1, len(keys))
        for index, wave in enumerate(self._waves(layer, keys, ready)):
            record.waves += 1
            started = time.perf_counter() if self._timed else 0.0
            order = self._start(layer, wave)
            pending = [k for k in order if k in self.in_flight]
            now = [k for k in wave if k not in self.in_flight] if pending else wave
            if index == 0:  # after the layer's own reads are under way, before its compute
                self._prefetch(layer)
            if self._timed:
                record.harness_s += time.perf_counter() - started
            try:
                yield from self._compute(base, now, pending, rows_each)
            finally:
                self._wave = set()
                device.release(k for k in wave if device.slot(k) >= 0 and not device.is_in_flight(k))
                if self.temporary:
                    device.drop(
                        k for k in wave if k in self.temporary and device.slot(k) >= 0 and k not in self.in_flight
                    )
                    self.temporary.difference_update(wave)

    def _compute(self, base, now, pending, rows_each):
        """Yield the experts of one wave: those at hand in ascending order, then each as it arrives, or as a system
        orders.
        """
        device, timeline, order = self.device, self.timeline, self.hooks.order_compute
        real = device.arena is not None
        if order is None:
            for key in now:
                yield key - base, device.arena[device._slot_of[key]] if real else None
            if now:
                timeline.compute_experts(len(now), round(rows_each * len(now)))
            for key in pending:
                self._await(key)
                yield key - base, device.arena[device._slot_of[key]] if real else None
                timeline.compute_experts(1, round(rows_each))
            return
        ready, waiting = list(now), list(pending)
        while ready or waiting:
            arrived = [k for k in waiting if timeline.is_ready(self.in_flight[k])]
            for key in arrived:
                self._await(key)
                waiting.remove(key)
                ready.append(key)
            key = order(ready, waiting, self.view)
            if key is None:
                key = ready[0] if ready else waiting[0]
            if key in ready:
                ready.remove(key)
                yield key - base, device.arena[device._slot_of[key]] if real else None
                timeline.compute_experts(1, round(rows_each))
            else:
                self._await(key)
                waiting.remove(key)
                ready.append(key)

    # --- waves, reads, victims -------------------------------------------------------------------------------------

    def _waves(self, layer: int, keys: list[int], ready: list[bool]) -> list[list[int]]:
        """Split a demand that exceeds the layer's slots: what is resident first, then as many as fit at a time."""
        fit = self.device.group_slots
        if self.host is not None:
            fit = min(fit, self.host.group_slots)
        if len(keys) <= fit:
            return [keys]
        first = [k for k, r in zip(keys, ready, strict=True) if r]
        rest = [k for k, r in zip(keys, ready, strict=True) if not r]
        waves = [first] if first else []
        return waves + [rest[i : i + fit] for i in range(0, len(rest), fit)]

    def _settle(self) -> None:
        """Complete the transfers that have finished since: wanted or not, they are resident now, and may be evicted."""
        for key in [k for k, ticket in self.in_flight.items() if self.timeline.is_ready(ticket)]:
            self._await(key)

    def _start(self, layer: int, wave: list[int]) -> list[int]:
        """Make every expert of the wave leased or in flight; returns those that had to be waited for, in that order."""
        device = self.device
        self._wave = set(wave)  # what this wave needs is never a victim: leased now, or as soon as it arrives
        device.lease(k for k in wave if device._slot_of[k] >= 0 and k not in self.in_flight)
        joined = [k for k in wave if k in self.in_flight]
        for key in joined:
            self._promote(key)
        missing = [k for k in wave if device._slot_of[k] < 0]
        if missing:
            if self.hooks.admit is not None and (keep := self.hooks.admit(missing, self.view)) is not None:
                self.temporary.update(k for k, stay in zip(missing, keep, strict=True) if not stay)
                self.record.temporary += len(missing) - sum(map(bool, keep))
            if self.hooks.plan_reads is not None:
                planned = list(self.hooks.plan_reads(missing, self.view))
                if sorted(planned) != sorted(missing):
                    raise PluginError(f"plan_reads returned {planned} for {missing}; it may only reorder")
                missing = planned
            self._make_room(layer, len(missing), wait=True)
            self._fetch(missing, DEMAND)
            self.record.demand_reads += len(missing)
        return joined + missing

    def _make_room(self, layer: int, need: int, wait: bool) -> int:
        """Free slots for ``need`` experts of ``layer`` and return how many are free.

        A demand waits, if nothing else is left to evict, for prefetches outside its wave; a prefetch makes what room it
        can.
        """
        device = self.device
        while (short := need - device.free_slots(layer)) > 0:
            candidates = device.evictable(layer)
            if len(candidates):
                self._evict(device, layer, min(short, len(candidates)), candidates)
            elif wait and (other := self._flying_elsewhere(layer)) is not None:
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

    def _promote(self, key: int) -> None:
        self.timeline.promote(self.in_flight[key])
        if key in self.loading:
            self.timeline.promote(self.loading[key])

    def _evict(self, tier: Tier, layer: int, need: int, candidates: np.ndarray) -> None:
        if self.hooks.evict is None:
            victims = candidates[:need].tolist()
        else:
            victims = np.asarray(self.hooks.evict(tier.name, need, candidates, self.view), np.int64).tolist()
            if len(set(victims)) < need or not tier.may_leave(victims, layer):
                raise PluginError(
                    f"evict returned {victims[:8]}; it must return {need} distinct ones of its candidates"
                )
        self.record.evictions += len(victims)
        if tier is self.device and self.keep_evicted and not self._reading_ahead:
            self._demote(victims)
        tier.drop(victims)

    def _demote(self, victims: list[int]) -> None:
        """Copy what leaves the device down to the host, unless the host still has it or the system drops it."""
        gone = [k for k in victims if k not in self.host]
        if not gone:
            return
        stay = self.hooks.demote(gone, self.view) if self.hooks.demote is not None else None
        for i, key in enumerate(gone):
            if (stay is None or stay[i]) and self._host_room(key):
                slot = self.host.take(key)
                ticket = self.timeline.copy(key, ("device", self.device.slot(key)), ("host", slot), None)
                self.record.stall_s += self.timeline.wait(ticket)
                self.host.complete(key)
                self.record.copies += 1

    def _host_room(self, key: int) -> bool:
        """Free one host slot; False if every host slot is in flight and, for a prefetch, always rather than wait."""
        layer = key // self.geometry.experts
        while not self.host.free_slots(layer):
            candidates = self.host.evictable(layer)
            candidates = candidates[np.array([k not in self.in_flight for k in candidates.tolist()], bool)]
            doubled = candidates[self.device.slot_of[candidates] >= 0]
            if len(doubled):  # the device holds it too: nothing is lost
                self.host.drop(doubled[:1].tolist())
            elif len(candidates):
                self._evict(self.host, layer, 1, candidates)
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
        """Issue the transfers that bring ``keys`` into their device slots."""
        device, timeline = self.device, self.timeline
        if self.host is None:
            tickets = timeline.read(keys, [device.take(k) for k in keys], device.name, priority)
            self.in_flight.update(zip(keys, tickets, strict=True))
            self.record.read_bytes += sum(t.nbytes for t in tickets)
            return
        for key in keys:
            if key not in self.host:
                if not self._host_room(key):
                    raise PluginError("the host tier has no slot that may be reused; raise budget=")
                (ticket,) = timeline.read([key], [self.host.take(key)], self.host.name, priority)
                self.loading[key] = ticket
                self.record.read_bytes += ticket.nbytes
            elif key in self.loading and priority == DEMAND:
                self.timeline.promote(self.loading[key])
            after = self.loading.get(key)
            source = (self.host.name, self.host.slot(key))
            self.in_flight[key] = timeline.copy(key, source, (device.name, device.take(key)), after)
            self.record.copies += 1

    def _await(self, key: int) -> None:
        """Wait for one transfer into the device tier and mark its slot ready; an error frees the slot."""
        ticket = self.in_flight[key]
        try:
            stall = self.timeline.wait(ticket)
        except BaseException:
            self.device.drop((key,))
            del self.in_flight[key]
            raise
        self.record.stall_s += stall
        del self.in_flight[key]
        if self._timed and stall:
            took = self.timeline.now() - ticket.issued_s
            old = self.read_estimate_s
            self.read_estimate_s = took if old == 0.0 else old + WINDOW_WEIGHT * (took - old)
        self.device.complete(key)
        if key in self._wave:
            self.device.lease((key,))
        if key in self.loading:
            self._landed(key)

    def _landed(self, key: int) -> None:
        ticket = self.loading.pop(key)
        self.record.stall_s += self.timeline.wait(ticket)
        self.host.complete(key)

    # --- prefetch --------------------------------------------------------------------------------------------------

    def _prefetch(self, point: int | str) -> None:
        """Ask the system what to read ahead at ``point`` and start as much of it as slots allow, never blocking."""
        if self.hooks.prefetch is None:
            return
        wanted = self.hooks.prefetch(self.step, point, self.view)
        if wanted is None:
            return
        keys = [k for k in dict.fromkeys(np.asarray(wanted, np.int64).tolist()) if k not in self.device]
        self._reading_ahead = True
        if self.host is None:
            chosen: list[int] = []
            taken: Counter[int] = Counter()  # slots spoken for, by layer where layers do not share
            for key in keys:
                layer = key // self.geometry.experts
                group = layer if self.device.scope == "per_layer" else 0
                if self._make_room(layer, taken[group] + 1, wait=False) > taken[group]:
                    taken[group] += 1
                    chosen.append(key)
            self._fetch(chosen, PREFETCH)
        else:
            chosen = [k for k in keys if self._ahead_through_host(k)]
        self.record.prefetch_reads += len(chosen)
        self._reading_ahead = False

    def _ahead_through_host(self, key: int) -> bool:
        """Start one prefetch by way of a host slot, if both tiers have room."""
        room = key in self.host or self._host_room(key)
        if room and self._make_room(key // self.geometry.experts, 1, wait=False):
            self._fetch([key], PREFETCH)
            return True
        return False

    def _observe_window(self, layer: int) -> None:
        now = self.timeline.now()
        if self._last is not None:
            before, then = self._last
            old = self.windows[before]
            self.windows[before] = now - then if old == 0.0 else old + WINDOW_WEIGHT * (now - then - old)
        self._last = (layer, now)

    def preload(self) -> None:
        """Make every expert resident before the first request: on the device as far as it reaches, else on the host."""
        for key in range(self.geometry.keys):
            if self.device.free_slots(key // self.geometry.experts):
                self._fetch([key], DEMAND)
            elif self._host_room(key):
                (self.loading[key],) = self.timeline.read([key], [self.host.take(key)], self.host.name, DEMAND)
        self.drain()

    def drain(self) -> None:
        """Wait for everything in flight; used between requests and before closing."""
        for key in list(self.in_flight):
            self._await(key)
        for key in list(self.loading):
            self._landed(key)

    def check_integrity(self) -> None:
        """Raise unless tiers are whole and in-flight slots match the tickets."""
        for tier in self.tiers:
            tier.check_integrity()
        flying = {k for k in self.in_flight if self.device.is_in_flight(k)}
        if flying != set(self.in_flight) or int((self.device.state == 3).sum()) != len(flying):
            raise AssertionError("in-flight slots and tickets disagree")


class PluginError(ValueError):
    """A plugin broke the contract of a hook."""
