"""A clock that measures: real reads by a read engine, real copies between arenas, real time.

Knows tiers only as arenas of slots to fill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from moebench.store.engines import ReadEngine
from moebench.timeline.base import COPY, DECODE, DEMAND, LINK, PARTS, STALL, STORAGE, WAIT, WAITS, Ticket, Timeline
from moebench.timeline.moves import HostMoves, Moves

COPIERS = 2  # threads that copy between slots, and decode on the way


def submit(
    engine: ReadEngine, buffer: Callable[[str, int], np.ndarray], tickets: Sequence[Ticket], tier: str,
    together: Sequence[int],
) -> list[Future]:  # fmt: skip
    """Hand reads to an engine, run by run; returns their futures in order."""
    if tickets and not together:
        buffers = [buffer(tier, ticket.slot) for ticket in tickets]
        return engine.submit_all([ticket.key for ticket in tickets], buffers, tickets[0].priority)
    futures: list[Future] = []
    at = 0
    for count in together:
        run = tickets[at : at + count]
        buffers = [buffer(tier, ticket.slot) for ticket in run]
        if count == 1:
            futures.append(engine.submit(run[0].key, buffers[0], run[0].priority))
        else:
            futures += engine.submit_run([ticket.key for ticket in run], buffers, run[0].priority)
        at += count
    return futures


class WallTimeline(Timeline):
    """Drives ``engine`` and copy threads. ``buffer(tier, slot)`` gives the bytes of a slot, ``moves`` says how experts
    get from one tier to another (by default all tiers are the host's).
    """

    clock = "wall"

    def __init__(
        self, engine: ReadEngine, buffer: Callable[[str, int], np.ndarray], moves: Moves | None = None
    ) -> None:
        self.engine, self.buffer, self._moves = engine, buffer, moves or HostMoves(engine, buffer)
        self._origin = time.perf_counter()
        self.spent = [0.0] * len(PARTS)
        self._copier: ThreadPoolExecutor | None = None

    @property
    def storage_bytes(self) -> int:
        """Bytes that the engine has asked of its file."""
        return self.engine.bytes_read

    @property
    def storage_requests(self) -> int:
        """Read calls that the engine has issued."""
        return self.engine.calls

    def now(self) -> float:
        """Seconds since this timeline was made."""
        return time.perf_counter() - self._origin

    def read(
        self, keys: Sequence[int], slots: Sequence[int], tier: str, priority: int, together: Sequence[int] = ()
    ) -> list[Ticket]:
        """Submit one read per expert, or one per run, in order."""
        self.spent[COPY] += self._moves.landing(keys, tier, slots)
        now, pack, at = self.now(), self.engine.pack, 0
        tickets = [Ticket(k, pack.read_bytes(k), slot, priority, now) for k, slot in zip(keys, slots, strict=True)]
        for count in together:
            first, *rest = tickets[at : at + count]
            if rest:  # the gaps between them are read too
                start, last = (pack.segments(ticket.key)[0].offset for ticket in (first, rest[-1]))
                first.nbytes = last - start - sum(ticket.nbytes for ticket in rest[:-1])
            at += count
        for ticket, future in zip(tickets, submit(self.engine, self.buffer, tickets, tier, together), strict=True):
            ticket.handle = future
            if self.log is not None:
                self._log_end(ticket, STORAGE, "read")
        return tickets

    def _log_end(self, ticket: Ticket, lane: int, what: str) -> None:
        """Log a transfer when it ends, from a thread of its own."""
        log = self.log
        assert log is not None
        ticket.handle.add_done_callback(lambda _: log.append((lane, what, ticket.key, ticket.issued_s, self.now())))

    def copy(self, key: int, source: tuple[str, int], target: tuple[str, int], after: Ticket | None) -> Ticket:
        """Have a copy thread move the expert as soon as ``after`` has landed, whatever else is under way."""
        copier = self._copier = self._copier or ThreadPoolExecutor(COPIERS, thread_name_prefix="moebench-copy")
        ticket = Ticket(key, self.engine.pack.expert_bytes, target[1], DEMAND, self.now())
        done: Future[None] = Future()
        ticket.handle = done
        if self.log is not None:
            self._log_end(ticket, LINK, "up" if target[0] == "device" else "down")
        move, decodes = self._moves.move(key, source, target)
        ticket.way = DECODE if decodes else COPY

        def copied() -> None:
            try:
                move()
            except Exception as error:  # a thread that dies would leave the loop waiting for ever
                done.set_exception(error)
            else:
                done.set_result(None)

        def landed(read: Future) -> None:
            ticket.landed_s = self.now()
            if (error := read.exception()) is not None:
                done.set_exception(error)
            else:
                copier.submit(copied)

        if after is None:
            copier.submit(copied)
        else:
            after.handle.add_done_callback(landed)
        return ticket

    def is_ready(self, ticket: Ticket) -> bool:
        """Whether the transfer ended; one that failed is for ``wait`` to raise."""
        return ticket.handle.done()

    def promote(self, ticket: Ticket) -> None:
        """Move a queued read to the front."""
        if ticket.priority != DEMAND:
            self.engine.promote(ticket.key)

    def cancel(self, read: Ticket, copy: Ticket | None) -> bool:
        """Take a queued read back from the engine; a copy that waits for it fails with it, and moves nothing."""
        return read.priority != DEMAND and self.engine.cancel(read.key)

    def wait(self, ticket: Ticket) -> float:
        """Block until the transfer ended; returns the seconds it took and raises its error."""
        future: Future = ticket.handle
        if future.done():
            future.result()
            return 0.0
        self.promote(ticket)
        started = self.now()
        future.result()
        ended = self.now()
        landed = min(max(started, ticket.landed_s), ended)
        self.spent[STALL] += landed - started
        self.spent[ticket.way] += ended - landed
        if self.log is not None:
            for way, begin, end in ((STALL, started, landed), (ticket.way, landed, ended)):
                if end > begin:
                    self.log.append((WAIT, WAITS[way], ticket.key, begin, end))
        return ended - started

    def compute_experts(self, count: int, rows: int, overlap: bool = False) -> None:
        """Real compute takes its own time."""

    def busy_s(self) -> float:
        """Compute is over when it returns."""
        return 0.0

    def remaining_s(self, ticket: Ticket) -> float | None:
        """A disk does not say."""
        return 0.0 if ticket.handle.done() else None

    def stage_s(self, count: int, rows: int) -> tuple[float, float]:
        """Not known beforehand; the loop measures what an expert takes."""
        return 0.0, 0.0

    def compute_on_host(self, source: Ticket | None, count: int, rows: int) -> None:
        """Real compute takes its own time."""

    def join(self) -> None:
        """Real compute is over when it returns."""

    def compute_dense(self, layers: int, rows: int, state_bytes: int, final: bool) -> None:
        """Real compute takes its own time."""

    def system_work(self, nbytes: int, syncs: int) -> None:
        """Work takes its own time."""

    def host_sync(self) -> None:
        """Real synchronisation takes its own time."""

    def close(self) -> None:
        """Stop the engine, then the copy threads, which it may still hand something, then what they moved between."""
        self.engine.close()
        if self._copier is not None:
            self._copier.shutdown(wait=True)
        self._moves.close()
