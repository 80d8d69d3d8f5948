"""Decodes stored experts of codec ``rans`` with torch, on any device: every lane of every plane of all experts at once.

A step advances all lanes by one symbol; a running sum over the lanes that need a word says which word each takes. The
host only prepares: between the first step and the last check nothing is read back. Knows the stored form
(``moebench.store.coded``); no files and no hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from moebench.store.coded import read_header
from moebench.store.engines import StoreError
from moebench.store.rans_kernels import BODY, BYTES, COUNT, DEST, HIGH, KIND, LANES, LOW, START, SYMBOLS, TOTAL, WORDS


@dataclass(frozen=True)
class Plane:
    """One plane of one expert: where its symbols go, and what its body holds."""

    expert: int
    dest: int
    count: int
    kind: int
    lanes: int
    states: np.ndarray
    frequencies: np.ndarray
    words: np.ndarray
    symbols: np.ndarray  # of a raw plane: its bytes

    @property
    def rows(self) -> int:
        """Steps until its last symbol."""
        return -(-self.count // self.lanes)


def decode(
    stored: Sequence[np.ndarray],
    nbytes: int,
    device: str | torch.device = "cpu",
    steps: Callable[[Sequence[Plane], str | torch.device], list[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Decode experts of ``nbytes`` from their stored bytes (uint8): uint8 [experts, nbytes] on ``device``.

    ``steps`` gives the symbols (uint8) of each coded plane; without it operations of torch do, one row after another.
    ``StoreError`` where a stream is damaged, as far as its own states and lengths tell.
    """
    planes: list[Plane] = []
    for expert, record in enumerate(stored):
        found, size = _planes(expert, record)
        if size != nbytes:
            raise StoreError(f"the coded expert holds {size} bytes instead of {nbytes}")
        planes += found
    out = torch.zeros(len(stored), nbytes, dtype=torch.uint8, device=device)
    coded = [plane for plane in planes if plane.lanes]
    symbols = dict(zip(map(id, coded), (steps or _decode_coded)(coded, device), strict=True)) if coded else {}
    for index, plane in enumerate(planes):
        if plane.kind == HIGH:
            continue  # put together with the plane behind it
        values = _symbols(plane, symbols, device)
        if plane.kind == BYTES:
            out[plane.expert, plane.dest : plane.dest + plane.count] = values
            continue
        turned = _symbols(planes[index - 1], symbols, device).int() << 8 | values.int()
        bits = turned >> 1 | (turned & 1) << 15
        halves = torch.stack([bits & 255, bits >> 8], dim=-1).to(torch.uint8)
        out[plane.expert, plane.dest : plane.dest + 2 * plane.count] = halves.view(-1)
    return out


def _planes(expert: int, stored: np.ndarray) -> tuple[list[Plane], int]:
    records, size = read_header(stored)
    planes, end, waits = [], 0, None
    for record in records.tolist():
        dest, count, kind, lanes, symbols = (record[field] for field in (DEST, COUNT, KIND, LANES, SYMBOLS))
        lengths = (4 * lanes, 2 * symbols, 2 * record[WORDS], symbols) if lanes else (0, 0, 0, count)
        cuts = record[BODY] + np.cumsum((0, *lengths))
        width = 1 if kind == BYTES else 2
        fits = cuts[-1] <= stored.size and dest >= end and dest + width * count <= size
        paired = (kind == LOW) == (waits is not None) and waits in (None, (dest, count)) and kind <= LOW
        parts = [stored[a:b] for a, b in pairwise(cuts)] if fits else []
        if not fits or not paired or lanes > count or (lanes and parts[1].view(np.uint16).sum(dtype=int) != TOTAL):
            raise StoreError(f"plane {len(planes)} of the coded expert points outside it or has a wrong table")
        states, frequencies, words, values = parts
        numbers = (states.view(np.uint32), frequencies.view(np.uint16), words.view(np.uint16))
        planes.append(Plane(expert, dest, count, kind, lanes, *numbers, values))
        waits = (dest, count) if kind == HIGH else None
        end = end if kind == HIGH else dest + width * count
    if waits is not None:
        raise StoreError("the coded expert ends between two planes of a part")
    return planes, size


def _symbols(plane: Plane, decoded: dict[int, torch.Tensor], device: str | torch.device) -> torch.Tensor:
    return decoded[id(plane)] if plane.lanes else torch.from_numpy(plane.symbols.copy()).to(device)


def _decode_coded(planes: Sequence[Plane], device: str | torch.device) -> list[torch.Tensor]:
    """Symbols uint8 [count] of each coded plane."""
    # Those with most rows first: the lanes that still have a symbol to give are then always the first ones.
    order = sorted(range(len(planes)), key=lambda i: -planes[i].rows)
    ranked = [planes[i] for i in order]
    lanes, counts = (np.array([getattr(plane, name) for plane in ranked]) for name in ("lanes", "count"))
    first_lane, base = np.cumsum(lanes) - lanes, np.cumsum(counts) - counts
    lane = np.arange(lanes.sum()) - np.repeat(first_lane, lanes)
    tables = np.stack([table(plane) for plane in ranked])
    word_counts = np.array([plane.words.size for plane in ranked])

    def to(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

    state, entries = to(np.concatenate([plane.states for plane in ranked])), to(tables.reshape(-1))
    words = to(np.concatenate([*(plane.words for plane in ranked), [0]]))  # one to spare, for lanes that need none
    in_table = to(np.repeat(np.arange(len(ranked)) * TOTAL, lanes))
    of_plane = to(np.repeat(np.arange(len(ranked)), lanes))
    last_lane, ends = to(first_lane + lanes - 1), to(np.cumsum(word_counts))
    position = to(np.cumsum(word_counts) - word_counts)  # of each plane's next word
    place, stride, left = (
        to(values)
        for values in (np.repeat(base, lanes) + lane, np.repeat(lanes, lanes), np.repeat(counts, lanes) - lane)
    )
    out = torch.zeros(int(counts.sum()) + 1, dtype=torch.uint8, device=device)  # the last one takes what is none
    rows = np.array([plane.rows for plane in ranked])
    for row in range(int(rows[0])):
        alive = int(np.searchsorted(-rows, -row))  # planes with a symbol in this row
        width = int(lanes[:alive].sum())
        gives = left[:width] > 0
        entry = entries[in_table[:width] + (state[:width] & (TOTAL - 1))]
        out[torch.where(gives, place[:width], out.numel() - 1)] = (entry & 255).to(torch.uint8)
        moved = ((entry >> 20) + 1) * (state[:width] >> 12) + ((entry >> 8) & (TOTAL - 1))
        needs = gives & (moved < START)
        taken = torch.cumsum(needs, 0)
        before = torch.cat([taken.new_zeros(1), taken[last_lane[:alive]]])
        index = position[of_plane[:width]] + taken - 1 - before[of_plane[:width]]
        word = words[torch.where(needs, index.clamp(0, words.numel() - 1), words.numel() - 1)]
        state[:width] = torch.where(gives, torch.where(needs, moved << 16 | word, moved), state[:width])
        position[:alive] += before[1:] - before[:-1]
        place[:width] += stride[:width]
        left[:width] -= stride[:width]
    if not bool((state == START).all() & (position == ends).all()):
        raise StoreError("a plane of the coded experts does not end where it should")
    found: list[torch.Tensor] = [out] * len(planes)
    for rank, start, count in zip(order, base.tolist(), counts.tolist(), strict=True):
        found[rank] = out[start : start + count]
    return found


def table(plane: Plane) -> np.ndarray:
    """Decoding table int64 [TOTAL], packed as in the compiled decoder."""
    frequencies = plane.frequencies.astype(np.int64)
    starts = np.cumsum(frequencies) - frequencies
    which = np.repeat(np.arange(frequencies.size), frequencies)
    return plane.symbols[which] | (np.arange(TOTAL) - starts[which]) << 8 | (frequencies[which] - 1) << 20
