"""How one expert gets from one tier to another: by copies of the host, or by the streams of a device.

Knows tiers as slots of bytes, and packs as far as they decode; knows no clock and no queue.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from moebench.backends.device import DEVICE, DeviceSlots, Place
from moebench.store.engines import ReadEngine


class Moves(ABC):
    """Moves of whole experts. What an engine that does not decode read into the host lies there as it is stored until
    it is decoded on its way up; what came down from the device lies there decoded.
    """

    def __init__(self, engine: ReadEngine) -> None:
        self._engine = engine
        self._stored: set[int] = set()

    def landing(self, keys: Sequence[int], tier: str, slots: Sequence[int]) -> float:
        """Reads into slots are about to start; returns the seconds that had to be waited for copies out of them."""
        if self._engine.coded:
            self._stored.update(keys)
        return 0.0

    def move(self, key: int, source: Place, target: Place) -> tuple[Callable[[], None], bool]:
        """What moves one expert, called when its bytes are there, and whether it decodes it.

        When it has returned the source may be dropped, and the target be used.
        """
        up = target[0] == DEVICE
        coded = up and key in self._stored
        if not up:
            self._stored.discard(key)
        how = self._decode if coded else self._up if up else self._down
        return partial(how, key, source, target), coded

    @abstractmethod
    def _up(self, key: int, source: Place, target: Place) -> None: ...

    @abstractmethod
    def _down(self, key: int, source: Place, target: Place) -> None: ...

    @abstractmethod
    def _decode(self, key: int, source: Place, target: Place) -> None: ...

    def close(self) -> None:  # noqa: B027 - nothing to release by default
        """Release what moves hold."""


class HostMoves(Moves):
    """Tiers that all lie in the host's memory; ``buffer(tier, slot)`` gives the bytes of a slot."""

    def __init__(self, engine: ReadEngine, buffer: Callable[[str, int], np.ndarray]) -> None:
        super().__init__(engine)
        self._buffer = buffer

    def _up(self, key: int, source: Place, target: Place) -> None:
        np.copyto(self._buffer(*target), self._buffer(*source))

    _down = _up

    def _decode(self, key: int, source: Place, target: Place) -> None:
        self._engine.pack.decode(key, self._buffer(*source), self._buffer(*target))


class DeviceMoves(Moves):
    """A device tier in memory of its own. A copy up is only issued: who computes on the slot, reads into its source or
    fills it anew waits for it as ``DeviceSlots`` says. A copy down and a decoded expert are there when a move returns.
    """

    def __init__(self, engine: ReadEngine, slots: DeviceSlots) -> None:
        super().__init__(engine)
        self._slots = slots

    def landing(self, keys: Sequence[int], tier: str, slots: Sequence[int]) -> float:
        """Wait for copies that still read the slots."""
        begun = time.perf_counter()
        self._slots.host_writes((tier, slot) for slot in slots)
        return super().landing(keys, tier, slots) + time.perf_counter() - begun

    def _up(self, key: int, source: Place, target: Place) -> None:
        self._slots.upload(source, target, self._engine.pack.expert_bytes)

    def _down(self, key: int, source: Place, target: Place) -> None:
        self._slots.download(source, target, self._engine.pack.expert_bytes)

    def _decode(self, key: int, source: Place, target: Place) -> None:
        pack = self._engine.pack
        decoded = np.empty(pack.expert_bytes, np.uint8)
        self._slots.decode(source, target, pack.manifest.lengths[key], decoded)
        pack.check(key, decoded)

    def close(self) -> None:
        """Free the slots."""
        self._slots.close()
