"""A tier: an arena of equal slots that hold whole experts, shared by all layers or split between them.

State lives in plain arrays that Python indexes fast and numpy sees whole. Knows bytes, keys and leases; knows no
tensors, no clock and no policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from moebench.residency.ledger import BudgetError

FREE, READY, LEASED, IN_FLIGHT = 0, 1, 2, 3
SCOPES = ("shared", "per_layer")


class Tier:
    """``slots`` slots of ``slot_bytes`` bytes for ``layers * experts`` keys.

    A slot is free, ready (holds an expert nobody uses), leased (in use: never a victim) or in flight (being filled:
    neither usable nor a victim). With ``scope="per_layer"`` each layer owns an equal run of slots. ``arena`` is a uint8
    array [slots, slot_bytes] on runs that move real bytes, else None, and ``rows`` are its slots, each the same object
    whenever it is asked for.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        slot_bytes: int,
        layers: int,
        experts: int,
        scope: str = "shared",
        arena: np.ndarray | None = None,
    ) -> None:
        if scope not in SCOPES:
            raise ValueError(f"scope {scope!r} is not one of {', '.join(SCOPES)}")
        groups = layers if scope == "per_layer" else 1
        if slots < groups:
            raise BudgetError(f"tier {name}: {slots} slots cannot be split between {layers} layers")
        self.name, self.slot_bytes, self.scope, self.arena = name, slot_bytes, scope, arena
        self.rows: list[np.ndarray] | None = None if arena is None else [*arena]
        self.layers, self.experts = layers, experts
        self.group_slots = slots // groups
        self.slots = self.group_slots * groups
        self._slot_of = array("i", [-1]) * (layers * experts)
        self._key_of = array("q", [-1]) * self.slots
        self._state = bytearray(self.slots)
        self.slot_of = np.frombuffer(self._slot_of, np.int32)
        self.key_of = np.frombuffer(self._key_of, np.int64)
        self.state = np.frombuffer(self._state, np.uint8)
        self._free = [list(range((g + 1) * self.group_slots - 1, g * self.group_slots - 1, -1)) for g in range(groups)]

    def __contains__(self, key: int) -> bool:
        return self._slot_of[key] >= 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.slots * self.slot_bytes

    def _group(self, layer: int) -> int:
        return layer if self.scope == "per_layer" else 0

    def slot(self, key: int) -> int:
        """The slot that holds or will hold ``key``, or -1."""
        return self._slot_of[key]

    def is_in_flight(self, key: int) -> bool:
        """Whether ``key`` owns a slot that is still being filled."""
        slot = self._slot_of[key]
        return slot >= 0 and self._state[slot] == IN_FLIGHT

    def free_slots(self, layer: int) -> int:
        """Free slots that an expert of ``layer`` may take."""
        return len(self._free[self._group(layer)])

    def evictable(self, layer: int) -> np.ndarray:
        """Keys (int64) whose slots an expert of ``layer`` could take over: ready, not leased, not in flight."""
        if self.scope == "shared":
            return self.key_of[self.state == READY]
        low = self._group(layer) * self.group_slots
        window = slice(low, low + self.group_slots)
        return self.key_of[window][self.state[window] == READY]

    def may_leave(self, keys: Iterable[int], layer: int) -> bool:
        """Whether all ``keys`` are among ``evictable(layer)``."""
        group = self._group(layer)
        slots = [self._slot_of[k] if 0 <= k < len(self._slot_of) else -1 for k in keys]
        return all(s >= 0 and self._state[s] == READY and s // self.group_slots == group for s in slots)

    def take(self, key: int) -> int:
        """Give ``key`` a free slot, in flight until ``complete``; raises if none is free."""
        if self._slot_of[key] >= 0:
            raise AssertionError(f"tier {self.name}: key {key} already owns slot {self._slot_of[key]}")
        free = self._free[self._group(key // self.experts)]
        if not free:
            raise BudgetError(f"tier {self.name}: no free slot for key {key}")
        slot = free.pop()
        self._slot_of[key], self._key_of[slot], self._state[slot] = slot, key, IN_FLIGHT
        return slot

    def complete(self, key: int) -> None:
        """The expert's bytes have arrived: in flight becomes ready."""
        self._state[self._slot_of[key]] = READY

    def lease(self, keys: Iterable[int]) -> None:
        """Protect ready experts from eviction until ``release``."""
        for key in keys:
            slot = self._slot_of[key]
            if slot < 0:
                raise AssertionError(f"tier {self.name}: key {key} is not resident and cannot be leased")
            self._state[slot] = LEASED

    def release(self, keys: Iterable[int]) -> None:
        """End the leases of ``keys``."""
        for key in keys:
            self._state[self._slot_of[key]] = READY

    def drop(self, keys: Iterable[int]) -> None:
        """Forget experts and free their slots; a leased expert is never dropped."""
        for key in keys:
            slot = self._slot_of[key]
            if slot < 0 or self._state[slot] == LEASED:
                raise AssertionError(f"tier {self.name}: key {key} is {'leased' if slot >= 0 else 'not resident'}")
            self._free[self._group(key // self.experts)].append(slot)
            self._slot_of[key], self._key_of[slot], self._state[slot] = -1, -1, FREE

    def buffer(self, slot: int) -> np.ndarray:
        """The bytes of one slot (uint8 [slot_bytes]); only on tiers with an arena."""
        if self.rows is None:
            raise AssertionError(f"tier {self.name} has no arena")
        return self.rows[slot]

    def resident(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """Per key (bool): complete in this tier."""
        slots = self.slot_of[np.asarray(keys, np.int64)]
        return (slots >= 0) & (self.state[slots] != IN_FLIGHT)

    def check_integrity(self) -> None:
        """Raise unless slots and keys are one to one and free lists hold exactly the free slots."""
        held = np.flatnonzero(self.slot_of >= 0)
        slots = self.slot_of[held]
        if len(set(slots.tolist())) != len(slots) or not np.array_equal(self.key_of[slots], held):
            raise AssertionError(f"tier {self.name}: key and slot maps disagree")
        free = sorted(s for group in self._free for s in group)
        if free != np.flatnonzero(self.state == FREE).tolist() or len(free) + len(held) != self.slots:
            raise AssertionError(f"tier {self.name}: free list and slot states disagree")
