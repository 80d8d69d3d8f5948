"""Modeled time over real bytes: a live run on a declared machine moves real experts, and the clock is arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from moebench.residency.places import Places
from moebench.store.engines import ReadEngine, StoreError
from moebench.timeline.base import Ticket
from moebench.timeline.costs import Costs
from moebench.timeline.moves import HostMoves
from moebench.timeline.virtual import VirtualTimeline
from moebench.timeline.wall import submit


class FilledTimeline(VirtualTimeline):
    """A virtual clock whose transfers also happen: slots hold real bytes as soon as a ticket is complete."""

    def __init__(
        self, costs: Costs, engine: ReadEngine, buffer: Callable[[str, int], np.ndarray], places: Places | None = None
    ) -> None:
        super().__init__(costs, places)
        self.engine, self.buffer, self._moves = engine, buffer, HostMoves(engine, buffer)
        self._real: dict[Ticket, Callable[[], object]] = {}

    def read(
        self, keys: Sequence[int], slots: Sequence[int], tier: str, priority: int, together: Sequence[int] = ()
    ) -> list[Ticket]:
        """Start modeled and real reads."""
        self._moves.landing(keys, tier, slots)
        tickets = super().read(keys, slots, tier, priority, together)
        # One by one: of places that only changed in the model the pack knows nothing.
        for ticket, future in zip(tickets, submit(self.engine, self.buffer, tickets, tier, ()), strict=True):
            self._real[ticket] = future.result
        return tickets

    def copy(self, key: int, source: tuple[str, int], target: tuple[str, int], after: Ticket | None) -> Ticket:
        """Queue a modeled copy; the bytes move when it is waited for."""
        ticket, move = super().copy(key, source, target, after), self._moves.move(key, source, target)[0]

        def copied() -> None:
            if after is not None:
                self._finish(after)
            move()

        self._real[ticket] = copied
        return ticket

    def _finish(self, ticket: Ticket) -> None:
        if (real := self._real.pop(ticket, None)) is not None:
            real()

    def wait(self, ticket: Ticket) -> float:
        """Advance the clock, then make sure that the bytes have arrived."""
        stall = super().wait(ticket)
        self._finish(ticket)
        return stall

    def cancel(self, read: Ticket, copy: Ticket | None) -> bool:
        """Take back the modeled read; the real one too, or wait until nobody writes into its slot any more."""
        if not super().cancel(read, copy):
            return False
        real = self._real.pop(read)
        if copy is not None:
            del self._real[copy]
        if not self.engine.cancel(read.key):
            with contextlib.suppress(StoreError):  # nobody wants its bytes
                real()
        return True

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()
