"""Cache policies as array kernels over flat keys: who leaves when room is needed.

A policy sees events (the distinct experts one layer demands at once) and ranks candidates. It knows no bytes, no slots'
contents and no time but its own count of events; the loop and the cache replay drive the same objects. No two keys
share a rank (its low digits are the key itself): the order of candidates and how a machine sorts never reach a victim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

PROTECTED = 1 << 62
FEW = 16
LAST = np.iinfo(np.int64).max
NEVER = 1 << 40  # later than any event


class PolicyError(ValueError):
    """A policy name, option or access that is not valid."""


class Policy:
    """Ranks ``keys`` flat keys; the lowest ``rank`` leaves first, ties go to the lowest key.

    Contract: ``access`` is called once per event, with distinct keys, before victims are asked for that event;
    ``hits[i]`` says whether key ``i`` was resident. ``victims`` changes nothing. ``bypass`` policies may be offered the
    missing keys themselves as candidates; one that is chosen is used from a temporary slot and not kept.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {}
    bypass = False

    def __init__(self, keys: int, slots: int, layers: int, *, seed: int, pools: int) -> None:
        if not (keys >= 1 and slots >= 1 and layers >= 1 and keys % layers == 0 and pools in (1, layers)):
            raise PolicyError(f"policy: keys {keys}, slots {slots}, layers {layers}, pools {pools} do not fit together")
        self.keys, self.slots, self.layers, self.seed, self.pools = keys, slots, layers, seed, pools
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self.events = 0
        self.rank = np.arange(self.keys, dtype=np.int64)

    def begin_request(self) -> None:
        """Another request begins: what a policy counts within requests starts anew; what is resident stays."""

    def access(self, keys: Sequence[int] | np.ndarray, hits: Sequence[bool] | np.ndarray) -> None:
        """Take note of one event; an event without keys is none."""
        if len(keys):
            self.events += 1
            self._access(np.asarray(keys, dtype=np.int64), hits)

    def _access(self, keys: np.ndarray, hits: Sequence[bool] | np.ndarray) -> None:
        raise NotImplementedError

    def _ranks(self, candidates: np.ndarray) -> np.ndarray:
        return self.rank[candidates]

    def victims(self, candidates: np.ndarray, need: int) -> np.ndarray:
        """The ``need`` worst of the candidates, worst first; pure."""
        if not 0 <= need <= len(candidates):
            raise PolicyError(f"policy: {need} victims wanted of {len(candidates)} candidates")
        ranks = self._ranks(candidates)
        if need <= FEW:  # repeated minima beat a partition
            chosen = []
            for _ in range(need):
                chosen.append(at := int(ranks.argmin()))
                ranks[at] = LAST
            return candidates[chosen]
        return candidates[ranks.argsort()[:need]]

    def check_integrity(self) -> None:
        """Raise ``PolicyError`` unless every key has a rank of its own."""
        if len(np.unique(self._ranks(np.arange(self.keys)))) != self.keys:
            raise PolicyError(f"{type(self).__name__}: two keys share a rank")


class Lru(Policy):
    """Least recently used; the keys of one event are equally recent."""

    def _access(self, keys, hits):
        self.rank[keys] = keys + self.events * self.keys


class Lfu(Policy):
    """Least frequently used, counted over the whole run whether resident or not."""

    def _access(self, keys, hits):
        self.rank[keys] += self.keys


class DecayedLfu(Policy):
    """Frequency that halves every ``half_life`` steps; a step is one event of each layer: in decoding, one token."""

    OPTIONS: ClassVar[dict[str, Any]] = {"half_life": 16.0}

    def __init__(self, keys, slots, layers, *, seed, pools, half_life):
        if not half_life > 0:
            raise PolicyError(f"decayed_lfu: half_life must be above 0 steps, got {half_life}")
        # 40 bits, so that the last digit of a machine's power function cannot reach a victim
        self.growth = round(2.0 ** (1.0 / (half_life * layers)) * 2**40) / 2**40
        self.low = (1 << keys.bit_length()) - 1
        super().__init__(keys, slots, layers, seed=seed, pools=pools)

    def reset(self):
        super().reset()
        self.weight = 1.0
        self.score = np.zeros(self.keys)

    def _access(self, keys, hits):
        # Old scores stay as they are and a new access weighs more: the order is that of decayed scores.
        self.weight *= self.growth
        if self.weight > 2.0**512:
            self.weight *= 2.0**-512
            self.score *= 2.0**-512
            self.rank = self._packed(self.score, np.arange(self.keys))
        self.score[keys] = fresh = self.score[keys] + self.weight
        self.rank[keys] = self._packed(fresh, keys)

    def _packed(self, score: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Non-negative floats order as their bits do; the key takes the place of the lowest bits."""
        return score.view(np.int64) & ~self.low | keys


class Slru(Policy):
    """Segmented LRU: a hit promotes to the protected segment (a share of the slots); its oldest fall back to probation.

    A key that left the cache while protected keeps its place in the segment until it comes back or falls out as oldest.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"protected": 0.8}

    def __init__(self, keys, slots, layers, *, seed, pools, protected):
        if not 0 < protected < 1:
            raise PolicyError(f"slru: protected must lie between 0 and 1, got {protected}")
        self.limit = int(protected * (slots // pools))
        super().__init__(keys, slots, layers, seed=seed, pools=pools)

    def reset(self):
        super().reset()
        self.segments: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(self.pools)]

    def _access(self, keys, hits):
        fresh = keys + self.events * self.keys
        segment = self.segments[int(keys[0]) * self.pools // self.keys]
        promoted = np.asarray(hits, dtype=bool)
        self.rank[keys] = np.where(promoted, fresh + PROTECTED, fresh)
        for key, hit in zip(keys.tolist(), promoted.tolist(), strict=True):
            segment.pop(key, None)
            if hit:
                segment[key] = None
        while len(segment) > self.limit:
            key, _ = segment.popitem(last=False)
            self.rank[key] = key + self.events * self.keys

    def check_integrity(self):
        super().check_integrity()
        protected = sorted(key for segment in self.segments for key in segment)
        if any(len(s) > self.limit for s in self.segments):
            raise PolicyError(f"slru: a protected segment exceeds {self.limit} keys")
        if protected != np.flatnonzero(self.rank >= PROTECTED).tolist():
            raise PolicyError("slru: ranks and segments disagree")


class Random(Policy):
    """Any candidate is as likely as any other, drawn anew at each event from the seed."""

    def reset(self):
        super().reset()
        self.draws = np.random.PCG64(self.seed)
        self.salt = np.uint64(0)

    def _access(self, keys, hits):
        self.salt = np.uint64(self.draws.random_raw())

    def _ranks(self, candidates):
        # A bijection on 64 bits: no two keys tie.
        x = (candidates.astype(np.uint64) ^ self.salt) * np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(32)
        x *= np.uint64(0xD6E8FEB86659FD93)
        x ^= x >> np.uint64(32)
        return x.view(np.int64)


class Belady(Policy):
    """Farthest next use leaves first; needs ``future``, the keys of each event to come, in order. Every key is kept."""

    OPTIONS: ClassVar[dict[str, Any]] = {"future": None}

    def __init__(self, keys, slots, layers, *, seed, pools, future):
        if future is None:
            raise PolicyError("belady needs the future: future=<a sequence of arrays, the distinct keys of each event>")
        future = [event for event in future if len(event)]
        flat = np.concatenate([np.empty(0, np.int64), *future]).astype(np.int64)
        if len(flat) and not 0 <= flat.min() <= flat.max() < keys:
            raise PolicyError(f"belady: the future holds keys outside 0..{keys - 1}")
        # Per key its events in ascending order, closed by NEVER.
        event = np.repeat(np.arange(1, len(future) + 1), [len(e) for e in future])
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat, minlength=keys)
        ends = np.cumsum(counts)
        self.uses = np.insert(event[order], ends, NEVER)
        self.first = ends - counts + np.arange(keys)
        super().__init__(keys, slots, layers, seed=seed, pools=pools)

    def reset(self):
        super().reset()
        self.next = self.first.copy()
        self.rank -= self.uses[self.next] * self.keys

    def _access(self, keys, hits):
        at = self.next[keys]
        if (self.uses[at] != self.events).any():
            raise PolicyError(f"{type(self).__name__.lower()}: event {self.events} is not the one its future foretold")
        self.next[keys] = at = at + 1
        self.rank[keys] = keys - self.uses[at] * self.keys

    def next_use(self, keys: np.ndarray) -> np.ndarray:
        """The event, counted from 1, that will next use each key; ``NEVER`` if none will."""
        return self.uses[self.next[keys]]


class BeladyBypass(Belady):
    """Belady that may refuse to keep a missing expert whose next use is the farthest (MIN with bypass)."""

    bypass = True


POLICIES: dict[str, type[Policy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "decayed_lfu": DecayedLfu,
    "slru": Slru,
    "random": Random,
    "belady": Belady,
    "belady_bypass": BeladyBypass,
}
CAUSAL = ("lru", "lfu", "decayed_lfu", "slru", "random")


def make_policy(
    name: str, keys: int, slots: int, layers: int, *, seed: int = 0, pools: int = 1, **options: Any
) -> Policy:
    """Build a policy for ``slots`` slots in all, shared (``pools`` 1) or split by layer (``pools`` = ``layers``).

    Unknown names and options are errors that list the valid ones.
    """
    if name not in POLICIES:
        raise PolicyError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
    defaults = POLICIES[name].OPTIONS
    if unknown := set(options) - set(defaults):
        valid = ", ".join(defaults) or "none"
        raise PolicyError(f"policy {name}: unknown option {', '.join(sorted(unknown))}; valid: {valid}")
    return POLICIES[name](keys, slots, layers, seed=seed, pools=pools, **{**defaults, **options})
