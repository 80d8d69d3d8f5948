"""The policies' laws as functions over arrays, and the cache replay that is compiled around them.

Each law stands here once: Python runs it in the decode loop, numba compiles the same source for the replay. A law sees
one event (distinct ``keys`` int64 of one pool, bool ``hits``, its number from 1) and sets ``rank`` int64 [K], lowest
leaves first, no two alike; ``whole`` int64 and ``real`` float64 are its memory. It returns the keys of other experts
whose rank it changed. Knows no traces, no bytes and no time. Compiled at the first replay and then kept on disk: all
that is compiled is in this file, since it is this file that numba watches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from moebench.jit import compile_all

PROTECTED = 1 << 62
LRU, LFU, DECAYED_LFU, SLRU, RANDOM, BELADY = range(6)
HITS, EVICTIONS, REFETCHES, DECODE_REQUESTS, DECODE_HITS, LOGGED = range(6)  # what ``drive`` counts
REFETCH_STEPS = 5
SHORT = 24  # keys up to which insertion sorts faster than numpy


def lru(keys, hits, event, rank, whole, real):
    """Last use; the keys of one event are equally recent."""
    rank[keys] = keys + event * len(rank)
    return keys[:0]


def lfu(keys, hits, event, rank, whole, real):
    """Number of uses."""
    rank[keys] = rank[keys] + len(rank)
    return keys[:0]


def decayed_lfu(keys, hits, event, rank, whole, real):
    """Uses that fade: old scores stay and new uses weigh more, so the order is that of decayed scores.

    ``real``: weight of a use now, its growth per event, the scores [K]. Non-negative floats order as their bits do; the
    key takes the place of the lowest, which the mask ``whole[0]`` clears.
    """
    score, moved = real[2:], keys[:0]
    real[0] *= real[1]
    if real[0] > 2.0**512:
        real[0] *= 2.0**-512
        score[:] = score * 2.0**-512
        moved = np.arange(len(rank))
        rank[:] = (score.view(np.int64) & whole[0]) | moved
    fresh = score[keys] + real[0]
    score[keys] = fresh
    rank[keys] = (fresh.view(np.int64) & whole[0]) | keys
    return moved


def slru(keys, hits, event, rank, whole, real):
    """Last use, what was hit above what was not; beyond the limit the oldest of a pool's protected fall back.

    ``whole``: pools, limit, ring size; per key its place in its pool's ring, or -1 [K]; per pool head, tail, number of
    protected keys and the ring, oldest first, in which a key that has moved on leaves a stale entry.
    """
    total, first_key = len(rank), int(keys[0])
    pools, limit, size = int(whole[0]), int(whole[1]), int(whole[2])
    place = whole[3 : 3 + total]
    low = 3 + total + first_key * pools // total * (3 + size)
    head, tail, count = int(whole[low]), int(whole[low + 1]), int(whole[low + 2])
    ring = whole[low + 3 : low + 3 + size]
    now = event * total
    rank[keys] = keys + now
    count -= np.count_nonzero(place[keys] >= 0)
    place[keys] = -1
    promoted = keys[hits]
    rank[promoted] = promoted + (now + PROTECTED)
    if tail + len(promoted) > size:
        kept = ring[head:tail]
        kept = kept[place[kept] == np.arange(head, tail)]
        head, tail = 0, len(kept)
        ring[:tail] = kept
        place[kept] = np.arange(tail)
    end = tail + len(promoted)
    ring[tail:end] = promoted
    place[promoted] = np.arange(tail, end)
    count += len(promoted)
    first = head
    while count > limit:
        key = int(ring[head])
        if place[key] == head:
            place[key] = -1
            rank[key] = key + now
            count -= 1
        head += 1
    whole[low], whole[low + 1], whole[low + 2] = head, end, count
    return ring[first:head]


def belady(keys, hits, event, rank, whole, real):
    """Farthest next use first. ``whole``: where each key's next use stands [K], then the uses, ascending per key."""
    at = whole[keys] + 1
    whole[keys] = at
    rank[keys] = keys - whole[at] * len(rank)
    return keys[:0]


def scattered(keys, salt):
    """Ranks of ``random`` at one event: a bijection on 64 bits, so that no two keys tie."""
    x = (keys.astype(np.uint64) ^ salt) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return (x ^ (x >> np.uint64(32))).view(np.int64)


# --- compiled only ---------------------------------------------------------------------------------------------------


def lift(heap, place, filed, base, at):
    """Move the key at ``at`` of a heap, lowest ``filed`` rank on top, up to where it belongs."""
    key = heap[base + at]
    while at and filed[heap[base + (at - 1) // 2]] > filed[key]:
        heap[base + at] = above = heap[base + (at - 1) // 2]
        place[above] = at
        at = (at - 1) // 2
    heap[base + at] = key
    place[key] = at


def sink(heap, place, filed, base, size, at):
    """Move the key at ``at`` of a heap of ``size`` keys down to where it belongs."""
    key = heap[base + at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and filed[heap[base + child + 1]] < filed[heap[base + child]]:
            child += 1
        below = heap[base + child]
        if filed[below] >= filed[key]:
            break
        heap[base + at] = below
        place[below] = at
        at = child
    heap[base + at] = key
    place[key] = at


def remove(heap, place, filed, base, size, at):
    """Take the key at ``at`` out of a heap of ``size`` keys."""
    place[heap[base + at]] = -1
    if at < size - 1:
        heap[base + at] = heap[base + size - 1]
        place[heap[base + at]] = at
        lift(heap, place, filed, base, at)
        sink(heap, place, filed, base, size - 1, place[heap[base + size - 1]])


def insert(heap, place, filed, rank, base, size, key):
    """Add a key to a heap of ``size`` keys."""
    heap[base + size] = key
    filed[key] = rank[key]
    lift(heap, place, filed, base, size)


def refile(heap, place, filed, rank, experts, width, keys):
    """Let resident keys rise whose rank fell; one that grew stays filed too low until it comes to the top."""
    for key in keys:
        if place[key] >= 0 and rank[key] < filed[key]:
            filed[key] = rank[key]
            lift(heap, place, filed, key // experts * width, place[key])


def drawn(residents, salt, need, spared, event, out):
    """Write the ``need`` lowest of the residents' random ranks to ``out``, ascending, ``spared`` ones left out."""
    ranks = scattered(residents, salt)
    best = np.empty(need, np.int64)
    found = 0
    for i in range(len(residents)):
        if (found == need and ranks[i] > best[need - 1]) or spared[residents[i]] == event:
            continue
        at = min(found, need - 1)
        while at and best[at - 1] > ranks[i]:
            best[at], out[at] = best[at - 1], out[at - 1]
            at -= 1
        best[at], out[at] = ranks[i], residents[i]
        found = min(found + 1, need)


def seen(code, keys, hits, event, rank, whole, real):
    """One event by the law of ``code``; keys of other experts whose rank it changed."""
    if code == LRU:
        return lru(keys, hits, event, rank, whole, real)
    if code == LFU:
        return lfu(keys, hits, event, rank, whole, real)
    if code == DECAYED_LFU:
        return decayed_lfu(keys, hits, event, rank, whole, real)
    if code == SLRU:
        return slru(keys, hits, event, rank, whole, real)
    if code == BELADY:
        return belady(keys, hits, event, rank, whole, real)
    return keys[:0]


def evict(code, heap, place, filed, rank, base, size, need, salts, spared, event, out, aside, end):
    """Take ``need`` keys out of a heap of ``size`` keys into ``out``, lowest rank first, ``spared`` ones left in; those
    wait in ``aside``, from ``end`` downwards.
    """
    if code == RANDOM:
        if need:
            drawn(heap[base : base + size], salts[event], need, spared, event, out)
        for key in out[:need]:
            remove(heap, place, filed, base, size, place[key])
            size -= 1
        return
    taken = kept = 0
    while taken < need:
        key = heap[base]
        if filed[key] != rank[key]:
            filed[key] = rank[key]
            sink(heap, place, filed, base, size, 0)
            continue
        remove(heap, place, filed, base, size, 0)
        size -= 1
        if spared[key] == event:
            kept += 1
            aside[end - kept] = key
        else:
            out[taken] = key
            taken += 1
    for i in range(end - kept, end):
        insert(heap, place, filed, rank, base, size, aside[i])
        size += 1


def drive(code, bypass, flat, cuts, step, decode, salts, room, pools, rank, whole, real, log, gone):
    """Replay events ``flat[cuts[e]:cuts[e + 1]]`` through pools of ``room`` slots; int64 [6] of what was counted.

    Keys of the event in progress are no victims, unless it exceeds the room: then it runs in waves, what is resident
    first. With ``bypass`` what was used may leave at once. If ``log`` (int64) is not empty, victims go there in order,
    and ``gone`` int64 [events] gets how many there were.
    """
    total = len(rank)
    experts = total // pools
    largest = 0
    for e in range(len(gone)):
        largest = max(largest, cuts[e + 1] - cuts[e])
    width = room + largest
    heap, held = np.empty(pools * width, np.int64), np.zeros(pools, np.int64)
    place, filed = np.full(total, -1), rank.copy()
    left, spared = np.full(total, -REFETCH_STEPS - 1), np.full(total, -1)
    event, ready = np.empty(largest, np.int64), np.empty(largest, np.bool_)
    out, aside = np.empty(largest, np.int64), np.empty(largest, np.int64)
    counted = np.zeros(6, np.int64)
    logging = len(log) > 0
    for e in range(len(gone)):
        size = cuts[e + 1] - cuts[e]
        keys, hits = event[:size], ready[:size]
        found = 0
        for i in range(size):
            keys[i] = flat[cuts[e] + i]
            hits[i] = place[keys[i]] >= 0
            found += hits[i]
        moved = seen(code, keys, hits, e + 1, rank, whole, real)
        refile(heap, place, filed, rank, experts, width, keys)
        refile(heap, place, filed, rank, experts, width, moved)
        counted[HITS] += found
        if decode[e]:
            counted[DECODE_REQUESTS] += size
            counted[DECODE_HITS] += found
        before = counted[EVICTIONS]
        missing = aside[: size - found]
        at = 0
        for i in range(size):
            if not hits[i]:
                missing[at] = keys[i]
                at += 1
                counted[REFETCHES] += step[e] - left[keys[i]] <= REFETCH_STEPS
            elif size <= room and not bypass:
                spared[keys[i]] = e
        pool = keys[0] // experts
        base = pool * width
        wave = size if bypass else room
        for start in range(0, len(missing), wave):
            part = missing[start : start + wave].copy()
            if bypass:
                for key in part:
                    insert(heap, place, filed, rank, base, held[pool], key)
                    held[pool] += 1
            short = max(0, held[pool] + (0 if bypass else len(part)) - room)
            evict(code, heap, place, filed, rank, base, held[pool], short, salts, spared, e, out, aside, size)
            held[pool] -= short
            for key in out[:short]:
                left[key] = step[e]
                if logging:
                    log[counted[LOGGED]] = key
                    counted[LOGGED] += 1
            counted[EVICTIONS] += short
            if not bypass:
                for key in part:
                    insert(heap, place, filed, rank, base, held[pool], key)
                    held[pool] += 1
        gone[e] = counted[EVICTIONS] - before
    return counted


def gather(experts, starts, count, flat, cuts, layers, steps):
    """Distinct experts of each step and layer of int16 [T, L, k], ascending, as flat keys; events written.

    Step s is rows ``starts[s]:starts[s + 1]``. A layer that asks for nothing makes no event.
    """
    seen = np.full(count, -1)
    found = events = 0
    for s in range(len(starts) - 1):
        for layer in range(experts.shape[1]):
            begin, stamp = found, s * experts.shape[1] + layer
            for token in range(starts[s], starts[s + 1]):
                for slot in range(experts.shape[2]):
                    expert = experts[token, layer, slot]
                    if expert >= 0 and seen[expert] != stamp:
                        seen[expert] = stamp
                        at = found
                        flat[at] = key = layer * count + expert
                        found += 1
                        while found - begin <= SHORT and at > begin and flat[at - 1] > key:
                            flat[at], flat[at - 1] = flat[at - 1], key
                            at -= 1
            if found > begin:
                if found - begin > SHORT:
                    flat[begin:found].sort()
                cuts[events + 1], layers[events], steps[events] = found, layer, s
                events += 1
    return events


@cache
def compiled() -> dict[str, Callable[..., Any]]:
    """``drive`` and ``gather`` in machine code."""
    laws = (lru, lfu, decayed_lfu, slru, belady, scattered)
    return compile_all((drive, gather), (*laws, lift, sink, remove, insert, refile, drawn, seen, evict))
