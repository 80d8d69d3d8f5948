"""The safetensors files of a model folder: headers checked before any number in them is used, tensors read in pieces.

Knows files, names, shapes and bytes; knows no model. Every file is taken as hostile: what does not hold together is one
line of ``StoreError``, and nothing outside the folder is read on a file's word. A link that stands in the folder is
followed: it is its owner's, and the hub's own cache is made of them.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moebench.store.engines import StoreError

# What numpy has no type for is held as the unsigned integers of its bits.
DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"), "F8_E8M0": np.dtype("u1"), "BOOL": np.dtype("u1"),
    "I8": np.dtype("i1"), "I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"), "U16": np.dtype("<u2"), "U32": np.dtype("<u4"), "U64": np.dtype("<u8"),
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes, as safetensors itself allows
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in a file: ``dtype`` by its safetensors name, ``offset`` from the file's first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Checkpoint:
    """All tensors of a model folder by name, and its configuration; opening it reads headers only."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_json(self.folder / "config.json")
        self.tensors: dict[str, Stored] = {}
        listed = _listed(self.folder)
        files = sorted(set(listed.values())) if listed else _unlisted(self.folder)
        for file in files:
            for name, stored in read_header(self.folder / file).items():
                if name in self.tensors:
                    raise StoreError(f"{self.folder}: tensor {name} is in {self.tensors[name].file.name} and in {file}")
                self.tensors[name] = stored
        for name, file in listed.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise StoreError(f"{self.folder / INDEX}: tensor {name} is not in {file}, where the index puts it")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` of a tensor (along its first axis; all by default), in the dtype of ``DTYPES``."""
        stored = self.tensors[name]
        dtype, shape = DTYPES[stored.dtype], stored.shape
        if shape:
            start, stop, _ = slice(start, stop).indices(shape[0])
            shape = (max(0, stop - start), *shape[1:])
        data = np.empty(shape, dtype)
        skip = start * math.prod(shape[1:]) * dtype.itemsize if shape else 0
        with open(stored.file, "rb", buffering=0) as file:
            file.seek(stored.offset + skip)
            view, done = data.reshape(-1).view(np.uint8).data, 0
            while done < data.nbytes:
                if not (count := file.readinto(view[done:])):
                    raise StoreError(f"{stored.file}: the file ends inside tensor {name}; was it changed meanwhile?")
                done += count
        return data


def read_json(path: Path) -> dict[str, Any]:
    """The mapping that a JSON file holds; a key that is there twice is an error."""
    if not path.is_file():
        raise StoreError(f"{path.parent} is not a model folder: it has no {path.name}")
    try:
        found = json.loads(path.read_text(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise StoreError(f"{path} is not a JSON object")
    return found


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file: their bytes must fill the file behind the header, without gap or overlap."""
    if not os.path.isfile(path):  # of names that cannot be as well
        raise StoreError(f"{path.parent}: file {path.name[:120]} is missing; is the download complete?")
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise StoreError(
                f"{path} is not a safetensors file, or was cut short: it says its header has {length} bytes"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise StoreError(f"{path}: its header is not a JSON object")
    header.pop("__metadata__", None)
    start, found = 8 + length, {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    end = start
    for name, stored in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != end:
            raise StoreError(
                f"{path}: tensor {name} starts at byte {stored.offset - start}, the one before ends at {end - start}"
            )
        end += stored.nbytes
    if end != size:
        raise StoreError(f"{path} has {size} bytes, its tensors need {end}; is the download complete?")
    return found


def _stored(path: Path, name: str, entry: Any, start: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, begin, end))
        itemsize = DTYPES[dtype].itemsize
    except (TypeError, KeyError, ValueError):
        raise StoreError(f"{path}: tensor {name} is described as {str(entry)[:120]}, which is not understood") from None
    if not whole or end - begin != math.prod(shape) * itemsize:
        raise StoreError(f"{path}: tensor {name} of {dtype} {list(shape)} does not take bytes {begin} to {end}")
    return Stored(path, dtype, shape, start + begin, end - begin)


def _listed(folder: Path) -> dict[str, str]:
    """Tensor name to file name by the folder's index; empty where a single file holds all."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return {}
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise StoreError(f"{folder / INDEX} has no weight_map")
    for name, file in listed.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise StoreError(
                f"{folder / INDEX} puts tensor {name} into {str(file)[:120]!r}, which is no file of this folder"
            )
    return listed


def _unlisted(folder: Path) -> list[str]:
    """The files of a folder without an index: the single one, or shards that a converter left unlisted."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if found := sorted(path.name for path in folder.glob("model*.safetensors")):
        return found
    raise StoreError(f"{folder} holds no safetensors ({SINGLE} or {INDEX}); other formats are not read")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"{twice[:120]!r} stands there twice")
    return found
