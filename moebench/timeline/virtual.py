"""A clock that models: storage, link and compute, advanced by arithmetic alone.

Deterministic, and byte-identical everywhere.
"""

from __future__ import annotations

from moebench.residency.places import Places
from moebench.timeline.base import COMPUTE, COPY, DECODE, DEMAND, LINK, ON_HOST, OVERHEAD, STALL, UNIT, Ticket
from moebench.timeline.costs import Costs
from moebench.timeline.storage import ModeledStorage


class VirtualTimeline(ModeledStorage):
    """Simulated time for one run."""

    clock = "virtual"

    def __init__(self, costs: Costs, places: Places | None = None) -> None:
        super().__init__(costs, places)
        self._link_free = {"host": 0.0, "device": 0.0}  # the link carries both directions at once
        self._host_free, self._host_busy = 0.0, False
        self._waited = False  # since the layer began
        self._several = False  # rows in this pass
        self._calls = 0  # of the system's hooks, as far as they were charged
        self._unit_free = 0.0  # when the accelerator's arithmetic is through with what it was handed

    def now(self) -> float:
        """Seconds of simulated time."""
        return self._now

    # --- link ------------------------------------------------------------------------------------------------------

    def copy(self, key: int, source: tuple[str, int], target: tuple[str, int], after: Ticket | None) -> Ticket:
        """Queue one copy on the link, after the read it depends on."""
        if target[0] == "device":
            self._spend(OVERHEAD, self._now + self.costs.load_host_s, "issue", 1)
        ticket = Ticket(key, self.costs.expert_bytes, target[1], DEMAND, self._now)
        ticket.handle = after
        self._towards[ticket] = target[0]
        if self.costs.map_s and target[0] == "device":
            self._unmapped.add(ticket)
        if self.costs.decode_s:
            if target[0] != "device":
                self._decoded_below.add(key)
            elif key not in self._decoded_below:
                self._coded.add(ticket)
        landed = self._now if after is None else after.done_s
        if landed is not None:
            self._link(ticket, max(self._now, landed))
        return ticket

    def _link(self, ticket: Ticket, earliest: float) -> None:
        costs, up = self.costs, self._towards.pop(ticket) == "device"
        way, took = ("device", costs.copy_s) if up else ("host", costs.copy_back_s)
        if ticket in self._coded:
            took = costs.copy_coded_s
        start = max(earliest, self._link_free[way])
        self._link_free[way] = start + took
        if self.log is not None:
            self.log.append((LINK, "up" if up else "down", ticket.key, start, start + took))
        self._arrive(ticket, start + costs.copy_latency_s + took, earliest)

    # --- waiting ---------------------------------------------------------------------------------------------------

    def _resolve(self, ticket: Ticket) -> float | None:
        """Completion time if it is known at this moment."""
        if ticket.done_s is None:
            self._sweep(self._now)
            source = ticket.handle
            if isinstance(source, Ticket) and source.done_s is not None:
                self._link(ticket, max(source.done_s, ticket.issued_s))
        return ticket.done_s

    def is_ready(self, ticket: Ticket) -> bool:
        """Whether the transfer is complete now."""
        done = self._resolve(ticket)
        return done is not None and done <= self._now

    def wait(self, ticket: Ticket) -> float:
        """Advance the clock to the completion; a prefetch still queued is promoted first."""
        if self._resolve(ticket) is None:
            self.promote(ticket)
        done = self._resolve(ticket)
        if done is None:
            raise AssertionError(f"transfer of key {ticket.key} was lost")
        stall = max(0.0, done - max(self._now, self._unit_free))  # while experts compute, nothing stands still
        if done > self._now:
            if self._unit_free > self._now:
                self._spend(COMPUTE, min(done, self._unit_free))
            landed, linked, decoded = ticket.landed_s, ticket.linked_s, ticket.decoded_s
            for part, what, until in (
                (STALL, "storage", landed), (COPY, "link", linked), (DECODE, "decoder", decoded), (STALL, "map", done)
            ):  # fmt: skip
                if until > self._now:
                    self._spend(part, until, what, ticket.key)
            if self.costs.wait_s and not self._waited:
                self._spend(OVERHEAD, self._now + self.costs.wait_s, "wait")
            if cold := self.costs.again_s if self._waited else self.costs.cold_s:
                self._landed(self._now)  # while nothing computed
                self._spend(COMPUTE, self._now + cold, "cold")
            self._waited = True
        return stall

    # --- compute ---------------------------------------------------------------------------------------------------

    def compute_experts(self, count: int, rows: int, overlap: bool = False) -> None:
        """Each expert streams its weights once, or is bound by its rows' arithmetic.

        On a chip with memory of its own the experts go part by part through two buffers, one filled while the other is
        computed on, from one call to the next: a copy begins when the part before it begins to compute, for then the
        other buffer is free. With ``overlap`` the clock stops where the next copy may begin.
        """
        costs = self.costs
        if costs.demand_s:
            self._spend(OVERHEAD, self._now + count * costs.demand_s, "loop", count)
        if not costs.on_chip_s:
            self._compute(self._experts_s(count, rows), costs.experts_beside, "experts", count)
            return
        if not count:
            return
        parts = count * costs.chip_parts
        copy, compute = (seconds / parts for seconds in self.stage_s(count, rows))
        last = max(self._now + copy, self._unit_free) + (parts - 1) * max(copy, compute)  # begins to compute
        if self.log is not None:
            self.log.append((UNIT, "experts", count, max(self._now, self._unit_free), last + compute))
        self._unit_free = last + compute
        self._spend(COMPUTE, last if overlap else self._unit_free)

    def _experts_s(self, count: int, rows: int) -> float:
        """Seconds of ``count`` experts over ``rows`` pairs by themselves."""
        costs = self.costs
        each = costs.gather_s if self._several else costs.dispatch_s
        if costs.expert_rows_s is not None:
            return count * (costs.expert_rows_s(rows / count) + each) if count else 0.0
        return max(count * costs.expert_s, rows * costs.expert_row_s) + count * each

    def _compute(self, took: float, beside: tuple[float, float], what: str, of: int = 0) -> None:
        """Work of ``took`` seconds by itself; beside reads both go at their shares of their speed."""
        own, reads = beside
        if took and (own < 1 or reads < 1):
            reading = self.reading_s() / reads
            both = min(took / own, reading)
            took = both + max(0.0, took - own * reading)
            self._delay((1 - reads) * both)
        if not self.costs.beside_s:
            self._spend(COMPUTE, self._now + took, what, of)
            return
        self._landed(self._now)
        self._spend(COMPUTE, self._now + took, what, of)
        while count := self._landed(self._now):
            self._spend(COMPUTE, self._now + count * self.costs.beside_s, "beside")

    def stage_s(self, count: int, rows: int) -> tuple[float, float]:
        """Copies into the chip at its own rate; arithmetic in whole tiles of rows, equally many for each expert."""
        costs = self.costs
        if not costs.on_chip_s:
            return 0.0, self._experts_s(count, rows)
        tiles = -(-rows // (count * costs.tile_rows)) * count if count else 0
        return count * costs.on_chip_s, tiles * costs.tile_rows * costs.expert_row_s

    def busy_s(self) -> float:
        """What is left of the arithmetic under way."""
        return max(0.0, self._unit_free - self._now)

    def remaining_s(self, ticket: Ticket) -> float | None:
        """Known for demand; for a prefetch as soon as storage has served it."""
        done = self._resolve(ticket)
        return None if done is None else max(0.0, done - self._now)

    def compute_on_host(self, source: Ticket | None, count: int, rows: int) -> None:
        """The host works through its experts one after another, beside the device."""
        costs, begin = self.costs, self._now
        if source is not None:
            if self._resolve(source) is None:
                self.promote(source)
            begin = max(begin, self._resolve(source) or 0.0)
        took = max(count * costs.host_expert_s, rows * costs.host_row_s)
        self._host_free, self._host_busy = max(begin, self._host_free) + took, True
        if self.log is not None:
            self.log.append((ON_HOST, "experts", count, self._host_free - took, self._host_free))

    def join(self) -> None:
        """The layer's sum needs the device's part and the host's, after its trip there and back."""
        self._spend(COMPUTE, max(self._now, self._unit_free))
        if self._host_busy:
            self._spend(COMPUTE, max(self._now, self._host_free + self.costs.host_trip_s))
            self._host_busy = False

    def compute_dense(self, layers: int, rows: int, state_bytes: int, final: bool) -> None:
        """Dense weights stream once per pass; many rows are bound by arithmetic; a layer never beats the stack's
        floor.
        """
        costs = self.costs
        self._waited, self._several = False, rows > 1
        if layers:
            busy = max(costs.dense_layer_s, rows * costs.dense_row_s) + state_bytes * costs.state_byte_s
            if costs.library_s is not None:  # nothing of it goes on beside: it adds up
                took = layers * (busy + costs.library_s(state_bytes, rows) + costs.adapters_s)
                self._compute(took, (1.0, costs.reads_beside_layers), "dense", layers)
            else:
                end = self._now + layers * max(busy, costs.layer_floor_s)
                self._spend(COMPUTE, min(end, self._now + layers * busy), "dense", layers)
                if end > self._now:
                    self._spend(OVERHEAD, end, "floor", layers)
            if own := costs.layer_s + costs.live_layer_s:
                self._spend(OVERHEAD, self._now + layers * own, "loop", layers)
        if final:
            self._compute(costs.head_s + costs.pass_s, (1.0, costs.reads_beside_layers), "head")
            if costs.step_s:
                self._spend(OVERHEAD, self._now + costs.step_s, "pass")

    def host_sync(self) -> None:
        """Reading a routing decision back costs the stack's synchronisation time."""
        self._spend(OVERHEAD, self._now + self.costs.host_sync_s, "sync")

    def hooked(self, calls: int) -> None:
        """Each call takes the host the same."""
        if self.costs.hook_s:
            self._spend(OVERHEAD, self._now + (calls - self._calls) * self.costs.hook_s, "hooks")
        self._calls = calls

    def system_work(self, nbytes: int, syncs: int) -> None:
        """Bytes stream from the fastest memory; each result that is waited for costs a synchronisation."""
        took = nbytes * self.costs.byte_s + syncs * self.costs.host_sync_s
        self._spend(OVERHEAD, self._now + took, "system")
