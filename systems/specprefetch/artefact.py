"""The adapters of one model as a folder of one file, ``adapters.safetensors``: ``<name>.A`` [r, D], ``<name>.B`` [n, r]
and the frozen routers ``gates.<layer>`` [n, D], all fp16, with a header that says for which weights and how made.

Knows files and shapes; knows no training and no tensor library.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from moebench.errors import UsageError
from moebench.plugins import home
from moebench.systems.specprefetch.adapters import Shape
from moebench.systemspec import Target

FILE = "adapters.safetensors"
HEADER = "moebench"
SCHEMA = 1


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
                _fits(f"{name}.{side}", matrix, shape)
        for layer, gate in enumerate(self.gates):
            _fits(f"gates.{layer}", gate, (self.shape.experts, self.shape.hidden))


def save(artefact: Artefact, folder: Path) -> Path:
    """Write the folder; the file stands complete under its name, or not at all."""
    from safetensors.numpy import save as serialise

    tensors = {f"{n}.{side}": pair["AB".index(side)] for n, pair in artefact.adapters.items() for side in "AB"}
    tensors |= {f"gates.{layer}": gate for layer, gate in enumerate(artefact.gates)}
    header = {
        "schema": SCHEMA,
        "model": artefact.model,
        "weights_hash": artefact.weights_hash,
        "top_k": artefact.top_k,
        "shape": dataclasses.asdict(artefact.shape),
        "provenance": dict(artefact.provenance),
    }
    payload = serialise(
        {k: np.ascontiguousarray(a) for k, a in tensors.items()}, metadata={HEADER: json.dumps(header, sort_keys=True)}
    )
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return folder


def load(folder: Path) -> Artefact:
    """Read and check an artefact; a missing, damaged or foreign file is one line that says what to do."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    header = read_header(folder / FILE)
    try:
        tensors = load_file(folder / FILE)
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
    except (SafetensorError, OSError, UsageError, KeyError, TypeError) as error:
        raise _broken(folder / FILE, " ".join(str(error).split())) from None


def read_header(file: Path) -> dict[str, Any]:
    """What a file says of itself, without its tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as opened:
            header = json.loads((opened.metadata() or {})[HEADER])
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file; prepare the artefact again") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise _broken(file, f"no readable header ({' '.join(str(error).split())})") from None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise _broken(file, f"its schema is not {SCHEMA}")
    return header


def find(target: Target, kind: str | None, base: str | None, rank: int, horizon: int) -> Path:
    """The folder of fitting adapters for these weights, the user's own first.

    ``kind`` and ``base`` None and rank 0 take any; a longer horizon will do.
    """
    have = []
    for folder in _candidates():
        header = read_header(folder / FILE)
        if header["weights_hash"] == target.weights_hash:
            shape = Shape(**header["shape"])
            fits = kind in (None, shape.kind) and base in (None, shape.base) and rank in (0, shape.rank)
            if fits and shape.horizon >= horizon:
                return folder
            have.append(f"{shape.kind} {shape.base} of rank {shape.rank}, horizon {shape.horizon}")
    words = {"adapters": kind, "base": base, "horizon": horizon, "rank": rank}
    wanted = " ".join(f"{name}={value}" for name, value in words.items() if value)
    known = f"; there are {'; '.join(have)}" if have else ""
    raise UsageError(
        f"specprefetch: no artefact for {target.name} with {wanted}{known}; make it:"
        f" moebench prepare system=specprefetch model={target.name} {wanted}"
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
    for what, (made, wanted) in pairs.items():
        if made != wanted:
            raise UsageError(
                f"specprefetch: the artefact was made for {artefact.model} with {what} {made}, {target.name} runs with"
                f" {what} {wanted}; make one that fits: moebench prepare system=specprefetch model={target.name}"
            )


def _fits(name: str, matrix: np.ndarray, shape: tuple[int, ...]) -> None:
    if matrix.shape != shape or matrix.dtype != np.float16:
        raise UsageError(f"{name} is {matrix.dtype} {matrix.shape}, expected float16 {shape}")
    if not np.isfinite(matrix).all():
        raise UsageError(f"{name} holds numbers that are not finite")


def _candidates() -> Iterator[Path]:
    for parent in (home() / "artefacts" / "specprefetch", Path(str(resources.files(__package__))) / "artefacts"):
        folders = sorted(parent.iterdir()) if parent.is_dir() else []
        yield from (f for f in folders if (f / FILE).is_file())


def _broken(file: Path, what: str) -> UsageError:
    return UsageError(f"{file}: {what}; prepare or import the artefact again")
