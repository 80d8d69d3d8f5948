"""Reads other people's routing recordings into a trace: npz with meta.json, CSV, JSON lines.

Nothing is filled in by guess: what a recording lacks stays absent (-1) and is declared in ``metadata["gaps"]``.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moebench.step import ABSENT, DECODE, PHASES, PREFILL
from moebench.trace.format import Trace, TraceError


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
    kept = ("licence", "native_top_k", "layer_ids", "precision", "prompt", "caveat", "sequences")
    metadata = {
        "model": meta["model"],
        "experts": int(meta["num_experts_per_layer"]),
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


def import_csv(path: str | Path, experts: int, metadata: Mapping[str, Any]) -> Trace:
    """Read a CSV with columns ``token``, ``layer`` and either ``experts`` ("3 17 5") or one ``expert_<rank>`` per rank.

    Optional columns: ``weights`` ("0.5 0.3 0.2"), ``sequence``, ``phase`` (prefill, or decode by default).
    ``experts`` is the number of experts per layer; ``metadata`` adds ``model``, ``source`` and what else is known.
    """
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        ranks = sorted((c for c in columns if c.startswith("expert_")), key=lambda c: int(c[7:]))
        if not {"token", "layer"} <= set(columns) or not ("experts" in columns or ranks):
            raise TraceError(
                f"{path}: needs columns token, layer and experts or expert_0, expert_1, ...; has {columns}"
            )
        rows = []
        for row in reader:
            entry: dict[str, Any] = {name: row[name] for name in ("sequence", "phase") if row.get(name)}
            ids = (
                row["experts"].split() if "experts" in columns else [row[c] for c in ranks if row[c] not in ("", None)]
            )
            entry.update(token=row["token"], layer=row["layer"], experts=ids)
            if row.get("weights"):
                entry["weights"] = row["weights"].split()
            rows.append(entry)
    return _from_rows(path, rows, experts, metadata)


def import_jsonl(path: str | Path, experts: int, metadata: Mapping[str, Any]) -> Trace:
    """Read JSON lines ``{"token", "layer", "experts": [...]}``, optionally ``weights``, ``sequence`` and ``phase``."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except ValueError as error:
        raise TraceError(f"{path}: not JSON lines ({error})") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not {"token", "layer", "experts"} <= set(row):
            raise TraceError(f"{path}: line {number} lacks token, layer or experts")
    return _from_rows(path, rows, experts, metadata)


def _from_rows(path: str | Path, rows: Iterable[Mapping[str, Any]], experts: int, metadata: Mapping[str, Any]) -> Trace:
    """One row per (sequence, token, layer); pairs that are missing stay absent and are counted as a gap."""
    try:
        cells = {}
        phases: dict[tuple[int, int], int] = {}
        for row in rows:
            token = (int(row.get("sequence", 0)), int(row["token"]))
            key = (*token, int(row["layer"]))
            if key in cells:
                raise TraceError(f"{path}: sequence {key[0]}, token {key[1]}, layer {key[2]} stands there twice")
            weights = row.get("weights")
            cells[key] = ([int(e) for e in row["experts"]], None if weights is None else [float(w) for w in weights])
            phase = row.get("phase", "decode")
            if phase not in PHASES[:2]:
                raise TraceError(f"{path}: phase {phase!r} is not one of {', '.join(PHASES[:2])}")
            phases[token] = PREFILL if phase == "prefill" else DECODE
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, TraceError) else TraceError(f"{path}: {error}") from None
    if not cells:
        raise TraceError(f"{path}: holds no rows")
    tokens, layers = sorted(phases), sorted({key[2] for key in cells})
    k = max(len(ids) for ids, _ in cells.values())
    ids = np.full((len(tokens), len(layers), k), ABSENT, np.int16)
    weights = np.zeros(ids.shape, np.float16)
    weighted = all(w is not None and len(w) == len(e) for e, w in cells.values())
    row_of = {token: row for row, token in enumerate(tokens)}
    column_of = {layer: column for column, layer in enumerate(layers)}
    for (sequence, number, layer), (chosen, given) in cells.items():
        at = (row_of[sequence, number], column_of[layer])
        if any(not 0 <= e < experts for e in chosen):
            raise TraceError(
                f"{path}: token {number}, layer {layer} names an expert outside 0..{experts - 1}: {chosen}"
            )
        ids[at][: len(chosen)] = chosen
        if weighted:
            weights[at][: len(chosen)] = given
    absent = len(tokens) * len(layers) - len(cells)
    gaps = [f"{absent} of {len(tokens) * len(layers)} (token, layer) pairs absent"] if absent else []
    return Trace(
        experts=ids,
        weights=weights if weighted else None,
        phase=np.array([phases[t] for t in tokens], np.int8),
        sequence=np.array([t[0] for t in tokens], np.int32),
        position=np.array([t[1] for t in tokens], np.int32),
        metadata={**metadata, "experts": experts, "top_k": k, "layer_ids": layers, "gaps": gaps},
    )
