"""The storage of a modeled machine: a queue that serves demand first, a page cache, and writes in what time is left.

Reads issued together overlap: the first completes after the time one read takes alone, the last when the device has
moved all of them at the throughput it reaches at that depth. Prefetch reads fill the time demand leaves free and, where
it was measured what a queue that is kept full reaches, the throughput that demand leaves; a demand read waits at most
for the prefetch block already on the device. Writes fill what reads leave, unit by unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from moebench.residency.places import Places
from moebench.timeline.base import (
    DECODER,
    DEMAND,
    LANE_OF,
    OVERHEAD,
    PARTS,
    PREFETCH,
    STORAGE,
    Ticket,
    Timeline,
)  # fmt: skip
from moebench.timeline.costs import Costs
from moebench.timeline.pagecache import PageCache
from moebench.timeline.writes import Writes

LIMIT_SLICE_S = 0.1  # a limit on the rate of reads lets so much through at once


class ModeledStorage(Timeline):
    """The part of a modeled clock that reads. ``storage_bytes`` counts what storage itself delivered, page-cache hits
    excluded, and ``storage_requests`` in how many pieces. ``places`` says which experts are neighbours there.
    """

    def __init__(self, costs: Costs, places: Places | None = None) -> None:
        self.costs, self.places = costs, places
        self.storage_bytes = self.storage_requests = 0
        self.spent = [0.0] * len(PARTS)
        self._now = 0.0
        self._demand_free = 0.0  # when storage has served all demand reads issued so far
        self._swept = 0.0  # prefetch service is simulated up to here
        self._queue: deque[Ticket] = deque()  # prefetch reads waiting or under way, in order
        self._coming: list[Ticket] = []  # demand reads under way
        self._allotted = 0.0  # until when a limit has allotted its rate
        self._left: dict[Ticket, float] = {}  # seconds of service each still needs
        self._spare = 0.0  # of their speed that prefetches keep beside demand
        self._begun: Ticket | None = None  # the one at the head that was served in part
        self.writes = Writes(costs.write_unit_bytes, costs.write_unit_s)
        self._towards: dict[Ticket, str] = {}  # copies that wait for their read, and the tier they go to
        self._memory_free = self._decoder_free = self._map_free = 0.0
        self._coded: set[Ticket] = set()  # transfers that are decoded as they arrive
        self._unmapped: set[Ticket] = set()  # transfers whose expert has to be mapped when it is there
        self._decoded_below: set[int] = set()  # experts that came down to the host, decoded
        self._pages = PageCache(costs, places)
        # However many prefetches are served side by side, none lands sooner than one alone, where that was measured.
        self._alone_s = costs.ahead_s[1] if costs.ahead_s else 0.0
        self._landing: list[Ticket] = []  # reads that are charged for when they land

    def _spend(self, part: int, until: float, what: str = "", of: int = 0) -> None:
        """The clock advances to ``until``; ``what`` goes to the log."""
        if self.log is not None and what:
            self.log.append((LANE_OF[part], what, of, self._now, until))
        self.spent[part] += until - self._now
        self._now = until

    def read(
        self, keys: Sequence[int], slots: Sequence[int], tier: str, priority: int, together: Sequence[int] = ()
    ) -> list[Ticket]:
        """Start reads; completion times of demand reads are known at once, those of prefetches as time passes."""
        costs = self.costs
        if tier == "device":  # by way of a host slot it is the copy up that the host thread issues
            self._spend(OVERHEAD, self._now + (costs.load_host_s + costs.live_load_s) * len(keys), "issue", len(keys))
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
            if self._pages.slots and self._pages.serves(key):
                self._memory_free = max(now, self._memory_free) + costs.cached_s
                if self.log is not None:
                    self.log.append((STORAGE, "page cache", key, self._memory_free - costs.cached_s, self._memory_free))
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
            if costs.ahead_s:
                service = costs.ahead_s[min(len(costs.ahead_s) - 1, depth)]
            else:
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
            self._track([ticket for run, _ in requests for ticket in run])
            each = [costs.request_s(nbytes, len(requests) + waiting) for _, nbytes in requests]
            sizes = [nbytes for _, nbytes in requests]
            ends = self._spread(start, each, costs.request_s(requests[0][1], 1), waiting, sizes)
            for (run, _), end in zip(requests, ends, strict=True):
                self._log_read(run, start, end)
                start = end
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

    def _log_read(self, tickets: Sequence[Ticket], begin: float, end: float) -> None:
        """Storage served one request from ``begin`` to ``end``: of what overlaps, the time it adds."""
        if self.log is not None:
            what = "read" if len(tickets) == 1 else f"run of {len(tickets)} from"
            self.log.append((STORAGE, what, tickets[0].key, begin, end))

    def _arrive(self, ticket: Ticket, at: float, landed: float | None = None) -> None:
        """The last byte comes in at ``at``, from storage where it had not ``landed`` before; a compressed expert is
        complete when it is decoded.
        """
        costs = self.costs
        ticket.landed_s, ticket.linked_s = at if landed is None else landed, at
        if landed is None and costs.beside_s:
            self._landing.append(ticket)
        if ticket in self._coded:
            self._coded.discard(ticket)
            at = self._decoder_free = max(at, self._decoder_free) + costs.decode_s
            if self.log is not None:
                self.log.append((DECODER, "decode", ticket.key, at - costs.decode_s, at))
        ticket.decoded_s = at
        if ticket in self._unmapped:
            self._unmapped.discard(ticket)
            at = self._map_free = max(at, self._map_free) + costs.map_s
            if self.log is not None:
                self.log.append((DECODER, "map", ticket.key, at - costs.map_s, at))
        ticket.done_s = at

    def _serve(self, tickets: list[Ticket]) -> None:
        """Completion times of demand reads issued now: first after a lone read's time, last at full throughput."""
        costs = self.costs
        start, waiting = self._begin_service()
        count = len(tickets)
        self._track(tickets)
        each = costs.read_s[min(len(costs.read_s) - 1, count + waiting)]
        if costs.ahead_s:  # the throughput that a full queue has beyond a demand's
            self._spare = max(0.0, 1 - min(costs.ahead_s[1:]) / each)
        ends = self._spread(start, [each] * count, costs.read_s[1], waiting, [costs.read_bytes] * count)
        for ticket, end in zip(tickets, ends, strict=True):
            self._log_read((ticket,), start, end)
            start = end
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

    def _spread(self, start: float, each: list[float], alone: float, waiting: int, sizes: Sequence[int]) -> list[float]:
        """Ends of requests that overlap: the first after its time alone, the last when all service is done, and none
        before a limit lets its bytes through.
        """
        ends = self._unlimited(start, each, alone, waiting)
        if self.costs.limit_byte_s:
            ends = [max(end, self._let_through(start, nbytes)) for end, nbytes in zip(ends, sizes, strict=True)]
            self._demand_free = ends[-1]
        return ends

    def _let_through(self, asked: float, nbytes: int) -> float:
        """When a limit lets a request through that is asked for: what it allots runs ahead by a slice at most (a
        generic cell rate; the slice is that of block/blk-throttle.c in Linux).
        """
        self._allotted = max(asked, self._allotted) + nbytes * self.costs.limit_byte_s
        return max(asked, self._allotted - LIMIT_SLICE_S)

    def _limited(self, ticket: Ticket, start: float) -> float:
        """Seconds of service that a queued read needs from ``start`` on, at least until a limit lets it through."""
        left = self._left[ticket]
        if not self.costs.limit_byte_s or ticket is self._begun:
            return left
        return max(left, self._let_through(start, ticket.nbytes) - start)

    def _unlimited(self, start: float, each: list[float], alone: float, waiting: int) -> list[float]:
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
        """Give prefetch reads, then writes, the time from the last sweep to ``until`` in which no demand was served,
        and prefetch reads what demand left them of the rest.
        """
        busy = min(self._demand_free, until)
        if self._spare and self._swept < busy:
            self._fill(self._swept, busy, self._spare)
        start = max(self._swept, busy)
        if self.writes.begun:
            start = self.writes.go_on(start, until)
        start = self._fill(start, until, 1.0)
        self.writes.fill(start, until)
        self._swept = max(self._swept, until)

    def _fill(self, start: float, until: float, speed: float) -> float:
        """Serve prefetch reads in order at a share of their ``speed``; returns when that was over."""
        while self._queue and start < until:
            ticket = self._queue[0]
            start = max(start, ticket.issued_s)
            if start >= until:
                break
            need = self._limited(ticket, start) / speed
            used = min(need, until - start)
            self._log_read((ticket,), start, start + used)
            start += used
            if used == need:
                self._queue.popleft()
                del self._left[ticket]
                self._arrive(ticket, max(start, ticket.issued_s + self._alone_s))
            else:
                self._left[ticket], self._begun = (need - used) * speed, ticket
        return start

    def _landed(self, until: float) -> int:
        """Reads that landed by then and were not counted before."""
        self._sweep(until)
        before, self._landing = self._landing, [ticket for ticket in self._landing if ticket.landed_s > until]
        return len(before) - len(self._landing)

    def reading_s(self) -> float:
        """Seconds for which storage goes on reading what was asked for so far."""
        self._sweep(self._now)
        return max(0.0, self._demand_free - self._now) + sum(self._left.values())

    def _track(self, issued: Sequence[Ticket]) -> None:
        """Demand reads that were ``issued`` now join those that are still under way."""
        self._coming = [*(ticket for ticket in self._coming if (ticket.done_s or 0.0) > self._now), *issued]

    def _delay(self, seconds: float) -> None:
        """What storage has under way ends so much later."""
        if seconds and self._demand_free > self._now:
            self._demand_free += seconds
            self._track(())
            for ticket in self._coming:
                ticket.landed_s += seconds
                ticket.linked_s += seconds
                ticket.decoded_s += seconds
                ticket.done_s += seconds  # type: ignore[operator]
        elif seconds and self._queue:
            self._left[self._queue[0]] += seconds

    def promote(self, ticket: Ticket) -> None:
        """Serve the rest of a prefetch with the priority of demand."""
        source = ticket.handle if isinstance(ticket.handle, Ticket) else ticket
        self._sweep(self._now)
        if source in self._left:
            begin = self.writes.end_unit(self._now) if self.writes.begun else max(self._now, self._demand_free)
            left = self._limited(source, begin)
            del self._left[source]
            self._queue.remove(source)
            self._demand_free = begin + left
            self._log_read((source,), begin, self._demand_free)
            self._arrive(source, max(self._demand_free, source.issued_s + self._alone_s))

    def cancel(self, read: Ticket, copy: Ticket | None) -> bool:
        """Take a prefetch out of the queue while none of it was served."""
        self._sweep(self._now)
        if read not in self._left or read is self._begun:
            return False
        self._queue.remove(read)
        del self._left[read]
        self._pages.forget(read.key)
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
