"""Who is worth a slot of the device: a score of use count and last use, and what an expert must show to get one.

Numbers by flat key. Knows no bytes, no tier and no time but its own count of events.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from moebench.residency.policies import Policy, PolicyError, make_policy

RESOLUTION = 1 << 20  # steps of one doubling of the count


class FrequencyRecency(Policy):
    """log2(uses) + last use / half_life: an expert idle for ``half_life`` tokens is worth half as many uses.

    The order is that of uses * 2^(-age / half_life); the age counts from a moment that all share, so a score changes
    only when its expert is used. The weights of the paper (arXiv 2609.18110, section 4.2: access count and last use)
    are not published.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"half_life": 32.0}

    def __init__(self, keys, slots, layers, *, seed, pools, half_life):
        if not half_life > 0:
            raise PolicyError(f"frequency_recency: half_life must be above 0 tokens, got {half_life}")
        self.horizon = half_life * layers
        super().__init__(keys, slots, layers, seed=seed, pools=pools)

    def reset(self):
        super().reset()
        self.uses = np.zeros(self.keys, np.int64)
        self._uses, self._rank = memoryview(self.uses), memoryview(self.rank)

    def _access(self, keys, hits):
        uses, rank, now = self._uses, self._rank, self.events / self.horizon
        for key in keys.tolist():  # a handful: arrays pay for code that has left the caches between two layers
            uses[key] = count = uses[key] + 1
            rank[key] = round((math.log2(count) + now) * RESOLUTION) * self.keys + key


def make_score(name: str, keys: int, slots: int, layers: int, half_life: float) -> Policy:
    """The policy of ``system.score``: frequency_recency, frequency or recency."""
    if name == "frequency_recency":
        return FrequencyRecency(keys, slots, layers, seed=0, pools=1, half_life=half_life)
    return make_policy({"frequency": "lfu", "recency": "lru"}[name], keys, slots, layers)


class Admission:
    """Which missing experts get a lasting slot of the device; the rest pass through temporary ones.

    ``slots`` less ``temporary`` are lasting. While one is free it goes to the best; after that an expert must have been
    used ``promote_after`` times and score above what it would push out. ``lasting`` bool [keys]: who may stay at all.
    """

    def __init__(self, policy: Policy, slots: int, temporary: int, promote_after: int, lasting: np.ndarray) -> None:
        self.policy, self.lasting, self.promote_after = policy, lasting, promote_after
        self._all_last = bool(lasting.all())
        self.capacity = max(0, slots - temporary)
        self.uses = np.zeros(policy.keys, np.int64)
        self.kept = np.zeros(policy.keys, bool)
        self._uses, self._kept, self._rank = memoryview(self.uses), memoryview(self.kept), memoryview(policy.rank)
        self._count = 0  # of those kept
        self._heap: list[tuple[int, int]] = []  # ranks as they were when noted, and keys, each at most once
        self._listed = bytearray(policy.keys)

    def used(self, keys: Sequence[int]) -> None:
        """One demand."""
        for key in keys:
            self._uses[key] += 1

    def left(self, victims: Sequence[int]) -> None:
        """Experts gave up their slots on the device."""
        for key in victims:
            self._count -= self._kept[key]
            self._kept[key] = False

    def earned(self, missing: Sequence[int]) -> list[bool]:
        """Whether each missing key stays. The best candidate is held against the worst expert kept."""
        self.left(missing)  # a transfer of an earlier demand may have failed
        rank, uses = self._rank, self._uses
        order = sorted(missing, key=rank.__getitem__, reverse=True)
        if not self._all_last:
            order = [key for key in order if self.lasting[key]]
        room = self.capacity - self._count
        keep = order[: max(0, room)]
        if rest := [key for key in order[len(keep) :] if uses[key] >= self.promote_after]:
            worst = self._lowest(max(0, -room) + len(rest))[max(0, -room) :]
            keep += [key for key, least in zip(rest, worst, strict=False) if rank[key] > least]
        for key in keep:
            self._kept[key] = True
            if not self._listed[key]:
                self._listed[key] = True
                heapq.heappush(self._heap, (rank[key], key))
        self._count += len(keep)
        return [self._kept[key] for key in missing]

    def _lowest(self, count: int) -> list[int]:
        """The ``count`` lowest ranks of those kept, ascending. A rank only grows, so one that grew is put right when it
        is met, and what a layer costs does not grow with the slots.
        """
        heap, rank, found = self._heap, self._rank, []
        while heap and len(found) < count:
            noted, key = heap[0]
            if not self._kept[key]:
                heapq.heappop(heap)
                self._listed[key] = False
            elif (now := rank[key]) != noted:
                heapq.heapreplace(heap, (now, key))
            else:
                found.append(heapq.heappop(heap))
        for entry in found:
            heapq.heappush(heap, entry)
        return [noted for noted, _ in found]
