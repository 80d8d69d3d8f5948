"""Decodes planes of codec ``rans`` on a GPU in one launch: a program for each plane, its lanes side by side.

The host hands over states, tables and words; nothing is read back before the last check. Needs Triton, which torch's
CUDA wheels for Linux bring. Knows planes; ``torch_rans`` knows what they are put together to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from moebench.backends.torch_rans import Plane, table
from moebench.store.engines import StoreError

FIELDS = 6  # of a plane: lanes, symbols, first state, first word, end of its words, first symbol


@triton.jit
def _decode(facts, states, tables, words, out, sound, LANES: tl.constexpr, FIELDS: tl.constexpr):
    plane = tl.program_id(0)
    fact = facts + plane * FIELDS
    lanes, count = tl.load(fact), tl.load(fact + 1)
    position, end, to = tl.load(fact + 3), tl.load(fact + 4), tl.load(fact + 5)
    lane = tl.arange(0, LANES)
    start = tl.full((LANES,), 65536, tl.uint32)
    state = tl.load(states + tl.load(fact + 2) + lane, mask=lane < lanes, other=65536).to(tl.uint32, bitcast=True)
    for first in range(0, count, lanes):
        gives = (lane < lanes) & (first + lane < count)
        entry = tl.load(tables + plane * 4096 + (state & 4095), mask=gives, other=0).to(tl.uint32, bitcast=True)
        tl.store(out + to + first + lane, (entry & 255).to(tl.uint8), mask=gives)
        moved = ((entry >> 20) + 1) * (state >> 12) + ((entry >> 8) & 4095)
        needs = gives & (moved < start)
        at = position + tl.cumsum(needs.to(tl.int32), 0) - 1
        word = tl.load(words + at, mask=needs & (at < end), other=0).to(tl.uint32) & 65535
        state = tl.where(gives, tl.where(needs, (moved << 16) | word, moved), state)
        position += tl.sum(needs.to(tl.int32), 0)
    wrong = tl.sum((state != start).to(tl.int32), 0)
    tl.store(sound + plane, (wrong == 0) & (position == end))


def decode_planes(planes: Sequence[Plane], device: str | torch.device) -> list[torch.Tensor]:
    """Symbols uint8 [count] of each coded plane on ``device``; ``StoreError`` where one does not end as it should."""
    lanes, counts, words = (
        np.array(sizes, np.int64)
        for sizes in zip(*((plane.lanes, plane.count, plane.words.size) for plane in planes), strict=True)
    )
    firsts = [np.cumsum(sizes) - sizes for sizes in (lanes, words, counts)]
    facts = np.stack([lanes, counts, firsts[0], firsts[1], firsts[1] + words, firsts[2]], axis=1).astype(np.int32)

    def to(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).view(dtype)).to(device)

    out = torch.empty(int(counts.sum()), dtype=torch.uint8, device=device)
    sound = torch.zeros(len(planes), dtype=torch.int32, device=device)
    _decode[(len(planes),)](
        to(facts, np.int32),
        to(np.concatenate([plane.states for plane in planes]), np.int32),
        to(np.stack([table(plane) for plane in planes]).astype(np.uint32), np.int32),
        to(np.concatenate([plane.words for plane in planes]), np.int16),
        out,
        sound,
        LANES=max(32, triton.next_power_of_2(int(lanes.max()))),
        FIELDS=FIELDS,
        num_warps=8,
    )
    if not bool(sound.all()):
        raise StoreError("a plane of the coded experts does not end where it should")
    return [out[first : first + count] for first, count in zip(firsts[2].tolist(), counts.tolist(), strict=True)]
