"""Fitted eviction nets as a folder of one file, ``nets.safetensors``: an int16 array per kind of net.

The header says for which model or geometry they were fitted, on which routing, and how. Knows files and shapes; knows
no training and no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moebench.artefact import broken, read, stored, write
from moebench.errors import UsageError
from moebench.systems.flashmoe.nets import KINDS, Nets
from moebench.systemspec import Target

FILE = "nets.safetensors"
FIELDS = ("model", "weights_hash", "top_k", "trace", "preferred")
NEEDS = (*FIELDS, "layers", "experts", "hidden", "provenance")


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
    """Write the folder whole, see ``moebench.artefact``."""
    layers, experts, _ = fitted.shape
    header = {
        "layers": layers,
        "experts": experts,
        "hidden": {kind: net.hidden for kind, net in fitted.nets.items()},
        "provenance": dict(fitted.provenance),
        **{name: getattr(fitted, name) for name in FIELDS},
    }
    return write(folder, {FILE: (header, {kind: net.weights for kind, net in fitted.nets.items()})})


def load(folder: Path) -> Fitted:
    """Read and check an artefact; a missing, damaged or foreign file is one line that says what to do."""
    header, arrays = read(folder / FILE, NEEDS)
    try:
        nets = {kind: Nets(kind, header["experts"], hidden, arrays[kind]) for kind, hidden in header["hidden"].items()}
        made = Fitted(*(header[name] for name in FIELDS), nets, header["provenance"])
    except (UsageError, KeyError, TypeError, AttributeError) as error:
        raise broken(folder / FILE, " ".join(str(error).split())) from None
    if made.shape[0] != header["layers"]:
        raise broken(folder / FILE, f"nets of {made.shape[0]} layers, the header says {header['layers']}")
    return made


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
    for folder, header in stored("flashmoe", __package__, FILE, NEEDS):
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
    return f"moebench prepare system=flashmoe model={target.word}{shape}"
