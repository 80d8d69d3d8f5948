"""Acquisition: from a routing to experts that may be computed on, wave by wave.

The atomic unit is (step, layer, wave): what it needs is never a victim. A layer whose demand exceeds the slots runs in
waves, and every expert is loaded once. Knows no system, no device and no file.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moebench.engine.ahead import ReadAhead
from moebench.engine.answers import keys_of, mask_of, routing_of
from moebench.engine.movement import WINDOW_WEIGHT
from moebench.engine.record import StepRecord
from moebench.errors import PluginError
from moebench.step import Routing, Step
from moebench.timeline.base import COMPUTE, DEMAND, UNIT, Ticket


class Experts(ReadAhead):
    """Serves the experts of each layer to whoever computes: a live backend, or the replay driver.

    ``begin`` and ``end`` frame a step.
    """

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
        self._leave()

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
        """Finish the pass: the model's head, prefetch point "end", staging, observers."""
        step, record = self.step, self.record
        self._enter("head")
        self.timeline.compute_dense(0, step.rows, self._state_bytes, final=True)
        self._prefetch("end")
        self._stage()
        if self.relayout is not None:
            self.relayout.after_step(self)
        self.timeline.hooked(self.hooks.spent[1])
        record.ended_s = self._since = self.timeline.now()
        self.hooks.end_step(step, record, self.view)
        return record

    def serve(
        self, layer: int, hidden: Any, native: Routing
    ) -> tuple[Routing, Iterator[tuple[int, np.ndarray | None]]]:
        """Decide the routing of one MoE layer and yield its experts as (id, bytes), each once, in any order."""
        hooks, step = self.hooks, self.step
        self._enter("dense")
        self.timeline.compute_dense(1, step.rows, self._state_bytes, final=False)
        routing = native
        if hooks.route is not None:
            said = hooks.route(step, layer, hidden, native, self.view)
            if said is not None and said is not native:
                routing = routing_of(said, step.rows, self.geometry.experts)
        if not routing.ahead:
            self.timeline.host_sync()
        self._observe_window(layer)
        demand = routing.demand(step.valid)
        base = layer * self.geometry.experts
        keys = [base + e for e in demand]
        pairs = len(demand) if step.rows == 1 else int((routing.experts[step.valid] >= 0).sum())
        experts = self._acquire(layer, base, keys, pairs)
        if self._timed:
            experts = self._watched(base, experts)
            self._leave()
        return routing, experts

    def _leave(self) -> None:
        """Whoever computes goes on."""
        if self._timed:
            self._left_s = self.timeline.now()

    def _enter(self, what: str, of: int = 0) -> None:
        """Whoever computes has come back: on a measured clock that was compute."""
        if self._timed:
            timeline, now = self.timeline, self.timeline.now()
            timeline.spent[COMPUTE] += now - self._left_s
            if timeline.log is not None:
                timeline.log.append((UNIT, what, of, self._left_s, now))

    def _watched(self, base: int, experts: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """The same experts; what is done between them is compute."""
        self._enter("routing")
        timeline, clock = self.timeline, time.perf_counter
        for expert, data in experts:
            left = clock()
            yield expert, data
            timeline.spent[COMPUTE] += (took := clock() - left)
            if timeline.log is not None:
                now = timeline.now()
                timeline.log.append((UNIT, "expert", base + expert, now - took, now))
        self._leave()

    def _acquire(self, layer: int, base: int, keys: list[int], pairs: int) -> Iterator[tuple[int, np.ndarray | None]]:
        record, device = self.record, self.device
        self._settle()
        slots, states = device._slot_of, device._state
        ready = [slots[k] >= 0 and states[slots[k]] == 1 for k in keys]
        joined = sum(slots[k] >= 0 for k in keys) - sum(ready)
        record.requests[layer], record.hits[layer], record.late[layer] = len(keys), sum(ready), joined
        self.hooks.acquired(self.step, layer, keys, ready, self.view)
        if self.in_flight and self.hooks.cancel is not None:
            stale = self.hooks.cancel(self.step, layer, self.view)
            if stale is not None:
                self._cancel([k for k in keys_of("cancel", stale, self.geometry.keys) if k not in keys])
        rows_each = pairs / max(1, len(keys))
        for index, wave in enumerate(self._waves(layer, keys, ready)):
            record.waves += 1
            order = self._start(layer, wave)
            placed = self._place(layer, wave, rows_each) if self.scratch is not None else {}
            pending = [k for k in order if k in self.in_flight and k not in placed]
            now = [k for k in wave if k not in self.in_flight and k not in placed] if pending or placed else wave
            if index == 0:  # after the layer's own reads are under way, before its compute
                self._prefetch(layer)
            try:
                yield from self._compute(base, now, pending, rows_each)
                if placed:
                    yield from self._compute_on_host(base, placed)
            finally:
                self._wave = set()
                if placed:
                    self.host.release(k for k in placed if self.host.slot(k) >= 0 and not self.host.is_in_flight(k))
                    self.scratch.drop(k for k in placed if k in self.scratch)
                device.release(k for k in wave if device.slot(k) >= 0 and not device.is_in_flight(k))
                if self.temporary:
                    device.drop(
                        k for k in wave if k in self.temporary and device.slot(k) >= 0 and k not in self.in_flight
                    )
                    self.temporary.difference_update(wave)

    def _place(self, layer: int, wave: list[int], rows_each: float) -> dict[int, Ticket | None]:
        """Start the host's share of a wave, wherever its experts live; returns what each waits for to be in reach.

        Residency goes its way as without: what is missing is copied up all the same, and what only the device holds
        comes down into a scratch slot for this wave.
        """
        chosen = self.hooks.place(self.step, layer, wave, self.view) if self.hooks.place is not None else None
        there = mask_of("place", chosen, len(wave)) if chosen is not None else ()
        keys = [k for k, on_host in zip(wave, there, strict=False) if on_host]
        placed: dict[int, Ticket | None] = {}
        for key in keys:
            if key in self.host:
                placed[key] = self.loading.get(key)
                if placed[key] is None:
                    self.host.lease((key,))
            elif self.scratch.free_slots(layer):
                source = (self.device.name, self.device.slot(key))
                target = (self.scratch.name, self.scratch.take(key))
                placed[key] = self.timeline.copy(key, source, target, None)
                self.record.copies += 1
            else:
                continue
            self.timeline.compute_on_host(placed[key], 1, round(rows_each))
        self.record.on_host += len(placed)
        return placed

    def _compute_on_host(self, base: int, placed: dict[int, Ticket | None]) -> Iterator[tuple[int, np.ndarray | None]]:
        """Yield the host's share, then wait for its end and for the copies that residency asked for."""
        for key, ticket in placed.items():
            if key in self.loading:
                self._landed(key)
                if key in self.host:
                    self.host.lease((key,))
            elif self.scratch.is_in_flight(key):
                self.record.stall_s += self.timeline.wait(ticket)
                self.scratch.complete(key)
            # One that was lost and read again has left a host that keeps nothing.
            tier = next(tier for tier in (self.scratch, self.host, self.device) if key in tier)
            yield key - base, tier.rows[tier.slot(key)] if tier.rows is not None else None
        self.timeline.join()
        self.host.release(k for k in placed if k in self.host)  # where nothing stays, it leaves with its copy
        for key in [k for k in placed if k in self.in_flight]:
            self._await(key)

    def _compute(self, base, now, pending, rows_each):
        """Yield the experts of one wave: those at hand in ascending order, then each as it arrives, or as a system
        orders.
        """
        device, timeline, order, rows = self.device, self.timeline, self.hooks.order_compute, self.device.rows
        if order is None:
            for key in now:
                yield key - base, rows[device._slot_of[key]] if rows is not None else None
            if now:
                timeline.compute_experts(len(now), round(rows_each * len(now)))
            for key in pending:
                self._await(key)
                yield key - base, rows[device._slot_of[key]] if rows is not None else None
                timeline.compute_experts(1, round(rows_each))
            return
        ready, waiting = list(now), list(pending)
        while ready or waiting:
            for key in [k for k in waiting if timeline.is_ready(self.in_flight[k])]:
                self._await(key)
                waiting.remove(key)
                ready.append(key)
            group = self._ordered(order(ready, waiting, self.view), ready, waiting)
            if group[0] in waiting:
                self._await(group[0])
                waiting.remove(group[0])
                ready.append(group[0])
                continue
            started = time.perf_counter() if self._timed else 0.0
            for key in group:
                ready.remove(key)
                yield key - base, rows[device._slot_of[key]] if rows is not None else None
            # rounded up, so that a group takes as many tiles as its experts one by one
            timeline.compute_experts(len(group), math.ceil(rows_each * len(group)), overlap=True)
            if self._timed:
                took, old = (time.perf_counter() - started) / len(group), self.compute_estimate_s
                self.compute_estimate_s = took if old == 0.0 else old + WINDOW_WEIGHT * (took - old)
        timeline.join()

    def _ordered(self, choice: Any, ready: list[int], waiting: list[int]) -> list[int]:
        """What to do next as a system says: ready keys to compute together, or one key to wait for."""
        if choice is None:
            return [(ready or waiting)[0]]
        group = keys_of("order_compute", np.atleast_1d(choice), self.geometry.keys)
        if not group or len(set(group)) < len(group) or not (
            set(group) <= set(ready) or (len(group) == 1 and group[0] in waiting)
        ):  # fmt: skip
            raise PluginError(f"order_compute returned {group[:8]}: some of {ready[:8]}, or one of {waiting[:8]}")
        return group

    def _waves(self, layer: int, keys: list[int], ready: list[bool]) -> list[list[int]]:
        """Split a demand that exceeds the layer's slots, or what may be missing at a time: what is resident first."""
        fit = self.device.group_slots
        if self.host is not None:
            fit = min(fit, self.host.group_slots)
        missing = min(fit, self.rules.wave or fit)
        if len(keys) <= fit and len(keys) - sum(ready) <= missing:
            return [keys]
        first = [k for k, r in zip(keys, ready, strict=True) if r]
        rest = [k for k, r in zip(keys, ready, strict=True) if not r]
        waves = [first] if first else []
        return waves + [rest[i : i + missing] for i in range(0, len(rest), missing)]

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
            if self.host is not None:
                self.record.from_host += sum(k in self.host for k in missing)
            if self.hooks.admit is not None and (keep := self.hooks.admit(missing, self.view)) is not None:
                keep = mask_of("admit", keep, len(missing))
                self.temporary.update(k for k, stay in zip(missing, keep, strict=True) if not stay)
                self.record.temporary += len(missing) - sum(keep)
            if self.hooks.plan_reads is not None:
                plan = self.hooks.plan_reads(missing, self.view)
                missing = missing if plan is None else self._planned(missing, plan)
            short = self._fetch_late(layer, missing) if self.rules.late_eviction else len(missing)
            if self._make_room(layer, short, wait=True) < short:
                raise PluginError(f"evict held back too much: layer {layer} demands {short} experts that find no slot")
            self._fetch(missing[len(missing) - short :], DEMAND)
            self.record.demand_reads += len(missing)
            self._run_of = {}
        return joined + missing

    def _planned(self, missing: list[int], plan: Sequence[int | Sequence[int]]) -> list[int]:
        """Missing keys in the order of a system's plan, and which of them one request reads together."""
        try:
            runs = [(item,) if isinstance(item, int | np.integer) else tuple(item) for item in plan]
            planned = [operator.index(k) for run in runs for k in run]
        except TypeError:
            raise PluginError(f"plan_reads returned {str(plan)[:60]}: keys, or groups of keys, or None") from None
        if sorted(planned) != sorted(missing):
            raise PluginError(f"plan_reads returned {planned} for {missing}; it may only reorder and group")
        if len(runs) < len(planned):
            ascending = all((np.diff(self.places(run)) > 0).all() for run in runs)
            if not ascending:
                raise PluginError("plan_reads: experts of one request must ascend by view.position")
            self._run_of = {int(k): i for i, run in enumerate(runs) for k in run}
        return planned

    def _observe_window(self, layer: int) -> None:
        now = self.timeline.now()
        if self._last is not None:
            before, then = self._last
            windows = self.windows[self.step.phase]
            old = windows[before]
            windows[before] = now - then if old == 0.0 else old + WINDOW_WEIGHT * (now - then - old)
        self._last = (layer, now)
