"""Where the bytes of each expert stand in ``experts.bin``, for every disk layout. Reads and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from moebench.store.engines import StoreError
from moebench.store.layout import TensorSpec
from moebench.units import align_up

DISK_LAYOUTS = ("checkpoint", "scattered", "packed_gate", "packed_gate_up", "packed", "ordered")
WHOLE = ("packed", "ordered")  # layouts with one aligned extent per expert
IN_EXTENT = {  # the matrices that stand together in an aligned extent; fused ones are one matrix
    "packed_gate": (("gate_proj",),),
    "packed_gate_up": (("gate_proj", "up_proj"), ("gate_up_proj",)),
}
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
    dest: int  # in the slot buffer; of a coded expert, in the buffer that its stored bytes land in


class Piece(NamedTuple):
    """What every expert of a layout has stored in one place: its range in the slot, and whether that is an extent."""

    dest: int
    nbytes: int
    aligned: bool  # an extent of whole pages per expert; else stacked over the experts of a layer, unaligned


@dataclass(frozen=True, eq=False)
class Extents:
    """Positions of all experts of one pack.

    ``packed``: one 4096-aligned extent per expert, in order of key. ``ordered``: the same in the order of ``order``
    (keys by disk position). ``checkpoint``: as a downloaded model, per layer and tensor part, stacked over experts,
    unaligned. ``scattered``: as a GGUF file, per layer and matrix, each with its own scales. ``packed_gate`` and
    ``packed_gate_up``: these matrices in an extent per expert, the others scattered. ``lengths`` are the stored bytes
    of coded experts by key; their extents follow one another without room between them.
    """

    layout: str
    layers: int
    experts: int
    tensors: tuple[TensorSpec, ...]
    order: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.layout not in DISK_LAYOUTS:
            raise StoreError(f"layout {self.layout!r} is not one of {', '.join(DISK_LAYOUTS)}")
        if (self.layout == "ordered") != (self.order is not None):
            raise StoreError(f"layout {self.layout}: an order of experts belongs to layout=ordered, and only to it")
        if self.order is not None and not _is_permutation(self.order, self.keys):
            raise StoreError(f"order is not a permutation of the {self.keys} expert keys")
        if self.lengths is not None and not self.whole:
            raise StoreError(f"layout {self.layout} stores no coded experts; a codec needs one of {', '.join(WHOLE)}")
        _ = self.pieces  # a layout that these parts cannot have is refused at once

    @property
    def keys(self) -> int:
        """Number of experts of all layers."""
        return self.layers * self.experts

    @cached_property
    def whole(self) -> bool:
        """Whether each expert is one aligned extent."""
        return self.layout in WHOLE

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert in a slot buffer, from its first tensor part to the end of the last."""
        return max(spec.offset + spec.nbytes for spec in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """``expert_bytes`` rounded up to whole 4096-byte pages."""
        return align_up(self.expert_bytes)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """How one expert is stored, in order of the slot; the same for all uncoded experts."""
        if self.whole:
            return (Piece(0, self.expert_bytes, True),)
        if self.layout == "checkpoint":
            return tuple(Piece(spec.offset, spec.nbytes, False) for spec in self.tensors)
        matrices = [(name, list(specs)) for name, specs in groupby(self.tensors, _matrix)]
        names, together = tuple(name for name, _ in matrices), 0
        if self.layout in IN_EXTENT:
            together = next((len(head) for head in IN_EXTENT[self.layout] if names[: len(head)] == head), 0)
            if not together:
                wanted = " or ".join(" and ".join(head) for head in IN_EXTENT[self.layout])
                raise StoreError(f"layout {self.layout} needs experts that begin with {wanted}, not {', '.join(names)}")
        groups = [[spec for _, specs in matrices[:together] for spec in specs]] if together else []
        groups += [specs for _, specs in matrices[together:]]
        return tuple(
            Piece(specs[0].offset, specs[-1].offset + specs[-1].nbytes - specs[0].offset, i < bool(together))
            for i, specs in enumerate(groups)
        )

    @property
    def file_bytes(self) -> int:
        """Size of experts.bin, a multiple of 4096 in every layout."""
        if self.lengths is not None:
            return sum(map(align_up, self.lengths))
        return align_up(self._stacked_from + self.layers * self._layer_bytes)

    @property
    def stored_bytes(self) -> int:
        """Bytes of one uncoded expert in experts.bin: without the gaps between its pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def _stacked_from(self) -> int:
        """Where the stacked pieces begin, after the extents of all experts."""
        return self.keys * sum(align_up(piece.nbytes) for piece in self.pieces if piece.aligned)

    @property
    def _layer_bytes(self) -> int:
        return self.experts * sum(piece.nbytes for piece in self.pieces if not piece.aligned)

    @cached_property
    def position(self) -> np.ndarray:
        """Place of each key's first byte among all, int64 [keys]."""
        position = np.arange(self.keys)
        if self.order is not None:
            position[np.asarray(self.order)] = np.arange(self.keys)
        return position

    @cached_property
    def offsets(self) -> np.ndarray:
        """Offset of each expert's first byte, int64 [keys]."""
        if self.lengths is not None:
            spans = np.array([align_up(nbytes) for nbytes in self.lengths])[np.argsort(self.position)]
            return (np.cumsum(spans) - spans)[self.position]
        first = self.pieces[0]
        if first.aligned:
            return self.position * align_up(first.nbytes)
        layer, expert = np.divmod(np.arange(self.keys), self.experts)
        return layer * self._layer_bytes + expert * first.nbytes

    def segments(self, key: int) -> list[Segment]:
        """The pieces of expert ``key``, ascending in the file; of a coded one, its stored bytes."""
        if self.whole:
            nbytes = self.expert_bytes if self.lengths is None else self.lengths[key]
            return [Segment(int(self.offsets[key]), nbytes, 0)]
        layer, expert = divmod(key, self.experts)
        base, segments = self._stacked_from + layer * self._layer_bytes, []
        for dest, nbytes, aligned in self.pieces:
            if aligned:
                segments.append(Segment(key * align_up(nbytes), nbytes, dest))
                continue
            segments.append(Segment(base + expert * nbytes, nbytes, dest))
            base += self.experts * nbytes
        return segments

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of an expert's bytes that no piece holds; they are zero."""
        bounds = [(piece.dest, piece.dest + piece.nbytes) for piece in self.pieces]
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


def _matrix(spec: TensorSpec) -> str:
    """The matrix that a part belongs to: its own name, or that of the matrix whose scales it holds."""
    return spec.name.split(".")[0]


def _is_permutation(order: Sequence[int], count: int) -> bool:
    return len(order) == count and all(type(key) is int for key in order) and set(order) == set(range(count))
