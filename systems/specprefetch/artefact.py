"""The adapters of one model as a folder of one file, ``adapters.safetensors``: ``<name>.A`` [r, D], ``<name>.B`` [n, r]
and the frozen routers ``gates.<layer>`` [n, D], all fp16, with a header that says for which weights and how made.

Knows files and shapes; knows no training and no tensor library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moebench.artefact import broken, fitting, read, require_same, stored, write
from moebench.errors import UsageError
from moebench.systems.specprefetch.adapters import Shape
from moebench.systemspec import Target

FILE = "adapters.safetensors"
NEEDS = ("model", "weights_hash", "top_k", "shape", "provenance")


@dataclass(frozen=True, eq=False)
class Artefact:
    """Adapters and routers of the model ``model`` with weights ``weights_hash`` and ``top_k`` experts a token."""

    model: str
    weights_hash: str
    top_k: int
    shape: Shape
    adapters: Mapping[str, tuple[np.ndarray, np.ndarray]]
    gates: tuple[np.ndarray, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if tuple(self.adapters) != self.shape.names:
            raise UsageError(f"adapters {', '.join(self.adapters)} are not {', '.join(self.shape.names)}")
        if len(self.gates) != self.shape.layers:
            raise UsageError(f"{len(self.gates)} routers for {self.shape.layers} layers")
        for name, pair in self.adapters.items():
            for matrix, (side, shape) in zip(pair, self.shape.sides.items(), strict=True):
                fitting(f"{name}.{side}", matrix, shape)
        for layer, gate in enumerate(self.gates):
            fitting(f"gates.{layer}", gate, (self.shape.experts, self.shape.hidden))


def save(artefact: Artefact, folder: Path) -> Path:
    """Write the folder whole, see ``moebench.artefact``."""
    tensors = {f"{n}.{side}": pair["AB".index(side)] for n, pair in artefact.adapters.items() for side in "AB"}
    tensors |= {f"gates.{layer}": gate for layer, gate in enumerate(artefact.gates)}
    header = {
        "model": artefact.model,
        "weights_hash": artefact.weights_hash,
        "top_k": artefact.top_k,
        "shape": dataclasses.asdict(artefact.shape),
        "provenance": dict(artefact.provenance),
    }
    return write(folder, {FILE: (header, tensors)})


def load(folder: Path) -> Artefact:
    """Read and check an artefact; a missing, damaged or foreign file is one line that says what to do."""
    header, tensors = read(folder / FILE, NEEDS)
    try:
        shape = Shape(**header["shape"])
        names = [key.removesuffix(".A") for key in tensors if key.endswith(".A")]
        order = {name: i for i, name in enumerate(shape.names)}
        names.sort(key=lambda name: order.get(name, len(order)))
        adapters = {name: (tensors.pop(f"{name}.A"), tensors.pop(f"{name}.B")) for name in names}
        gates = tuple(tensors.pop(f"gates.{layer}") for layer in range(shape.layers))
        if tensors:
            raise UsageError(f"tensor {next(iter(tensors))} is no part of it")
        return Artefact(
            header["model"], header["weights_hash"], header["top_k"], shape, adapters, gates, header["provenance"]
        )
    except (UsageError, KeyError, TypeError) as error:
        raise broken(folder / FILE, " ".join(str(error).split())) from None


def find(target: Target, kind: str | None, base: str | None, rank: int, horizon: int) -> Path:
    """The folder of fitting adapters for these weights, the user's own first.

    ``kind`` and ``base`` None and rank 0 take any; a longer horizon will do.
    """
    have = []
    for folder, header in stored("specprefetch", __package__, FILE, NEEDS):
        if header["weights_hash"] == target.weights_hash:
            try:
                shape = Shape(**header["shape"])
            except (TypeError, ValueError) as error:
                raise broken(folder / FILE, f"its shape is damaged ({error})") from None
            fits = kind in (None, shape.kind) and base in (None, shape.base) and rank in (0, shape.rank)
            if fits and shape.horizon >= horizon:
                return folder
            have.append(f"{shape.kind} {shape.base} of rank {shape.rank}, horizon {shape.horizon}")
    words = {"adapters": kind, "base": base, "horizon": horizon, "rank": rank}
    wanted = " ".join(f"{name}={value}" for name, value in words.items() if value)
    known = f"; there are {'; '.join(have)}" if have else ""
    raise UsageError(
        f"specprefetch: no artefact for {target.name} with {wanted}{known}; make it:"
        f" moebench prepare system=specprefetch model={target.word} {wanted}"
    )


def check(artefact: Artefact, target: Target, horizon: int) -> None:
    """Refuse an artefact of another model or other weights, or one that does not look so far ahead."""
    shape, geometry = artefact.shape, target.geometry
    if shape.horizon < horizon:
        raise UsageError(f"specprefetch: the artefact looks {shape.horizon} layer ahead, system.horizon={horizon}")
    pairs = {
        "weights": (artefact.weights_hash, target.weights_hash),
        "layers": (shape.layers, geometry.layers),
        "experts": (shape.experts, geometry.experts),
        "hidden size": (shape.hidden, geometry.hidden),
        "K": (artefact.top_k, geometry.top_k),
    }
    command = f"moebench prepare system=specprefetch model={target.word}"
    require_same("specprefetch", artefact.model, target.name, pairs, command)
