"""A clock that models: storage queue, page cache, link and compute, advanced by arithmetic alone.

Storage serves demand first. Reads issued together overlap: the first completes after the time one read takes alone, the
last when the device has moved all of them at the throughput it reaches at that depth. Prefetch reads fill the time
demand leaves free; a demand read waits at most for the prefetch block already on the device. Writes fill what reads
leave, unit by unit. Deterministic, and byte-identical everywhere.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from moebench.residency.places import Places
from moebench.timeline.base import DEMAND, PREFETCH, Ticket, Timeline
from moebench.timeline.costs import Costs
from moebench.timeline.writes import Writes


class VirtualTimeline(Timeline):
    """Simulated time for one run. ``storage_bytes`` counts what storage itself delivered, page-cache hits excluded, and
    ``storage_requests`` in how many pieces. ``places`` says which experts are neighbours there.
    """

    clock = "virtual"

    def __init__(self, costs: Costs, places: Places | None = None) -> None:
        self.costs, self.places = costs, places
        self.storage_bytes = self.storage_requests = 0
        self._now = 0.0
        self._demand_free = 0.0  # when storage has served all demand reads issued so far
        self._swept = 0.0  # prefetch service is simulated up to here
        self._queue: deque[Ticket] = deque()  # prefetch reads waiting or under way, in order
        self._left: dict[Ticket, float] = {}  # seconds of service each still needs
        self._begun: Ticket | None = None  # the one at the head that was served in part
        self.writes = Writes(costs.write_unit_bytes, costs.write_unit_s)
        self._towards: dict[Ticket, str] = {}
        self._link_free = {"host": 0.0, "device": 0.0}  # the link carries both directions at once
        self._memory_free = self._decoder_free = self._host_free = self._map_free = 0.0
        self._unit_free = 0.0  # when the accelerator's arithmetic is through with what it was handed
        self._host_busy = False
        self._coded: set[Ticket] = set()  # reads that are decoded as they arrive
        self._unmapped: set[Ticket] = set()  # transfers whose expert has to be mapped when it is there
        self._decoded_below: set[int] = set()  # experts that came down to the host, decoded
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._page_slots = costs.page_cache_bytes // max(1, costs.expert_bytes)

    def now(self) -> float:
        """Seconds of simulated time."""
        return self._now

    # --- storage ---------------------------------------------------------------------------------------------------

    def read(
        self, keys: Sequence[int], slots: Sequence[int], tier: str, priority: int, together: Sequence[int] = ()
    ) -> list[Ticket]:
        """Start reads; completion times of demand reads are known at once, those of prefetches as time passes."""
        costs = self.costs
        if tier == "device":  # by way of a host slot it is the copy up that the host thread issues
            self._now += costs.load_host_s * len(keys)
        now, tickets, cold = self._now, [], []
        for key, slot in zip(keys, slots, strict=True):
            ticket = Ticket(key, costs.read_bytes, slot, priority, now)
            tickets.append(ticket)
            if costs.map_s and tier == "device":
                self._unmapped.add(ticket)
            if costs.decode_s:
                if tier == "device":
                    self._coded.add(ticket)
                else:
                    self._decoded_below.discard(key)
            if self._page_slots and self._from_page_cache(key):
                self._memory_free = max(now, self._memory_free) + costs.cached_s
                self._arrive(ticket, self._memory_free)
            else:
                cold.append(ticket)
        if not cold:
            return tickets
        if together:
            self._read_runs(tickets, together)
            return tickets
        self.storage_bytes += costs.read_bytes * len(cold)
        self.storage_requests += costs.requests * len(cold)
        if priority == DEMAND:
            self._serve(cold)
        else:
            self._sweep(now)
            depth = len(self._queue) + len(cold)
            service = max(costs.read_s[min(len(costs.read_s) - 1, depth)], costs.read_s[1] / depth)
            for ticket in cold:
                self._queue.append(ticket)
                self._left[ticket] = service
        return tickets

    def _read_runs(self, tickets: list[Ticket], together: Sequence[int]) -> None:
        """Requests of several neighbours each: a run is read whole, from its first cold expert to its last."""
        costs, at, requests = self.costs, 0, []
        for count in together:
            run = [t for t in tickets[at : at + count] if t.done_s is None]
            at += count
            if run:
                first, last = self.places([run[0].key, run[-1].key]).tolist() if self.places else (0, len(run) - 1)
                gap = last - first + 1 - len(run)
                run[0].nbytes += gap * costs.read_bytes
                requests.append((run, (len(run) + gap) * costs.read_bytes))
        self.storage_bytes += sum(nbytes for _, nbytes in requests)
        self.storage_requests += len(requests)
        if tickets[0].priority == DEMAND:
            start, waiting = self._begin_service()
            each = [costs.request_s(nbytes, len(requests) + waiting) for _, nbytes in requests]
            ends = self._spread(start, each, costs.request_s(requests[0][1], 1), waiting)
            for (run, _), end in zip(requests, ends, strict=True):
                for ticket in run:
                    self._arrive(ticket, end)
        else:
            self._sweep(self._now)
            depth = len(self._queue) + len(requests)
            for run, nbytes in requests:
                service = max(costs.request_s(nbytes, depth), costs.request_s(nbytes, 1) / depth)
                for ticket in run:
                    self._queue.append(ticket)
                    self._left[ticket] = service / len(run)

    def _arrive(self, ticket: Ticket, at: float) -> None:
        """The last byte of a read comes in at ``at``; a compressed expert is complete when it is decoded."""
        if ticket in self._coded:
            self._coded.discard(ticket)
            at = self._decoder_free = max(at, self._decoder_free) + self.costs.decode_s
        if ticket in self._unmapped:
            self._unmapped.discard(ticket)
            at = self._map_free = max(at, self._map_free) + self.costs.map_s
        ticket.done_s = at

    def _serve(self, tickets: list[Ticket]) -> None:
        """Completion times of demand reads issued now: first after a lone read's time, last at full throughput."""
        costs = self.costs
        start, waiting = self._begin_service()
        count = len(tickets)
        each = costs.read_s[min(len(costs.read_s) - 1, count + waiting)]
        ends = self._spread(start, [each] * count, costs.read_s[1], waiting)
        for ticket, end in zip(tickets, ends, strict=True):
            self._arrive(ticket, end)

    def _begin_service(self) -> tuple[float, int]:
        """When storage turns to demand issued now, and how many experts it has waiting before."""
        now = self._now
        self._sweep(now)
        backlog = self._demand_free - now
        if backlog > 0:
            return self._demand_free, max(0, round(backlog / self.costs.read_s[-1]))
        if self.writes.begun:
            return self.writes.end_unit(now), 0
        return now + (min(self.costs.block_s, self._head_left()) if self._queue else 0.0), 0

    def _spread(self, start: float, each: list[float], alone: float, waiting: int) -> list[float]:
        """Ends of requests that overlap: the first after its time alone, the last when all service is done."""
        count, same = len(each), min(each) == max(each)
        total = count * each[0] if same else sum(each)
        if not waiting:
            total = max(total, alone)
        first = each[0] if waiting else min(total, alone)
        self._demand_free = start + total
        if count == 1:
            return [start + total]
        if same:
            gap = (total - first) / (count - 1)
            return [start + first + gap * i for i in range(count)]
        rest, done, ends = sum(each[1:]), 0.0, [start + first]
        for service in each[1:]:
            done += service
            ends.append(start + first + (total - first) * (done / rest))
        return ends

    def _head_left(self) -> float:
        return self._left[self._queue[0]]

    def _sweep(self, until: float) -> None:
        """Give prefetch reads, then writes, the time from the last sweep to ``until`` in which no demand was served."""
        start = max(self._swept, min(self._demand_free, until))
        if self.writes.begun:
            start = self.writes.go_on(start, until)
        while self._queue and start < until:
            ticket = self._queue[0]
            start = max(start, ticket.issued_s)
            need = self._left[ticket]
            used = min(need, until - start)
            if used <= 0:
                break
            start += used
            if used == need:
                self._queue.popleft()
                del self._left[ticket]
                self._arrive(ticket, start)
            else:
                self._left[ticket], self._begun = need - used, ticket
        self.writes.fill(start, until)
        self._swept = max(self._swept, until)

    def promote(self, ticket: Ticket) -> None:
        """Serve the rest of a prefetch with the priority of demand."""
        source = ticket.handle if isinstance(ticket.handle, Ticket) else ticket
        self._sweep(self._now)
        left = self._left.pop(source, None)
        if left is not None:
            self._queue.remove(source)
            begin = self.writes.end_unit(self._now) if self.writes.begun else max(self._now, self._demand_free)
            self._demand_free = begin + left
            self._arrive(source, self._demand_free)

    def cancel(self, read: Ticket, copy: Ticket | None) -> bool:
        """Take a prefetch out of the queue while none of it was served."""
        self._sweep(self._now)
        if read not in self._left or read is self._begun:
            return False
        self._queue.remove(read)
        del self._left[read]
        self._pages.pop(read.key, None)
        self.storage_bytes -= read.nbytes
        self.storage_requests -= self.costs.requests
        self._coded.discard(read)
        self._unmapped.discard(read)
        if copy is not None:
            del self._towards[copy]
        return True

    def write(self, nbytes: int) -> Ticket:
        """Queue a write of ``nbytes`` behind every read, those to come too."""
        self._sweep(self._now)
        ticket = Ticket(-1, nbytes, -1, PREFETCH, self._now)
        self.writes.add(ticket)
        return ticket

    def _from_page_cache(self, key: int) -> bool:
        """Whether the page cache holds the expert; it does afterwards (least recently used go first)."""
        hit = key in self._pages
        self._pages[key] = None
        self._pages.move_to_end(key)
        if len(self._pages) > self._page_slots:
            self._pages.popitem(last=False)
        return hit

    # --- link ------------------------------------------------------------------------------------------------------

    def copy(self, key: int, source: tuple[str, int], target: tuple[str, int], after: Ticket | None) -> Ticket:
        """Queue one copy on the link, after the read it depends on."""
        if target[0] == "device":
            self._now += self.costs.load_host_s
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
        self._arrive(ticket, start + costs.copy_latency_s + took)

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
        self._now = max(self._now, done)  # not += stall: rounding could leave the clock short of it
        return stall

    # --- compute ---------------------------------------------------------------------------------------------------

    def compute_experts(self, count: int, rows: int, overlap: bool = False) -> None:
        """Each expert streams its weights once, or is bound by its rows' arithmetic.

        On a chip with memory of its own the experts go part by part through two buffers, one filled while the other is
        computed on, from one call to the next: a copy begins when the part before it begins to compute, for then the
        other buffer is free. With ``overlap`` the clock stops where the next copy may begin.
        """
        costs = self.costs
        if not costs.on_chip_s:
            self._now += max(count * costs.expert_s, rows * costs.expert_row_s)
            return
        if not count:
            return
        parts = count * costs.chip_parts
        copy, compute = (seconds / parts for seconds in self.stage_s(count, rows))
        last = max(self._now + copy, self._unit_free) + (parts - 1) * max(copy, compute)  # begins to compute
        self._unit_free = last + compute
        self._now = last if overlap else self._unit_free

    def stage_s(self, count: int, rows: int) -> tuple[float, float]:
        """Copies into the chip at its own rate; arithmetic in whole tiles of rows, equally many for each expert."""
        costs = self.costs
        if not costs.on_chip_s:
            return 0.0, max(count * costs.expert_s, rows * costs.expert_row_s)
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
            begin = max(begin, self._resolve(source))
        took = max(count * costs.host_expert_s, rows * costs.host_row_s)
        self._host_free, self._host_busy = max(begin, self._host_free) + took, True

    def join(self) -> None:
        """The layer's sum needs the device's part and the host's, after its trip there and back."""
        self._now = max(self._now, self._unit_free)
        if self._host_busy:
            self._now, self._host_busy = max(self._now, self._host_free + self.costs.host_trip_s), False

    def compute_dense(self, layers: int, rows: int, state_bytes: int, final: bool) -> None:
        """Dense weights stream once per pass; many rows are bound by arithmetic; a layer never beats the stack's
        floor.
        """
        costs = self.costs
        if layers:
            busy = max(costs.dense_layer_s, rows * costs.dense_row_s) + state_bytes * costs.state_byte_s
            self._now += layers * max(busy, costs.layer_floor_s)
        if final:
            self._now += costs.head_s

    def host_sync(self) -> None:
        """Reading a routing decision back costs the stack's synchronisation time."""
        self._now += self.costs.host_sync_s

    def system_work(self, nbytes: int, syncs: int) -> None:
        """Bytes stream from the fastest memory; each result that is waited for costs a synchronisation."""
        self._now += nbytes * self.costs.byte_s + syncs * self.costs.host_sync_s
