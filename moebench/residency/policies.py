"""Cache policies as array kernels over flat keys: who leaves when room is needed.

A policy sees events (the distinct experts one layer demands at once) and ranks candidates. It knows no bytes, no slots'
contents and no time but its own count of events; the loop and the cache replay run the same laws over the same arrays
(``moebench.residency.kernels``). No two keys share a rank (its low digits are the key itself): the order of candidates
and how a machine sorts never reach a victim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from moebench.residency import kernels
from moebench.residency.kernels import PROTECTED

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
    code: ClassVar[int]  # of the law that the compiled replay runs, for those in POLICIES

    def __init__(self, keys: int, slots: int, layers: int, *, seed: int, pools: int) -> None:
        if not (keys >= 1 and slots >= 1 and layers >= 1 and keys % layers == 0 and pools in (1, layers)):
            raise PolicyError(f"policy: keys {keys}, slots {slots}, layers {layers}, pools {pools} do not fit together")
        self.keys, self.slots, self.layers, self.seed, self.pools = keys, slots, layers, seed, pools
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self.events = 0
        self.rank = np.arange(self.keys, dtype=np.int64)
        self.whole = np.empty(0, np.int64)
        self.real = np.empty(0)

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

    code = kernels.LRU

    def _access(self, keys, hits):
        kernels.lru(keys, hits, self.events, self.rank, self.whole, self.real)


class Lfu(Policy):
    """Least frequently used, counted over the whole run whether resident or not."""

    code = kernels.LFU

    def _access(self, keys, hits):
        kernels.lfu(keys, hits, self.events, self.rank, self.whole, self.real)


class DecayedLfu(Policy):
    """Frequency that halves every ``half_life`` steps; a step is one event of each layer: in decoding, one token."""

    OPTIONS: ClassVar[dict[str, Any]] = {"half_life": 16.0}
    code = kernels.DECAYED_LFU

    def __init__(self, keys, slots, layers, *, seed, pools, half_life):
        if not half_life > 0:
            raise PolicyError(f"decayed_lfu: half_life must be above 0 steps, got {half_life}")
        # 40 bits, so that the last digit of a machine's power function cannot reach a victim
        self.growth = round(2.0 ** (1.0 / (half_life * layers)) * 2**40) / 2**40
        super().__init__(keys, slots, layers, seed=seed, pools=pools)

    def reset(self):
        super().reset()
        self.whole = np.array([~((1 << self.keys.bit_length()) - 1)])
        self.real = np.concatenate([[1.0, self.growth], np.zeros(self.keys)])

    def _access(self, keys, hits):
        kernels.decayed_lfu(keys, hits, self.events, self.rank, self.whole, self.real)


class Slru(Policy):
    """Segmented LRU: a hit promotes to the protected segment (a share of the slots); its oldest fall back to probation.

    A key that left the cache while protected keeps its place in the segment until it comes back or falls out as oldest.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"protected": 0.8}
    code = kernels.SLRU

    def __init__(self, keys, slots, layers, *, seed, pools, protected):
        if not 0 < protected < 1:
            raise PolicyError(f"slru: protected must lie between 0 and 1, got {protected}")
        self.limit = int(protected * (slots // pools))
        super().__init__(keys, slots, layers, seed=seed, pools=pools)

    def reset(self):
        super().reset()
        size = 2 * (self.limit + self.keys // self.layers)  # room for many events before stale entries are cleared
        head = np.concatenate([[self.pools, self.limit, size], np.full(self.keys, -1)])
        self.whole = np.concatenate([head, np.zeros(self.pools * (3 + size), np.int64)])

    def _access(self, keys, hits):
        kernels.slru(keys, np.asarray(hits, dtype=bool), self.events, self.rank, self.whole, self.real)

    def check_integrity(self):
        super().check_integrity()
        protected = self.whole[3 : 3 + self.keys] >= 0
        if (protected.reshape(self.pools, -1).sum(axis=1) > self.limit).any():
            raise PolicyError(f"slru: a protected segment exceeds {self.limit} keys")
        if (protected != (self.rank >= PROTECTED)).any():
            raise PolicyError("slru: ranks and segments disagree")


class Random(Policy):
    """Any candidate is as likely as any other, drawn anew at each event from the seed."""

    code = kernels.RANDOM

    def reset(self):
        super().reset()
        self.draws = np.random.PCG64(self.seed)
        self.salt = np.uint64(0)

    def salts(self, events: int) -> np.ndarray:
        """What the ranks of the next events are drawn from, uint64 [events]."""
        return self.draws.random_raw(events)

    def _access(self, keys, hits):
        self.salt = self.salts(1)[0]

    def _ranks(self, candidates):
        return kernels.scattered(candidates, self.salt)


class Belady(Policy):
    """Farthest next use leaves first; needs ``future``, the keys of each event to come, in order. Every key is kept.

    ``future`` is a sequence of arrays, or the pair of all keys in one array and of where events begin and end in it.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"future": None}
    code = kernels.BELADY

    def __init__(self, keys, slots, layers, *, seed, pools, future):
        if future is None:
            raise PolicyError("belady needs the future: future=<a sequence of arrays, the distinct keys of each event>")
        if isinstance(future, tuple):
            flat, lengths = future[0], np.diff(future[1])
        else:
            future = [event for event in future if len(event)]
            flat = np.concatenate([np.empty(0, np.int64), *future]).astype(np.int64)
            lengths = np.array([len(event) for event in future], np.int64)
        if len(flat) and not 0 <= flat.min() <= flat.max() < keys:
            raise PolicyError(f"belady: the future holds keys outside 0..{keys - 1}")
        # Per key its events in ascending order, closed by NEVER. Short integers are sorted by their digits.
        order = np.argsort(flat.astype(np.uint16) if keys <= 1 << 16 else flat, kind="stable")
        counts = np.bincount(flat, minlength=keys)
        ends = np.cumsum(counts)
        event = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        uses = np.insert(event[order], ends, NEVER)
        self.schedule = np.concatenate([keys + ends - counts + np.arange(keys), uses])
        super().__init__(keys, slots, layers, seed=seed, pools=pools)

    def reset(self):
        super().reset()
        self.whole = self.schedule.copy()
        self.rank -= self.whole[self.whole[: self.keys]] * self.keys

    def _access(self, keys, hits):
        if (self.next_use(keys) != self.events).any():
            raise PolicyError(f"{type(self).__name__.lower()}: event {self.events} is not the one its future foretold")
        kernels.belady(keys, hits, self.events, self.rank, self.whole, self.real)

    def next_use(self, keys: np.ndarray) -> np.ndarray:
        """The event, counted from 1, that will next use each key; ``NEVER`` if none will."""
        return self.whole[self.whole[keys]]


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
