"""Reads recordings in arrays that other tools made into a trace: npz with the meta.json beside it.

Nothing is filled in by guess: what a recording lacks stays absent (-1) and is declared in ``metadata["gaps"]``.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moebench.step import DECODE
from moebench.trace.format import Trace, TraceError
from moebench.trace.rows import MOST_LAYERS, Shape

DEFLATED = 1100  # bytes that one byte of a zip archive becomes, at most
UNREADABLE = (ValueError, OSError, EOFError, RecursionError, NotImplementedError, RuntimeError, KeyError, TypeError,
              zipfile.BadZipFile, zlib.error)  # fmt: skip


def import_npz(path: str | Path) -> Trace:
    """Read ``trace.npz`` (experts, offsets, optional weights and phase) and the ``meta.json`` beside it."""
    path = Path(path)
    archive = path / "trace.npz" if path.is_dir() else path
    meta_file = archive.with_name("meta.json")
    for file in (archive, meta_file):
        if not file.is_file():
            raise TraceError(f"{file}: no such file; an npz recording is a .npz with meta.json beside it")
    try:
        meta, arrays = json.loads(meta_file.read_text()), _arrays(archive)
    except UNREADABLE as error:
        raise TraceError(f"{archive}: not a readable recording ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(meta, dict):
        raise TraceError(f"{meta_file}: not a JSON object")
    try:
        return _trace(archive, meta_file, meta, arrays)
    except TraceError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        said = " ".join(str(error).split())[:200]
        raise TraceError(f"{archive}: its arrays and {meta_file.name} do not go together ({said})") from None


def _arrays(archive: Path) -> dict[str, np.ndarray]:
    """All arrays of an archive; none is made that is larger than what the archive can hold."""
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    most = DEFLATED * archive.stat().st_size
    with np.load(archive, allow_pickle=False) as stored:
        for info in stored.zip.infolist():
            with stored.zip.open(info) as member:
                if (version := np.lib.format.read_magic(member)) not in read_header:
                    raise ValueError(f"{info.filename} is an npy file of version {version}")
                shape, _, dtype = read_header[version](member)
            if math.prod(shape) * dtype.itemsize > min(info.file_size, most) or min(shape, default=0) < 0:
                raise ValueError(f"{info.filename} says that it holds {list(shape)} numbers, which it cannot")
        return {name: stored[name] for name in stored.files}


def _trace(archive: Path, meta_file: Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Trace:
    if lacking := [name for name in ("experts", "offsets") if name not in arrays]:
        raise TraceError(f"{archive}: lacks the array {', '.join(lacking)}; it holds {', '.join(sorted(arrays))}")
    if lacking := [name for name in ("model", "num_experts_per_layer") if name not in meta]:
        raise TraceError(f"{meta_file}: lacks {', '.join(lacking)}")
    experts, offsets = arrays["experts"], arrays["offsets"]
    if (
        experts.ndim != 3
        or offsets.ndim != 1
        or not offsets.size
        or offsets[0] != 0
        or offsets[-1] != len(experts)
        or (np.diff(offsets) <= 0).any()
    ):
        raise TraceError(f"{archive}: offsets do not cut {experts.shape} experts into sequences")
    lengths = np.diff(offsets)
    unrecorded = _unrecorded_prompts(meta, len(lengths))
    gaps = [] if not unrecorded.any() else [f"{int(unrecorded.sum())} prompt tokens were not recorded"]
    known = Shape(int(meta["num_experts_per_layer"]), int(meta.get("native_top_k") or 0))
    layer_ids = np.array(meta.get("layer_ids", range(experts.shape[1])))
    if (
        layer_ids.shape != experts.shape[1:2]
        or layer_ids.dtype.kind not in "iu"
        or not 0 <= layer_ids.max() < MOST_LAYERS
    ):
        raise TraceError(f"{meta_file}: layer_ids names {layer_ids.size} layers, {archive.name} has {experts.shape[1]}")
    gaps += known.gaps(archive, experts.shape[2], layer_ids)
    kept = ("licence", "native_top_k", "layer_ids", "precision", "prompt", "caveat", "sequences")
    metadata = {
        "model": meta["model"],
        "experts": known.experts,
        "top_k": experts.shape[2],
        "source": " ".join(str(meta[name]) for name in ("source_repo", "source_path") if name in meta) or archive.name,
        "gaps": gaps,
        **{name: meta[name] for name in kept if name in meta},
    }
    weights = arrays.get("weights")
    return Trace(
        experts=_as(np.int16, "experts", experts),
        weights=None if weights is None else _as(np.float16, "weights", weights),
        phase=_phase(archive, arrays, meta),
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=_as(
            np.int32,
            "positions",
            np.concatenate([np.arange(n) + first for n, first in zip(lengths, unrecorded, strict=True)]),
        ),
        metadata=metadata,
    )


def _phase(archive: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> np.ndarray:
    if "phase" in arrays:
        return _as(np.int8, "phase", arrays["phase"])
    if not str(meta.get("phase", "")).startswith("decode only"):
        raise TraceError(f"{archive}: no phase array, and meta.json does not declare the recording 'decode only'")
    return np.full(len(arrays["experts"]), DECODE, np.int8)


def _as(dtype: type, name: str, array: np.ndarray) -> np.ndarray:
    """``array`` in another dtype, where that holds its numbers; they may be rounded, whole ones are kept."""
    if array.dtype.kind not in ("iufb" if dtype is np.float16 else "iub"):
        raise TraceError(f"{name} are {array.dtype}, not numbers that a trace holds")
    limits: Any = np.finfo(dtype) if dtype is np.float16 else np.iinfo(dtype)
    if array.size and not (limits.min <= array.min() and array.max() <= limits.max):  # not so for NaN either
        raise TraceError(f"{name} hold a number outside {limits.min} to {limits.max}")
    return np.ascontiguousarray(array, dtype=dtype)


def _unrecorded_prompts(meta: Mapping[str, Any], sequences: int) -> np.ndarray:
    """Prompt tokens before the first recorded row, per sequence: they shift positions, int64 [sequences]."""
    if "sequences" in meta:
        if len(meta["sequences"]) != sequences:
            raise TraceError(f"meta.json describes {len(meta['sequences'])} sequences, offsets hold {sequences}")
        return np.array([one.get("prompt_tokens", 0) for one in meta["sequences"]], dtype=np.int64)
    return np.full(sequences, meta.get("prefill_tokens_total", 0) - meta.get("prefill_tokens", 0), dtype=np.int64)
