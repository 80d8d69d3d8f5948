"""Where the bytes of each expert stand in ``experts.bin``, for the three disk layouts. Reads and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moebench.store.engines import StoreError
from moebench.store.layout import TensorSpec
from moebench.units import align_up

DISK_LAYOUTS = ("checkpoint", "packed", "ordered")
DTYPES: dict[str, np.dtype] = {
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
}
PART_ALIGNMENT = 64


class Segment(NamedTuple):
    """One contiguous piece of an expert."""

    offset: int  # in experts.bin
    nbytes: int
    dest: int  # in the slot buffer


@dataclass(frozen=True, eq=False)
class Extents:
    """Positions of all experts of one pack.

    ``packed``: one 4096-aligned extent per expert, in order of key. ``ordered``: the same in the order of ``order``
    (keys by disk position). ``checkpoint``: as a downloaded model, per layer and tensor part, stacked over experts,
    unaligned.
    """

    layout: str
    layers: int
    experts: int
    tensors: tuple[TensorSpec, ...]
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.layout not in DISK_LAYOUTS:
            raise StoreError(f"layout {self.layout!r} is not one of {', '.join(DISK_LAYOUTS)}")
        if (self.layout == "ordered") != (self.order is not None):
            raise StoreError(f"layout {self.layout}: an order of experts belongs to layout=ordered, and only to it")
        if self.order is not None and not _is_permutation(self.order, self.keys):
            raise StoreError(f"order is not a permutation of the {self.keys} expert keys")

    @property
    def keys(self) -> int:
        """Number of experts of all layers."""
        return self.layers * self.experts

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in a slot buffer, from its first tensor part to the end of the last."""
        return max(spec.offset + spec.nbytes for spec in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """``expert_bytes`` rounded up to whole 4096-byte pages."""
        return align_up(self.expert_bytes)

    @property
    def file_bytes(self) -> int:
        """Size of experts.bin, a multiple of 4096 in every layout."""
        if self.layout == "checkpoint":
            return align_up(self.keys * self.stored_bytes)
        return self.keys * self.slot_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of one expert in experts.bin: without the gaps between parts in layout checkpoint."""
        return sum(spec.nbytes for spec in self.tensors) if self.layout == "checkpoint" else self.expert_bytes

    @cached_property
    def offsets(self) -> np.ndarray:
        """Offset of each expert's first byte, int64 [keys]."""
        if self.layout == "checkpoint":
            layer, expert = np.divmod(np.arange(self.keys), self.experts)
            return layer * self.experts * self.stored_bytes + expert * self.tensors[0].nbytes
        position = np.arange(self.keys)
        if self.order is not None:
            position[np.asarray(self.order)] = np.arange(self.keys)
        return position * self.slot_bytes

    def segments(self, key: int) -> list[Segment]:
        """The pieces of expert ``key``, ascending in the file."""
        if self.layout != "checkpoint":
            return [Segment(int(self.offsets[key]), self.expert_bytes, 0)]
        layer, expert = divmod(key, self.experts)
        base, pieces = layer * self.experts * self.stored_bytes, []
        for spec in self.tensors:
            pieces.append(Segment(base + expert * spec.nbytes, spec.nbytes, spec.offset))
            base += self.experts * spec.nbytes
        return pieces

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of an expert's bytes that belong to no tensor part; they are zero."""
        bounds = [(spec.offset, spec.offset + spec.nbytes) for spec in self.tensors]
        return [(end, start) for (_, end), (start, _) in pairwise(bounds) if start > end]


def place_parts(parts: Mapping[str, np.ndarray]) -> tuple[TensorSpec, ...]:
    """Lay out the encoded parts of one expert one after the other, each at a 64-byte boundary."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    specs, offset = [], 0
    for name, part in parts.items():
        if part.dtype not in names:
            raise StoreError(f"tensor part {name}: dtype {part.dtype} is not one of {', '.join(map(str, names))}")
        specs.append(TensorSpec(name, tuple(part.shape), names[part.dtype], offset, part.nbytes))
        offset = align_up(offset + part.nbytes, PART_ALIGNMENT)
    return tuple(specs)


def _is_permutation(order: Sequence[int], count: int) -> bool:
    return len(order) == count and all(type(key) is int for key in order) and set(order) == set(range(count))
