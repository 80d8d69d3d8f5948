"""Writes in the background of a modeled storage: units that fill the time which reads leave free.

Knows seconds and bytes; the clock says when storage is free. A unit that was begun is not broken off, so that a read
waits for the rest of one unit at most.
"""

from __future__ import annotations

from collections import deque

from moebench.timeline.base import Ticket


class Writes:
    """Units of ``unit_bytes`` that take ``unit_s`` seconds each. ``written_bytes`` counts those that are complete."""

    def __init__(self, unit_bytes: int, unit_s: float) -> None:
        self.unit_bytes, self.unit_s = unit_bytes, unit_s
        self.written_bytes = 0
        self._queue: deque[tuple[Ticket, int]] = deque()  # units to come: of which write, and their bytes
        self._rest: float | None = None  # seconds that the first one still takes, once it was begun

    @property
    def begun(self) -> bool:
        """Whether storage is in the middle of a unit."""
        return self._rest is not None

    def add(self, ticket: Ticket) -> None:
        """Queue one write."""
        whole, rest = divmod(ticket.nbytes, self.unit_bytes)
        self._queue.extend((ticket, n) for n in [self.unit_bytes] * whole + [rest] * bool(rest))

    def fill(self, start: float, until: float) -> None:
        """Write from ``start`` to ``until``: nobody reads."""
        while self._queue and start < until:
            if self._rest is None:
                self._rest = self._queue[0][1] / self.unit_bytes * self.unit_s
            start = self.go_on(start, until)

    def go_on(self, start: float, until: float) -> float:
        """Go on with the unit that was begun; returns when it ends, ``until`` where that comes first."""
        assert self._rest is not None
        if self._rest > until - start:
            self._rest -= max(0.0, until - start)
            return until
        return self.end_unit(start)

    def end_unit(self, start: float) -> float:
        """Go on to the end of the unit that was begun, and return it; it counts as written."""
        assert self._rest is not None
        start, self._rest = start + self._rest, None
        ticket, nbytes = self._queue.popleft()
        self.written_bytes += nbytes
        if not self._queue or self._queue[0][0] is not ticket:
            ticket.done_s = start
        return start
