"""Reads recordings in arrays that other tools made into a trace: npz with the meta.json beside it.

Nothing is filled in by guess: what a recording lacks stays absent (-1) and is declared in ``metadata["gaps"]``.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moebench.step import DECODE
from moebench.trace.format import Trace, TraceError
from moebench.trace.rows import Shape


def import_npz(path: str | Path) -> Trace:
    """Read ``trace.npz`` (experts, offsets, optional weights and phase) and the ``meta.json`` beside it."""
    path = Path(path)
    archive = path / "trace.npz" if path.is_dir() else path
    meta_file = archive.with_name("meta.json")
    for file in (archive, meta_file):
        if not file.is_file():
            raise TraceError(f"{file}: no such file; an npz recording is a .npz with meta.json beside it")
    try:
        meta = json.loads(meta_file.read_text())
        with np.load(archive, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise TraceError(f"{archive}: not a readable recording ({error})") from None
    if lacking := [name for name in ("experts", "offsets") if name not in arrays]:
        raise TraceError(f"{archive}: lacks the array {', '.join(lacking)}; it holds {', '.join(sorted(arrays))}")
    if lacking := [name for name in ("model", "num_experts_per_layer") if name not in meta]:
        raise TraceError(f"{meta_file}: lacks {', '.join(lacking)}")
    experts, offsets = arrays["experts"], arrays["offsets"]
    if experts.ndim != 3 or offsets[0] != 0 or offsets[-1] != len(experts) or (np.diff(offsets) <= 0).any():
        raise TraceError(f"{archive}: offsets do not cut {experts.shape} experts into sequences")
    lengths = np.diff(offsets)
    unrecorded = _unrecorded_prompts(meta, len(lengths))
    gaps = [] if not unrecorded.any() else [f"{int(unrecorded.sum())} prompt tokens were not recorded"]
    known = Shape(int(meta["num_experts_per_layer"]), int(meta.get("native_top_k") or 0))
    layer_ids = np.array(meta.get("layer_ids", range(experts.shape[1])))
    if layer_ids.shape != experts.shape[1:2]:
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
        experts=np.ascontiguousarray(experts, dtype=np.int16),
        weights=None if weights is None else np.ascontiguousarray(weights, dtype=np.float16),
        phase=_phase(archive, arrays, meta),
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=np.concatenate([np.arange(n) + first for n, first in zip(lengths, unrecorded, strict=True)]).astype(
            np.int32
        ),
        metadata=metadata,
    )


def _phase(archive: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> np.ndarray:
    if "phase" in arrays:
        return np.ascontiguousarray(arrays["phase"], dtype=np.int8)
    if not str(meta.get("phase", "")).startswith("decode only"):
        raise TraceError(f"{archive}: no phase array, and meta.json does not declare the recording 'decode only'")
    return np.full(len(arrays["experts"]), DECODE, np.int8)


def _unrecorded_prompts(meta: Mapping[str, Any], sequences: int) -> np.ndarray:
    """Prompt tokens before the first recorded row, per sequence: they shift positions, int64 [sequences]."""
    if "sequences" in meta:
        if len(meta["sequences"]) != sequences:
            raise TraceError(f"meta.json describes {len(meta['sequences'])} sequences, offsets hold {sequences}")
        return np.array([one.get("prompt_tokens", 0) for one in meta["sequences"]], dtype=np.int64)
    return np.full(sequences, meta.get("prefill_tokens_total", 0) - meta.get("prefill_tokens", 0), dtype=np.int64)
