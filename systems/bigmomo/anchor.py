"""Which two experts of a layer should change places on flash: the paper's anchor regions and its benefit test.

Pure arithmetic on sets of experts and their slots (arXiv 2609.14643, section 4.3). Knows no file, no clock and no run.
A *round* is one window's reads of one layer; its *anchor region* is the run of as many slots as it read experts that
holds most of them, ties to the lowest; it costs one request for the region and one for each expert outside it. A swap
leaves the region's size as it is, so that the seconds it gains are the requests it saves times the time of one expert:
the benefit test is exact in whole requests, whatever the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moebench.errors import UsageError


class Swap(NamedTuple):
    """Two experts of one layer to exchange, and how many requests the remembered rounds would save by it."""

    needed: int  # the expert outside the anchor region that the last round read
    idle: int  # the expert inside it that it did not read
    saved: int


class Rounds:
    """Per layer the experts that each of the last ``rounds`` rounds read from flash together (the hyper-edges M_k)."""

    def __init__(self, layers: int, experts: int, rounds: int) -> None:
        if rounds < 1:
            raise ValueError(f"bigmomo: at least one round must be remembered, got {rounds}")
        self._sets = np.zeros((layers, rounds, experts), bool)

    def add(self, layer: int, experts: Sequence[int] | np.ndarray) -> None:
        """Remember what a round read (ids within the layer); a round that read nothing is none."""
        if len(experts):
            kept = self._sets[layer]
            kept[:-1] = kept[1:]
            kept[-1] = False
            kept[-1, np.asarray(experts)] = True

    def of(self, layer: int) -> np.ndarray:
        """Sets of one layer, bool [rounds so far, experts], oldest first."""
        kept = self._sets[layer]
        return kept[kept.any(1)]


def slots_of(position: np.ndarray) -> np.ndarray:
    """Slots (int64 [E], 0 to E - 1) from a layer's places on storage; its experts must stand in one run of places."""
    slots = position - position.min()
    if slots.max() >= len(slots):
        raise UsageError("bigmomo: the experts of a layer do not stand side by side on storage; use layout=packed")
    return slots


def overlaps(sets: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many of each round's experts every run of its size holds: int64 [K, E] by first slot (-1 where the run would
    pass the end), and the rounds by slot, bool [K, E].
    """
    held = np.empty_like(sets)
    held[:, slots] = sets
    count = len(slots)
    before = np.zeros((len(sets), count + 1), np.int64)
    np.cumsum(held, 1, out=before[:, 1:])
    first = np.arange(count)
    ends = first + held.sum(1, keepdims=True)
    inside = np.take_along_axis(before, np.minimum(ends, count), 1) - before[:, :-1]
    return np.where(ends <= count, inside, -1), held


def requests(sets: np.ndarray, slots: np.ndarray) -> int:
    """Flash requests of all rounds: one for the anchor region, one for each expert outside it."""
    found, held = overlaps(sets, slots)
    return int((1 + held.sum(1) - found.max(1)).sum()) if len(sets) else 0


def cost_s(sets: np.ndarray, slots: np.ndarray, slot_bytes: int, read_s: Callable[[int], float]) -> float:
    """Seconds of flash of all rounds, T = T_flash(S(A)) + sum over e outside A of T_flash(S(e)); ``read_s(nbytes)`` is
    the time of one request alone.
    """
    sizes = sets.sum(1)
    outside = requests(sets, slots) - len(sets)
    return sum(read_s(int(size) * slot_bytes) for size in sizes) + outside * read_s(slot_bytes)


def best_swap(sets: np.ndarray, slots: np.ndarray, resident: np.ndarray) -> Swap | None:
    """The swap that saves most over all rounds, or None where none saves anything.

    ``sets`` bool [K, E], newest last; ``slots`` int64 [E]; ``resident`` bool [E]: only such experts may move. Exchanges
    an expert that the newest round needed outside its anchor region with one inside that it did not need.
    """
    if not len(sets):
        return None
    found, held = overlaps(sets, slots)
    expert_at = np.argsort(slots)
    size, best, newest = held.sum(1, keepdims=True), found.max(1, keepdims=True), held[-1]
    start = int(found[-1].argmax())
    inside = np.zeros(len(slots), bool)
    inside[start : start + int(size[-1, 0])] = True
    may_move = resident[expert_at]
    outer, inner = np.flatnonzero(newest & ~inside & may_move), np.flatnonzero(~newest & inside & may_move)
    if not len(outer) or not len(inner):
        return None
    a, b = np.repeat(outer, len(inner)), np.tile(inner, len(outer))
    saved = _saved(found, held, size, best, a, b)
    top = int(saved.argmax())
    return Swap(int(expert_at[a[top]]), int(expert_at[b[top]]), int(saved[top])) if saved[top] > 0 else None


def _saved(found, held, size, best, a, b) -> np.ndarray:
    """Requests that exchanging slots ``a`` and ``b`` (int [P]) saves over all rounds, int64 [P].

    In a round that needs exactly one of the two, every run that holds only the slot that gains it grows by one, every
    run that holds only the other shrinks by one: the best run changes by one at most, and which way follows from how
    many of the best and second-best runs hold which slot.
    """
    at_a, at_b = held[:, a], held[:, b]
    gains, loses = np.where(at_a, b, a), np.where(at_a, a, b)  # [K, P]; no matter where both or neither is needed
    low, high = np.minimum(a, b), np.maximum(a, b)
    top, near = _running(found == best), _running(found == best - 1)
    grow = _holding(top, gains, size) - _holding_both(top, low, high, size)
    shrink = _holding(top, loses, size) - _holding_both(top, low, high, size)
    grow_near = _holding(near, gains, size) - _holding_both(near, low, high, size)
    stays = (top[:, -1:] > shrink) | (grow_near > 0)
    change = np.where(grow > 0, 1, np.where(stays, 0, -1))
    return np.where(at_a != at_b, change, 0).sum(0)


def _running(chosen: np.ndarray) -> np.ndarray:
    """Number of chosen runs among the first 0, 1, ... E ones, int64 [K, E + 1]."""
    total = np.zeros((len(chosen), chosen.shape[1] + 1), np.int64)
    np.cumsum(chosen, 1, out=total[:, 1:])
    return total


def _holding(running: np.ndarray, slot: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Of the counted runs, those that hold ``slot`` [K, P]: the ones that start at most ``size`` - 1 slots before."""
    take = np.take_along_axis
    return take(running, slot + 1, 1) - take(running, np.maximum(slot - size + 1, 0), 1)


def _holding_both(running: np.ndarray, low: np.ndarray, high: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Of the counted runs, those that hold both slots."""
    first = np.minimum(np.maximum(high - size + 1, 0), low + 1)
    return running[:, low + 1] - np.take_along_axis(running, first, 1)
