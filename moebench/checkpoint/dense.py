"""Dense weights on their way to one safetensors file: in pieces, header first. Knows no model and no family."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moebench.checkpoint.files import DTYPES, Checkpoint
from moebench.store.engines import StoreError

PIECE = 64 << 20  # bytes of a tensor that are in memory at once


def write_tensors(
    path: Path, entries: Mapping[str, tuple[str, tuple[int, ...], int]], pieces: Iterator[np.ndarray]
) -> int:
    """Write a safetensors file of ``entries`` (dtype, shape, bytes), then the pieces as they come; returns its size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, nbytes) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    if (size := path.stat().st_size) != 8 + len(text) + end:
        raise StoreError(f"{path}: wrote {size} bytes of dense weights instead of {8 + len(text) + end}")
    return size


def write_own(path: Path, checkpoint: Checkpoint, names: Collection[str]) -> int:
    """Write the tensors ``names`` of a checkpoint under their own names, byte for byte; wide numbers first, aligned."""
    tensors = checkpoint.tensors
    kept = sorted(names, key=lambda name: -DTYPES[tensors[name].dtype].itemsize)
    entries = {name: (tensors[name].dtype, tensors[name].shape, tensors[name].nbytes) for name in kept}
    return write_tensors(path, entries, (p for n in kept for p in in_pieces(n, checkpoint.read, tensors[n].shape)))


def in_pieces(name: str, read: Callable[..., np.ndarray], shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """A tensor in blocks of rows of at most ``PIECE`` bytes each, or single rows."""
    if not shape or not shape[0]:
        yield read(name)
        return
    row = max(1, int(np.prod(shape[1:], dtype=np.int64)) * 4)
    step = max(1, PIECE // row)
    for start in range(0, shape[0], step):
        yield read(name, start, min(shape[0], start + step))
