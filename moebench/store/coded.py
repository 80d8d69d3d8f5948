"""A stored expert under codec ``rans``: a header that describes itself, then the planes of its tensor parts.

Every part has planes and tables of its own, so scales are coded apart. Parts of 16-bit floats have two planes: turned
left by one bit, a bf16 number is its 8 exponent bits above its mantissa and sign. All other parts are one plane of
bytes. Numbers are little-endian. Knows bytes and their places in a slot; no files, no hashes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moebench.store import rans_kernels as kernels
from moebench.store.engines import StoreError
from moebench.store.layout import TensorSpec
from moebench.store.rans import WORD_ALIGNMENT, Plane, encode_plane
from moebench.units import align_up

MAGIC = np.frombuffer(b"rANS", np.uint32)[0]
HEADER = 4  # uint32: magic, planes, decoded bytes, stored bytes
RECORD = kernels.FIELDS  # uint32 of each plane's record
HALVES = ("BF16", "F16")
WRONG = {
    kernels.BOUNDS: "points outside the expert",
    kernels.TABLE: "has frequencies that do not add up",
    kernels.STREAM: "does not end where it should",
}


def header_bytes(tensors: Sequence[TensorSpec]) -> int:
    """What a stored expert may be longer than its parts: header, records, and each plane's padding."""
    planes = sum(2 if spec.dtype in HALVES else 1 for spec in tensors)
    return 4 * (HEADER + planes * RECORD) + planes * (WORD_ALIGNMENT - 1)


def longest(tensors: Sequence[TensorSpec]) -> int:
    """Bytes that a stored expert of these parts never exceeds."""
    return sum(spec.nbytes for spec in tensors) + header_bytes(tensors)


def planes_of(spec: TensorSpec, part: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Kind and symbols (uint8) of each plane of one part (uint8 [nbytes])."""
    if spec.dtype not in HALVES:
        return [(kernels.BYTES, part)]
    bits = part.view(np.uint16)
    turned = (bits << 1) | (bits >> 15)
    return [(kernels.HIGH, (turned >> 8).astype(np.uint8)), (kernels.LOW, turned.astype(np.uint8))]


def encode(tensors: Sequence[TensorSpec], buffer: np.ndarray, lanes: int | None = None) -> np.ndarray:
    """The stored bytes (uint8) of the expert in ``buffer``; verified by decoding them again."""
    records, planes = [], []
    for spec in tensors:
        for kind, symbols in planes_of(spec, buffer[spec.offset : spec.offset + spec.nbytes]):
            plane = encode_plane(symbols, lanes)
            records.append([spec.offset, plane.count, kind, plane.lanes, plane.symbols, plane.words])
            planes.append(plane)
    size = max(spec.offset + spec.nbytes for spec in tensors)
    stored = _join(records, planes, size)
    again = np.empty(size, np.uint8)
    decode(stored, again)
    for spec in tensors:
        part = slice(spec.offset, spec.offset + spec.nbytes)
        if not np.array_equal(again[part], buffer[part]):
            raise StoreError(f"tensor part {spec.name}: rANS did not give back what it was given")
    return stored


def _join(records: list[list[int]], planes: list[Plane], size: int) -> np.ndarray:
    end = 4 * (HEADER + len(planes) * RECORD)
    for record, plane in zip(records, planes, strict=True):
        record.append(end)
        end = align_up(end + plane.body.size, WORD_ALIGNMENT)
    if end >= 2**32:
        raise StoreError(f"an expert of {end} bytes is beyond what codec=rans can hold (4 GiB)")
    stored = np.zeros(end, np.uint8)
    head = stored[: records[0][-1]].view(np.uint32)
    head[:HEADER] = MAGIC, len(planes), size, end
    head[HEADER:] = np.array(records, np.uint32).reshape(-1)
    for record, plane in zip(records, planes, strict=True):
        stored[record[-1] : record[-1] + plane.body.size] = plane.body
    return stored


def read_header(stored: np.ndarray) -> tuple[np.ndarray, int]:
    """Records int64 [planes, RECORD] and the decoded bytes of a stored expert; ``StoreError`` where it is none."""
    if stored.size < 4 * HEADER:
        raise StoreError("the coded expert has no header")
    magic, planes, size, length = stored[: 4 * HEADER].view(np.uint32).tolist()
    end = 4 * (HEADER + planes * RECORD)
    if magic != MAGIC or not planes or length != stored.size or end > length:
        raise StoreError("the coded expert's header is damaged")
    return stored[4 * HEADER : end].view(np.uint32).astype(np.int64).reshape(planes, RECORD), size


def decode(stored: np.ndarray, out: np.ndarray, vector: bool = kernels.VECTOR) -> None:
    """Decode a stored expert (uint8, not a byte more) into ``out`` (uint8 of its decoded length).

    One call without the interpreter's lock. ``StoreError`` for any stream that ``encode`` did not write, as far as
    states and lengths can tell; the hash of the decoded bytes tells the rest.
    """
    records, size = read_header(stored)
    if size != out.size:
        raise StoreError(f"the coded expert holds {size} bytes instead of {out.size}")
    status, plane = kernels.decode_planes(stored, records, out, vector)
    if status != kernels.SOUND:
        raise StoreError(f"plane {plane} of the coded expert {WRONG[status]}")
