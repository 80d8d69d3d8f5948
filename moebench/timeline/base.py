"""The contract of time: one interface for a clock that measures and a clock that models.

The loop asks for reads, copies and compute and waits on tickets; a ``WallTimeline`` does the work, a
``VirtualTimeline`` works out when it would be done. Knows nothing of what an expert means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

DEMAND, PREFETCH = 0, 1
PARTS = ("compute", "stall", "copy", "decode", "overhead")  # what the loop's time goes to
COMPUTE, STALL, COPY, DECODE, OVERHEAD = range(len(PARTS))
LANES = ("compute", "storage", "link", "decoder", "host", "wait", "host experts")  # where a log puts what happens
UNIT, STORAGE, LINK, DECODER, HOST, WAIT, ON_HOST = range(len(LANES))
WAITS = {STALL: "storage", COPY: "link", DECODE: "decoder"}  # what the loop waits for
LANE_OF = (UNIT, WAIT, WAIT, WAIT, HOST)  # of each part, where the loop spends it


class Ticket:
    """One transfer under way. ``key`` is the expert; the timeline that issued it knows when it is complete.

    On its way its bytes are off storage at ``landed_s``, across the link at ``linked_s`` and decoded at ``decoded_s``,
    as far as the timeline knows; on a measured clock what comes after ``landed_s`` is ``way``'s part.
    """

    __slots__ = (
        "decoded_s", "done_s", "error", "handle", "issued_s", "key", "landed_s", "linked_s", "nbytes", "priority",
        "slot", "way",
    )  # fmt: skip

    def __init__(self, key: int, nbytes: int, slot: int, priority: int, issued_s: float) -> None:
        self.key, self.nbytes, self.slot, self.priority, self.issued_s = key, nbytes, slot, priority, issued_s
        self.done_s: float | None = None  # completion time in seconds, once known
        self.landed_s = self.linked_s = self.decoded_s = 0.0
        self.way = STALL
        self.handle: Any = None  # private to the timeline
        self.error: BaseException | None = None


Event = tuple[int, str, int, float, float]


class Timeline(ABC):
    """A clock in seconds from the start of the run, with transfers that proceed beside it.

    Contract: ``now`` never goes back. A ticket is complete exactly when ``is_ready`` says so or ``wait`` has returned;
    its bytes may be read only then. A demand read is served before prefetch reads that were issued earlier. ``wait``
    raises what went wrong with the transfer, and then the slot holds nothing usable.

    ``spent`` are the seconds so far by PARTS; a measured clock leaves overhead to whoever knows the whole. While
    ``log`` is a list, what happens is appended to it: (lane, what, key or count, begin, end), in seconds.
    """

    clock: str  # "wall" or "virtual"
    spent: list[float]
    log: list[Event] | None = None

    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began."""

    @abstractmethod
    def read(
        self, keys: Sequence[int], slots: Sequence[int], tier: str, priority: int, together: Sequence[int] = ()
    ) -> list[Ticket]:
        """Start reading whole experts from storage into slots of ``tier``, in this order; never blocks.

        ``together`` cuts ``keys`` into runs of so many neighbours each, ascending by place, that one request reads with
        the gaps between them; empty: each expert is a request of its own.
        """

    @abstractmethod
    def copy(self, key: int, source: tuple[str, int], target: tuple[str, int], after: Ticket | None) -> Ticket:
        """Start copying one expert between tiers, given as (tier name, slot), once ``after`` is complete; never
        blocks.
        """

    @abstractmethod
    def is_ready(self, ticket: Ticket) -> bool:
        """Whether the transfer is complete at ``now``, without waiting."""

    @abstractmethod
    def promote(self, ticket: Ticket) -> None:
        """Give a prefetch the priority of demand: the loop is about to wait for it."""

    @abstractmethod
    def cancel(self, read: Ticket, copy: Ticket | None) -> bool:
        """Take back a prefetch that storage has not begun, and the ``copy`` that waits for it.

        True if nothing of it was or will be read: its slots may be reused. False if it goes on.
        """

    @abstractmethod
    def wait(self, ticket: Ticket) -> float:
        """Wait for one transfer; returns the seconds stalled. Raises the transfer's own error."""

    @abstractmethod
    def compute_experts(self, count: int, rows: int, overlap: bool = False) -> None:
        """``count`` experts run together over ``rows`` (row, expert) pairs: a modeled clock advances to their end, a
        measured one does nothing. With ``overlap`` it advances to where the next ones may be copied in beside them.
        """

    @abstractmethod
    def busy_s(self) -> float:
        """Seconds for which what was handed over with ``overlap`` will go on computing."""

    @abstractmethod
    def remaining_s(self, ticket: Ticket) -> float | None:
        """Seconds until the transfer is complete, without waiting; None where nobody knows."""

    @abstractmethod
    def stage_s(self, count: int, rows: int) -> tuple[float, float]:
        """Seconds to copy ``count`` experts into the chip, and to compute them over ``rows`` pairs; 0 where unknown."""

    @abstractmethod
    def compute_on_host(self, source: Ticket | None, count: int, rows: int) -> None:
        """``count`` experts run on the host's own processor beside the device, from when ``source`` is complete."""

    @abstractmethod
    def join(self) -> None:
        """Whatever still computes, on the device or on the host's processor, is complete."""

    @abstractmethod
    def compute_dense(self, layers: int, rows: int, state_bytes: int, final: bool) -> None:
        """Attention and all else of ``layers`` layers ran over ``rows`` rows and ``state_bytes`` of cache and recurrent
        state (over all layers of the model); ``final`` adds the head.
        """

    @abstractmethod
    def host_sync(self) -> None:
        """The host read back a routing decision from the device."""

    @abstractmethod
    def system_work(self, nbytes: int, syncs: int) -> None:
        """A system streamed ``nbytes`` for work of its own, and the host waited ``syncs`` times for the result."""

    def hooked(self, calls: int) -> None:  # noqa: B027 - a measured clock has it in its time
        """The system's hooks were called ``calls`` times so far."""

    def close(self) -> None:  # noqa: B027 - nothing to release by default
        """Release threads and files."""
