"""Slot sets: which experts are booked for which coming layer, so that a predicted expert is never dropped.

A layer owns slots only if its routing is a prediction. Experts that stay in a layer's set keep their slot and are not
read again; those that leave it become ordinary cached experts. Knows keys and counts; knows no bytes and no heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moebench.errors import MoebenchError, UsageError
from moebench.residency.policies import Lru
from moebench.units import human_bytes


class StagingError(MoebenchError):
    """A routed expert that is not in its layer's slot set, or a booked one that would have to leave."""


class Staging:
    """The sets booked for this step and the next, over a cache that evicts the least recently used of the others.

    ``capacity`` experts fit a layer's set; a larger set (of a batch) is not staged and its layer demands like others.
    """

    def __init__(self, layers: int, experts: int, consumers: Sequence[int], capacity: int, policy: Lru) -> None:
        self.experts, self.consumers, self.capacity, self.policy = experts, tuple(consumers), capacity, policy
        self.booked = np.zeros(layers * experts, np.int16)  # in how many sets a key is
        self.using: dict[int, np.ndarray] = {}  # by layer: the set of the step under way, ascending keys
        self.coming: dict[int, np.ndarray] = {}  # by layer: the set of the next step
        self._before: dict[int, set[int]] = {}  # by layer: the set used last
        self._waiting: list[int] = []  # booked keys that may not be under way yet
        self.sets_staged = self.sets_refused = self.newcomers = self.members = self.routed = self.found = 0

    def reset(self) -> None:
        """A new request: nothing is booked."""
        self.booked[:] = 0
        self.using, self.coming, self._before, self._waiting = {}, {}, {}, []

    def book(self, layer: int, keys: Sequence[int]) -> bool:
        """Book distinct ``keys``, ascending, for ``layer`` at the next step; False if they are too many."""
        if layer in self.coming:
            raise StagingError(f"edge0: layer {layer} was booked twice for one step")
        if len(keys) > self.capacity:
            self.sets_refused += 1
            return False
        self.coming[layer] = booked = np.asarray(keys, np.int64)
        self.booked[booked] += 1
        self.sets_staged += 1
        self.members += len(keys)
        self.newcomers += len(set(keys) - self._before.get(layer, set()))
        self._waiting += keys
        return True

    def advance(self) -> None:
        """A step begins: what was booked for it is in use. Sets that no layer came to use are given up."""
        for keys in self.using.values():
            self.booked[keys] -= 1
        self.using, self.coming = self.coming, {}

    def use(self, layer: int, keys: Sequence[int]) -> None:
        """``layer`` demands ``keys``: all must be in its set, which then becomes ordinary cache."""
        staged = self.using.pop(layer, None)
        if staged is None:
            return
        held = set(staged.tolist())
        missing = [key for key in keys if key not in held]
        self.routed += len(keys)
        self.found += len(keys) - len(missing)
        if missing:
            names = ", ".join(str(key - layer * self.experts) for key in missing[:4])
            raise StagingError(f"edge0: layer {layer} routes to expert {names}, not staged: it would be dropped")
        self.booked[staged] -= 1
        self._before[layer] = held

    def victims(self, candidates: np.ndarray, need: int) -> np.ndarray:
        """At most ``need`` least recently used candidates that no set holds."""
        free = candidates[self.booked[candidates] == 0]
        return self.policy.victims(free, min(need, len(free)))

    def waiting(self, view: Any) -> list[int] | None:
        """Booked keys that are neither resident nor on their way, in the order in which they were booked."""
        if not self._waiting:
            return None
        keys = np.array(self._waiting)
        under_way = view.resident(keys) | view.in_flight(keys)
        self._waiting = keys[(self.booked[keys] > 0) & ~under_way].tolist()
        return self._waiting or None

    def check_integrity(self) -> None:
        """Raise unless the bookings are those of the sets, and no set is larger than its capacity."""
        count = np.zeros_like(self.booked)
        for held in (self.using, self.coming):
            for layer, keys in held.items():
                if layer not in self.consumers or len(keys) > self.capacity or (keys // self.experts != layer).any():
                    raise StagingError(f"edge0: the set of layer {layer} is not one it may own")
                count[keys] += 1
        if not np.array_equal(count, self.booked):
            raise StagingError("edge0: bookings and sets disagree")


def capacity(
    slots: int,
    scope: str,
    layers: int,
    experts: int,
    consumers: int,
    top_k: int,
    batch: int,
    ahead: int,
    slot_bytes: int,
) -> int:
    """Experts a layer's set may hold: what a batch can choose at most, as far as the slots allow.

    So many slots stay free of bookings as a layer that routes by itself may demand; ``ahead`` sets (0 or 1) are booked
    beside those in use. A budget that cannot stage a single sequence is a ``UsageError``; a batch that needs more than
    the slots hold is not staged (its sets exceed 0).
    """

    def room(rows: int) -> int:
        demand = min(experts, rows * top_k)
        if scope == "per_layer":
            return min(demand, slots // layers - demand * ahead)
        return min(demand, (slots - demand) // (consumers + ahead))

    if room(1) < top_k:
        needed = layers * top_k * (1 + ahead) if scope == "per_layer" else top_k * (consumers + ahead + 1)
        raise UsageError(
            f"edge0 books {top_k} experts for each of {consumers} layers{' and one set more' if ahead else ''}, and"
            f" {top_k} slots for demand: {needed} slots, the budget gives {slots}; it takes"
            f" budget={needed * slot_bytes}B ({human_bytes(needed * slot_bytes)}) and what the engine stages"
        )
    return max(0, room(batch))
