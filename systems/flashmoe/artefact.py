"""Fitted eviction nets as a folder of one file, ``nets.safetensors``: an int16 array per kind of net.

The header says for which model or geometry they were fitted, on which routing, and how. Knows files and shapes; knows
no training and no tensor library.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from moebench.errors import UsageError
from moebench.plugins import home
from moebench.systems.flashmoe.nets import KINDS, Nets
from moebench.systemspec import Target

FILE = "nets.safetensors"
HEADER = "moebench"
SCHEMA = 1
FIELDS = ("model", "weights_hash", "top_k", "trace", "preferred")


@dataclass(frozen=True, eq=False)
class Fitted:
    """Nets by kind for one model. ``weights_hash`` is empty where only routing was known; ``trace`` is the hash of the
    routing they learned from; ``preferred`` is the kind that hit more on what was held out of it.
    """

    model: str
    weights_hash: str
    top_k: int
    trace: str
    preferred: str
    nets: Mapping[str, Nets]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preferred not in self.nets or any(net.kind != kind for kind, net in self.nets.items()):
            raise UsageError(f"eviction nets are needed by their kinds: {', '.join(KINDS)}")
        if len({(net.layers, net.experts) for net in self.nets.values()}) > 1:
            raise UsageError("eviction nets of one file are for one geometry")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts and top-k of the model."""
        net = next(iter(self.nets.values()))
        return net.layers, net.experts, self.top_k


def save(fitted: Fitted, folder: Path) -> Path:
    """Write the folder whole: a reader finds the complete old one, the complete new one, or none."""
    from safetensors.numpy import save as serialise

    layers, experts, _ = fitted.shape
    header = {
        "schema": SCHEMA,
        "layers": layers,
        "experts": experts,
        "hidden": {kind: net.hidden for kind, net in fitted.nets.items()},
        "provenance": dict(fitted.provenance),
        **{name: getattr(fitted, name) for name in FIELDS},
    }
    arrays = {kind: net.weights for kind, net in fitted.nets.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        (new := scratch / "new").mkdir()
        with open(new / FILE, "wb") as out:
            out.write(serialise(arrays, metadata={HEADER: json.dumps(header, sort_keys=True)}))
            out.flush()
            os.fsync(out.fileno())
        if folder.exists():
            folder.rename(scratch / "old")
        new.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def load(folder: Path) -> Fitted:
    """Read and check an artefact; a missing, damaged or foreign file is one line that says what to do."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    header = read_header(folder / FILE)
    try:
        arrays = load_file(folder / FILE)
        nets = {kind: Nets(kind, header["experts"], hidden, arrays[kind]) for kind, hidden in header["hidden"].items()}
        made = Fitted(*(header[name] for name in FIELDS), nets, header["provenance"])
    except (SafetensorError, OSError, UsageError, KeyError, TypeError, AttributeError) as error:
        raise _broken(folder / FILE, " ".join(str(error).split())) from None
    if made.shape[0] != header["layers"]:
        raise _broken(folder / FILE, f"nets of {made.shape[0]} layers, the header says {header['layers']}")
    return made


def read_header(file: Path) -> dict[str, Any]:
    """What a file says of itself, without its nets."""
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
    if missing := [name for name in (*FIELDS, "layers", "experts", "hidden", "provenance") if name not in header]:
        raise _broken(file, f"its header lacks {', '.join(missing)}")
    return header


def check(fitted: Fitted, target: Target) -> None:
    """Refuse nets of other weights or another shape, and nets that were fitted on the very routing they are to face."""
    wanted, made = shape_of(target), fitted.shape
    pairs = {name: pair for name, *pair in zip(("layers", "experts", "K"), made, wanted, strict=True)}
    if target.trace is None:
        pairs["weights"] = [fitted.weights_hash, target.weights_hash]
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UsageError(
                f"flashmoe: the nets were fitted for {fitted.model} with {what} {ours or 'unknown'}, {target.name} runs"
                f" with {what} {theirs}; fit some: {command(target)}"
            )
    if target.trace is not None and target.trace.hash == fitted.trace:
        raise UsageError("flashmoe: the nets were fitted on the very trace that is replayed; fit them on another one")


def find(target: Target) -> Path:
    """The folder of the nets for this model: the user's own first, then the shipped ones."""
    for folder in _candidates():
        header = read_header(folder / FILE)
        shape = (header["layers"], header["experts"], header["top_k"])
        same = header["model"] == target.name if target.trace is not None else True
        if same and shape == shape_of(target) and (target.trace or header["weights_hash"] == target.weights_hash):
            return folder
    layers, experts, top_k = shape_of(target)
    raise UsageError(
        f"flashmoe: no eviction nets for {target.name} ({layers} layers of {experts} experts, K {top_k}); fit some:"
        f" {command(target)}; or set system.net=none"
    )


def shape_of(target: Target) -> tuple[int, int, int]:
    """Layers, experts and top-k of what is about to run."""
    top_k = target.geometry.top_k if target.trace is None else target.trace.top_k
    return target.geometry.layers, target.geometry.experts, top_k


def command(target: Target) -> str:
    """The words that make nets for a model."""
    shape = "" if target.trace is None or target.trace.top_k == target.geometry.top_k else " trace=FILE"
    return f"moebench prepare system=flashmoe model={target.name}{shape}"


def _candidates() -> Iterator[Path]:
    for parent in (home() / "artefacts" / "flashmoe", Path(str(resources.files(__package__))) / "artefacts"):
        folders = sorted(parent.iterdir()) if parent.is_dir() else []
        yield from (f for f in folders if (f / FILE).is_file() and not f.name.startswith("."))


def _broken(file: Path, what: str) -> UsageError:
    return UsageError(f"{file}: {what}; prepare the artefact again")
