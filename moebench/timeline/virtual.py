"""A clock that models: storage queue, page cache, link and compute, advanced by arithmetic alone.

Storage serves demand first. Reads issued together overlap: the first completes after the time one read takes alone, the
last when the device has moved all of them at the throughput it reaches at that depth. Prefetch reads fill the time
demand leaves free; a demand read waits at most for the prefetch block already on the device. Deterministic, and
byte-identical everywhere.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from moebench.timeline.base import DEMAND, Ticket, Timeline
from moebench.timeline.costs import Costs


class VirtualTimeline(Timeline):
    """Simulated time for one run. ``storage_bytes`` counts what storage itself delivered, page-cache hits excluded."""

    clock = "virtual"

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.storage_bytes = 0
        self._now = 0.0
        self._demand_free = 0.0  # when storage has served all demand reads issued so far
        self._swept = 0.0  # prefetch service is simulated up to here
        self._queue: deque[Ticket] = deque()  # prefetch reads waiting or under way, in order
        self._left: dict[Ticket, float] = {}  # seconds of service each still needs
        self._begun: Ticket | None = None  # the one at the head that was served in part
        self._towards: dict[Ticket, str] = {}
        self._link_free = {"host": 0.0, "device": 0.0}  # the link carries both directions at once
        self._memory_free = 0.0
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._page_slots = costs.page_cache_bytes // max(1, costs.expert_bytes)

    def now(self) -> float:
        """Seconds of simulated time."""
        return self._now

    # --- storage ---------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[int], slots: Sequence[int], tier: str, priority: int) -> list[Ticket]:
        """Start reads; completion times of demand reads are known at once, those of prefetches as time passes."""
        costs = self.costs
        if tier == "device":  # by way of a host slot it is the copy up that the host thread issues
            self._now += costs.load_host_s * len(keys)
        now, tickets, cold = self._now, [], []
        for key, slot in zip(keys, slots, strict=True):
            ticket = Ticket(key, costs.read_bytes, slot, priority, now)
            tickets.append(ticket)
            if self._page_slots and self._from_page_cache(key):
                ticket.done_s = self._memory_free = max(now, self._memory_free) + costs.cached_s
            else:
                cold.append(ticket)
        if not cold:
            return tickets
        self.storage_bytes += costs.read_bytes * len(cold)
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

    def _serve(self, tickets: list[Ticket]) -> None:
        """Completion times of demand reads issued now: first after a lone read's time, last at full throughput."""
        costs, now = self.costs, self._now
        self._sweep(now)
        backlog = self._demand_free - now
        waiting = max(0, round(backlog / costs.read_s[-1])) if backlog > 0 else 0
        start = (
            self._demand_free if backlog > 0 else now + (min(costs.block_s, self._head_left()) if self._queue else 0.0)
        )
        count = len(tickets)
        each = costs.read_s[min(len(costs.read_s) - 1, count + waiting)]
        total = max(count * each, costs.read_s[1]) if not waiting else count * each
        first = min(total, costs.read_s[1]) if not waiting else each
        gap = (total - first) / (count - 1) if count > 1 else 0.0
        for i, ticket in enumerate(tickets):
            ticket.done_s = start + first + gap * i
        self._demand_free = start + total

    def _head_left(self) -> float:
        return self._left[self._queue[0]]

    def _sweep(self, until: float) -> None:
        """Give prefetch reads the time between the last sweep and ``until`` in which no demand was served."""
        start = max(self._swept, min(self._demand_free, until))
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
                ticket.done_s = start
            else:
                self._left[ticket], self._begun = need - used, ticket
        self._swept = max(self._swept, until)

    def promote(self, ticket: Ticket) -> None:
        """Serve the rest of a prefetch with the priority of demand."""
        source = ticket.handle if isinstance(ticket.handle, Ticket) else ticket
        self._sweep(self._now)
        left = self._left.pop(source, None)
        if left is not None:
            self._queue.remove(source)
            source.done_s = max(self._now, self._demand_free) + left
            self._demand_free = source.done_s

    def cancel(self, read: Ticket, copy: Ticket | None) -> bool:
        """Take a prefetch out of the queue while none of it was served."""
        self._sweep(self._now)
        if read not in self._left or read is self._begun:
            return False
        self._queue.remove(read)
        del self._left[read]
        self._pages.pop(read.key, None)
        self.storage_bytes -= read.nbytes
        if copy is not None:
            del self._towards[copy]
        return True

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
        landed = self._now if after is None else after.done_s
        if landed is not None:
            self._link(ticket, max(self._now, landed))
        return ticket

    def _link(self, ticket: Ticket, earliest: float) -> None:
        target = self._towards.pop(ticket)
        took = self.costs.copy_s if target == "device" else self.costs.copy_back_s
        start = max(earliest, self._link_free[target])
        self._link_free[target] = start + took
        ticket.done_s = start + self.costs.copy_latency_s + took

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
        stall = max(0.0, done - self._now)
        self._now = max(self._now, done)  # not += stall: rounding could leave the clock short of it
        return stall

    # --- compute ---------------------------------------------------------------------------------------------------

    def compute_experts(self, count: int, rows: int) -> None:
        """Each expert streams its weights once, or is bound by its rows' arithmetic."""
        costs = self.costs
        self._now += max(count * costs.expert_s, rows * costs.expert_row_s)

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
