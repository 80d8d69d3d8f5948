"""A device with memory of its own: its slots, its streams, and the one rule by which work on slots waits for other.

Work is issued on streams and done later, in the order of each stream. What reads or writes a slot waits for the work
before it that wrote there, what writes also for all that still reads, and for nothing else: experts are computed on as
they arrive, and a slot is filled anew behind the compute that read it. The host waits by the same rule. Knows no tensor
library; ``moebench.backends.torch_cuda`` is the device that CUDA drives.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Place = tuple[str, int]  # a tier's name and a slot's number
DEVICE = "device"  # the tier whose slots lie in the device's memory; those of all others lie in the host's


class Event(ABC):
    """A point in the work of one stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the stream has come so far; raises what went wrong on the way."""


class Stream(ABC):
    """Work that is done in the order in which it was issued, beside that of other streams."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Issue what ``work`` does to the device behind all that was issued before; never waits for the device."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What is issued from now on is done after ``event``."""

    @abstractmethod
    def record(self) -> Event:
        """The point behind all that was issued so far."""

    @abstractmethod
    def join(self) -> None:
        """What the caller itself has the device do from now on is done after all that was issued so far."""


class Device(ABC):
    """Memory, copies and three streams: copies up, copies down, and the one that the model computes on."""

    up: Stream
    down: Stream
    compute: Stream

    @abstractmethod
    def pin(self, array: np.ndarray) -> None:
        """Lock the pages of a host array (uint8, page-aligned), so that copies to and from it run beside the host."""

    @abstractmethod
    def unpin(self, array: np.ndarray) -> None:
        """Unlock what ``pin`` locked."""

    @abstractmethod
    def allocate(self, count: int, nbytes: int) -> Any:
        """Memory of the device for ``count`` slots: indexing gives the device's own array of ``nbytes`` bytes."""

    @abstractmethod
    def upload(self, source: np.ndarray, target: Any) -> None:
        """Copy host bytes (uint8 [n]) to the start of a slot's array, on the stream that runs."""

    @abstractmethod
    def download(self, source: Any, target: np.ndarray) -> None:
        """Copy the start of a slot's array to host bytes (uint8 [n]), on the stream that runs."""

    @abstractmethod
    def decode(self, stored: np.ndarray, target: Any, decoded: np.ndarray) -> None:
        """Decode a stored expert (uint8) into a slot's array, on the stream that runs, and bring it back to
        ``decoded`` (uint8, the expert's length) to be checked; waits for that. ``StoreError`` where it is damaged.
        """


@dataclass(eq=False)
class Slot:
    """One slot of the device tier: its bytes as the device's own array, and what was made of them once."""

    slots: DeviceSlots
    place: Place
    data: Any
    views: dict[Any, Any] = field(default_factory=dict)

    def compute(self, work: Callable[[], None]) -> None:
        """Compute on the slot's bytes as soon as they are there; they stay until that is done."""
        self.slots.issue(self.slots.device.compute, work, reads=(self.place,))


class DeviceSlots:
    """The slots of one run, on the device and on the host, and what work on them waits for. ``close`` frees them."""

    def __init__(self, device: Device, allocate: Callable[[int], np.ndarray]) -> None:
        self.device, self._allocate = device, allocate
        self.tiers: dict[str, Any] = {}
        self._pinned: list[np.ndarray] = []
        self._lock = threading.Lock()
        self._written: dict[Place, tuple[Stream, Event]] = {}
        self._read: dict[Place, dict[Stream, Event]] = {}  # of each stream the last, which comes after its others

    def tier(self, name: str, count: int, nbytes: int) -> Any:
        """The slots of one tier: a list of ``Slot`` on the device, page-locked uint8 [count, nbytes] on the host."""
        if name == DEVICE:
            arrays = self.device.allocate(count, nbytes)
            self.tiers[name] = [Slot(self, (name, index), arrays[index]) for index in range(count)]
        else:
            array = self._allocate(count * nbytes)
            self.device.pin(array)
            self._pinned.append(array)
            self.tiers[name] = array.reshape(count, nbytes)
        return self.tiers[name]

    def issue(
        self, stream: Stream, work: Callable[[], None], reads: Sequence[Place] = (), writes: Sequence[Place] = ()
    ) -> Event:
        """Issue work that reads and writes slots, behind what it depends on; returns its end."""
        with self._lock:
            for before in self._before(reads, writes):
                self._order(stream, *before)
        stream.run(work)
        with self._lock:
            event = stream.record()
            for place in reads:
                self._read.setdefault(place, {})[stream] = event
            for place in writes:
                self._written[place] = (stream, event)
                self._read.pop(place, None)
        return event

    def _before(self, reads: Sequence[Place], writes: Sequence[Place]) -> list[tuple[Stream, Event]]:
        """What work on these slots comes after."""
        found = [self._written[place] for place in (*reads, *writes) if place in self._written]
        return found + [read for place in writes for read in self._read.get(place, {}).items()]

    def _order(self, stream: Stream, other: Stream, event: Event) -> None:
        if other is not stream:  # its own work is in order anyway
            stream.wait(event)

    def host_writes(self, places: Iterable[Place]) -> None:
        """The host is about to write into slots: wait until nothing that was issued reads or writes them any more."""
        for place in places:
            with self._lock:
                before = self._before((), (place,))
                self._read.pop(place, None)
                self._written.pop(place, None)
            self._synchronize(before)

    def _synchronize(self, before: Iterable[tuple[Stream, Event]]) -> None:
        for _, event in before:
            event.synchronize()

    def upload(self, source: Place, target: Place, nbytes: int) -> None:
        """Issue the copy of ``nbytes`` of a host slot, whose bytes have arrived, into a device slot."""
        data, slot = self._bytes(source, nbytes), self.tiers[DEVICE][target[1]].data
        self.issue(self.device.up, lambda: self.device.upload(data, slot), (source,), (target,))

    def download(self, source: Place, target: Place, nbytes: int) -> None:
        """Copy ``nbytes`` of a device slot into a host slot, and wait for them."""
        data, slot = self._bytes(target, nbytes), self.tiers[DEVICE][source[1]].data
        self.issue(self.device.down, lambda: self.device.download(slot, data), (source,), (target,)).synchronize()

    def decode(self, source: Place, target: Place, stored_bytes: int, decoded: np.ndarray) -> None:
        """Decode a host slot's stored bytes into a device slot, and wait for what it says of itself in ``decoded``."""
        data, slot = self._bytes(source, stored_bytes), self.tiers[DEVICE][target[1]].data
        self.issue(self.device.up, lambda: self.device.decode(data, slot, decoded), (source,), (target,)).synchronize()

    def _bytes(self, place: Place, nbytes: int) -> np.ndarray:
        return self.tiers[place[0]][place[1]][:nbytes]

    def close(self) -> None:
        """Wait for all that was issued, then free the device's memory and unlock the host's; safe to call twice."""
        with self._lock:
            last = [*self._written.values(), *(read for reads in self._read.values() for read in reads.items())]
            self._written, self._read = {}, {}
        try:
            self._synchronize(last)
        finally:
            for slot in self.tiers.get(DEVICE, ()):
                slot.data, slot.views = None, {}
            while self._pinned:
                self.device.unpin(self._pinned.pop())
