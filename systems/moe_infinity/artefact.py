"""A prepared collection as a file: matrices of requests, and of which model and which requests they are.

One folder with ``collection.safetensors``: ``counts`` uint16 [N, L, E] (tokens per expert), and a header. Knows files
and shapes; knows no training prompts and no run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moebench.artefact import broken, read, stored, write
from moebench.errors import UsageError
from moebench.systemspec import Target

FILE = "collection.safetensors"
FIELDS = ("model", "top_k", "trace_hash", "weights_hash", "provenance")


@dataclass(frozen=True, eq=False)
class Prepared:
    """Matrices of finished requests. ``weights_hash`` names the weights that routed them, empty where only a trace is
    known; ``trace_hash`` the trace they were counted on.
    """

    model: str
    top_k: int
    trace_hash: str
    counts: np.ndarray
    weights_hash: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.counts.dtype != np.uint16 or self.counts.ndim != 3 or not len(self.counts):
            raise UsageError(f"counts are {self.counts.dtype} {self.counts.shape}, expected uint16 [N, L, E], N >= 1")


def save(made: Prepared, folder: Path) -> Path:
    """Write the folder whole, see ``moebench.artefact``."""
    header = {"kind": "moe_infinity collection", **{name: getattr(made, name) for name in FIELDS}}
    return write(folder, {FILE: (header, {"counts": made.counts})})


def load(folder: Path) -> Prepared:
    """Read a collection; a missing, damaged or foreign file is one line that says what to do."""
    header, arrays = read(folder / FILE, FIELDS)
    try:
        return Prepared(counts=arrays["counts"], **{name: header[name] for name in FIELDS})
    except (KeyError, UsageError) as error:
        raise broken(folder / FILE, " ".join(str(error).split())) from None


def check(made: Prepared, target: Target) -> None:
    """Refuse a collection of another shape, of other weights, or counted on the very trace that is replayed."""
    shape = target.geometry
    have = f"{made.counts.shape[1]} layers of {made.counts.shape[2]} experts, top {made.top_k}"
    want = f"{shape.layers} layers of {shape.experts} experts, top {shape.top_k}"
    top_k = target.trace.top_k if target.trace is not None else shape.top_k
    if made.counts.shape[1:] != (shape.layers, shape.experts) or made.top_k != top_k:
        raise UsageError(f"moe_infinity: the collection is of {have}, {target.name} has {want}; {command(target)}")
    if target.trace is not None and made.model != target.name:
        raise UsageError(f"moe_infinity: the collection is of {made.model}, not of {target.name}; {command(target)}")
    if target.weights_hash and made.weights_hash != target.weights_hash:
        raise UsageError(f"moe_infinity: the collection is of {made.model} with other weights; {command(target)}")
    if target.trace is not None and made.trace_hash == target.trace.hash:
        raise UsageError("moe_infinity: the collection was counted on the trace that is replayed; give one of others")


def find(target: Target) -> Path | None:
    """The folder of a collection for these weights, or for this geometry's recorded traces; the user's own first."""
    for folder, header in stored("moe_infinity", __package__, FILE, FIELDS):
        if target.weights_hash:
            if header["weights_hash"] == target.weights_hash:
                return folder
        elif header["model"] == target.name and header["trace_hash"] != target.trace.hash:
            return folder
    return None


def command(target: Target) -> str:
    """How to make a collection for ``target``."""
    trace = " trace=FILE" if target.trace is not None else ""
    return f"make one: moebench prepare system=moe_infinity model={target.word}{trace}"
