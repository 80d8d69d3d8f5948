"""Reads routing logs of a row per token and layer into a trace: CSV and JSON lines, gzipped or not.

Rows may stand in any order. Nothing is filled in by guess: what a log lacks stays absent (-1) and is declared in
``metadata["gaps"]``.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from moebench.step import ABSENT, DECODE, PHASES, PREFILL
from moebench.trace.format import Trace, TraceError

MOST_ID, MOST_LAYERS = 1 << 31, 1 << 16  # ids of tokens and sequences, and of layers, are below
SPARSEST = 1000  # of so many pairs of a token and a layer that a log could have, one is there at least


@dataclass(frozen=True)
class Shape:
    """What rows do not say of the model: experts per layer and, where known (above 0), its own k and MoE layers.

    With ``layers`` ids count from ``first_layer`` (below 0: the lowest that was recorded), and a layer without rows
    becomes a column in which all is absent; without it only recorded layers have columns.
    """

    experts: int
    native_top_k: int = 0
    layers: int = 0
    first_layer: int = -1

    def __post_init__(self) -> None:
        if not 1 <= self.experts <= np.iinfo(np.int16).max:
            raise TraceError(f"experts={self.experts} per layer is not within 1 to {np.iinfo(np.int16).max}")
        if self.first_layer >= 0 and not self.layers:
            raise TraceError("first_layer has no effect without layers, the number of the model's MoE layers")

    def columns(self, path: str | Path, recorded: np.ndarray) -> np.ndarray:
        """Layer ids of the trace's columns, ascending, of those that were ``recorded``."""
        if not self.layers:
            return recorded
        first = self.first_layer if self.first_layer >= 0 else int(recorded[0])
        columns = np.arange(first, first + self.layers)
        if len(odd := np.setdiff1d(recorded, columns)):
            raise TraceError(f"{path}: layer {odd[0]} is none of {first}..{columns[-1]}; check layers and first_layer")
        return columns

    def gaps(self, path: str | Path, k: int, recorded: np.ndarray) -> list[str]:
        """What the recording lacks of the model: experts a token, and layers."""
        if 0 < self.native_top_k < k:
            raise TraceError(f"{path}: {k} experts a token were recorded, more than native_top_k {self.native_top_k}")
        found = [] if self.native_top_k in (0, k) else [f"{k} of the model's own {self.native_top_k} experts a token"]
        whole = self.columns(path, recorded) if self.layers else np.arange(recorded[0], recorded[-1] + 1)
        if len(missing := np.setdiff1d(whole, recorded)):
            found.append(f"no rows of layer {', '.join(map(str, missing))} of {whole[0]}..{whole[-1]}")
        return found


def import_csv(path: str | Path, shape: Shape, metadata: Mapping[str, Any]) -> Trace:
    """Read a CSV with columns ``token``, ``layer`` and either ``experts`` ("3 17 5") or one ``expert_<rank>`` per rank.

    Optional columns: ``weights`` ("0.5 0.3 0.2"), ``sequence`` (any label), ``phase`` (prefill, or decode by default).
    Lists are parted by spaces, commas, semicolons or bars, in brackets or not. A name that ends in .gz is unpacked.
    """
    rows = []
    with _text(path) as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        ranks = sorted((c for c in columns if re.fullmatch(r"expert_\d+", c)), key=lambda c: int(c[7:]))
        if not {"token", "layer"} <= set(columns) or not ("experts" in columns or ranks):
            has = ", ".join(columns)[:200]
            raise TraceError(f"{path}: needs columns token, layer and experts or expert_0, expert_1, ...; has {has}")
        for row in reader:
            entry: dict[str, Any] = {name: row[name] for name in ("sequence", "phase") if row.get(name)}
            ids = _parts(row["experts"]) if "experts" in columns else [row[c] for c in ranks if row[c]]
            entry.update(token=row["token"], layer=row["layer"], experts=ids)
            if row.get("weights"):
                entry["weights"] = _parts(row["weights"])
            rows.append(entry)
    return _from_rows(path, rows, shape, metadata)


def import_jsonl(path: str | Path, shape: Shape, metadata: Mapping[str, Any]) -> Trace:
    """Read JSON lines ``{"token", "layer", "experts": [...]}``, optionally ``weights``, ``sequence`` and ``phase``.

    A name that ends in .gz is unpacked.
    """
    rows = []
    with _text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}: line {number} is not JSON ({error})") from None
            if not isinstance(row, dict) or not {"token", "layer", "experts"} <= set(row):
                raise TraceError(f"{path}: line {number} lacks token, layer or experts")
            if not all(isinstance(row.get(name, []), list) for name in ("experts", "weights")):
                raise TraceError(f"{path}: line {number}: experts and weights are lists")
            rows.append(row)
    return _from_rows(path, rows, shape, metadata)


@contextmanager
def _text(path: str | Path) -> Iterator[IO[str]]:
    """A text file, unpacked where its name ends in .gz; what cannot be read is a one-line ``TraceError``."""
    try:
        opened = gzip.open if Path(path).suffix == ".gz" else open
        with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None


def _parts(text: str) -> list[str]:
    return re.sub(r"[\[\](),;|]", " ", text or "").split()


def _whole(value: Any) -> int:
    """An id: a whole number, as such or in digits; 3.5 is none."""
    number = int(value)
    if isinstance(value, (bool, float)) and (isinstance(value, bool) or number != value):
        raise ValueError(f"{value!r} is not a whole number")
    return number


def _from_rows(path: str | Path, rows: Sequence[Mapping[str, Any]], shape: Shape, metadata: Mapping[str, Any]) -> Trace:
    """One row per (sequence, token, layer), in any order; what is missing stays absent and is declared as a gap."""
    if not rows:
        raise TraceError(f"{path}: holds no rows")
    try:
        numbers, names = _sequences([str(row.get("sequence", 0)) for row in rows])
        where = np.array([(_whole(row["token"]), _whole(row["layer"])) for row in rows], np.int64)
        chosen = [[_whole(e) for e in row["experts"]] for row in rows]
        given = [None if row.get("weights") is None else [float(w) for w in row["weights"]] for row in rows]
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}: {str(error)[:200]}") from None
    for what, ids, most in (
        ("token", where[:, 0], MOST_ID),
        ("layer", where[:, 1], MOST_LAYERS),
        ("sequence", numbers, MOST_ID),
    ):
        if len(odd := ids[(ids < 0) | (ids >= most)]):
            raise TraceError(f"{path}: {what} {odd[0]} is not within 0 to {most - 1}")
    for (token, layer), experts, own in zip(where, chosen, given, strict=True):
        place = f"{path}: token {token}, layer {layer}"
        if any(not 0 <= e < shape.experts for e in experts) or len(experts) > shape.experts:
            raise TraceError(f"{place} names an expert outside 0..{shape.experts - 1}, or one twice: {experts[:20]}")
        if own is not None and len(own) != len(experts):
            raise TraceError(f"{place} has {len(own)} weights for {len(experts)} experts")
    phases = [row.get("phase", "decode") for row in rows]
    if strange := [phase for phase in phases if phase not in PHASES[:2]]:
        raise TraceError(f"{path}: phase {strange[0]!r:.100} is not one of {', '.join(PHASES[:2])}")
    tokens, row_of = np.unique(np.column_stack([numbers, where[:, 0]]), axis=0, return_inverse=True)
    recorded, row_of = np.unique(where[:, 1]), row_of.ravel()
    layers = shape.columns(path, recorded)
    if len(tokens) * len(layers) > SPARSEST * (len(rows) + 1000):  # what is absent takes memory too
        raise TraceError(f"{path}: {len(rows)} rows of {len(tokens)} tokens in {len(layers)} layers are no recording")
    cell = row_of * len(layers) + np.searchsorted(layers, where[:, 1])
    if len(twice := np.flatnonzero(np.bincount(cell) > 1)):
        at = int(np.flatnonzero(cell == twice[0])[0])
        what = f"sequence {names[numbers[at]] if names else numbers[at]}, token {where[at, 0]}, layer {where[at, 1]}"
        raise TraceError(f"{path}: {what} stands there twice")
    k, weighted = max(map(len, chosen)), all(own is not None for own in given)
    ids = np.full((len(tokens) * len(layers), k), ABSENT, np.int16)
    weights = np.zeros(ids.shape, np.float16)
    for at, experts, own in zip(cell.tolist(), chosen, given, strict=True):
        ids[at, : len(experts)] = experts
        if weighted:
            weights[at, : len(experts)] = own
    phase = np.empty(len(tokens), np.int8)
    phase[row_of] = [PREFILL if one == "prefill" else DECODE for one in phases]
    gaps = [*shape.gaps(path, k, recorded), *_token_gaps(tokens)]
    if absent := len(tokens) * len(recorded) - len(rows):
        gaps.append(f"{absent} of {len(tokens) * len(recorded)} (token, layer) pairs absent")
    if not weighted and any(own is not None for own in given):
        gaps.append("weights stand beside some rows only and were left out")
    more = {"native_top_k": shape.native_top_k, "sequence_names": names}
    return Trace(
        experts=ids.reshape(len(tokens), len(layers), k),
        weights=weights.reshape(len(tokens), len(layers), k) if weighted else None,
        phase=phase,
        sequence=tokens[:, 0].astype(np.int32),
        position=tokens[:, 1].astype(np.int32),
        metadata={
            **metadata,
            **{name: value for name, value in more.items() if value},
            "experts": shape.experts,
            "top_k": k,
            "layer_ids": layers.tolist(),
            "gaps": gaps,
        },
    )


def _sequences(labels: list[str]) -> tuple[np.ndarray, list[str]]:
    """The number of each row's sequence: its own or, if one has another name, by first appearance, with the names."""
    if all(label.isdecimal() for label in labels):
        return np.array([int(label) for label in labels], np.int64), []
    names = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return np.array([names[label] for label in labels]), list(names)


def _token_gaps(tokens: np.ndarray) -> list[str]:
    """Tokens that sequences lack before their first row and between their rows; (sequence, token) [T, 2], ascending."""
    first = np.flatnonzero(np.diff(tokens[:, 0], prepend=-1))
    before = int(tokens[first, 1].sum())
    inside = int((np.diff(tokens[:, 1]) - 1)[tokens[1:, 0] == tokens[:-1, 0]].sum())
    found = [f"{before} tokens before the first recorded one of their sequence"] if before else []
    return found + ([f"{inside} tokens between recorded ones"] if inside else [])
