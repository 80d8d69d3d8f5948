"""What Edge0 adds to a model, as a folder of two files: ``prerouter.safetensors`` and ``lora.safetensors``.

Keys are ``layers.<N>.{fc1,fc2,linear_init}.weight``, N the owner counted over MoE layers, and ``<module
path>.lora_A``/``.lora_B``; all fp16. Each file's header says which model, weights and number of experts they were
trained for, and how. Knows files and shapes; knows no training and no tensor library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moebench.artefact import broken, fitting, read, require_same, stored, write
from moebench.backends.base import Adapters
from moebench.errors import UsageError
from moebench.systems.edge0.heads import PARTS, Plan, head_shapes
from moebench.systemspec import Target

PREROUTER, LORA = "prerouter.safetensors", "lora.safetensors"
NEEDS = ("kind", "weights_hash", "top_k", "rank", "alpha")


@dataclass(frozen=True)
class Base:
    """The model that heads and adapters belong to; ``quant`` is what its experts were stored in while they learned."""

    model: str
    weights_hash: str
    layers: int
    experts: int
    hidden: int
    native_top_k: int
    quant: str


@dataclass(frozen=True, eq=False)
class Artefact:
    """Heads of all owners of ``plan`` and, where trained, the recovery adapters; every matrix is finite fp16."""

    base: Base
    plan: Plan
    heads: Mapping[int, Mapping[str, np.ndarray]]
    adapters: Adapters | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.plan.layers != self.base.layers:
            raise UsageError(f"a plan of {self.plan.layers} layers is not for a model of {self.base.layers}")
        if sorted(self.heads) != list(self.plan.owners):
            raise UsageError(f"heads of layers {sorted(self.heads)} are not those of {list(self.plan.owners)}")
        for owner, head in self.heads.items():
            for part, shape in head_shapes(self.base.hidden, self.base.experts).items():
                fitting(f"layers.{owner}.{part}.weight", head.get(part), shape)
        if self.adapters is not None:
            if not self.adapters.pairs:
                raise UsageError("adapters without matrices: leave them out")
            for name, (a, b) in self.adapters.pairs.items():
                fitting(f"{name}.lora_A", a, (self.rank, a.shape[-1]))
                fitting(f"{name}.lora_B", b, (b.shape[0], self.rank))

    @property
    def rank(self) -> int:
        """Inner dimension of every adapter; 0 without adapters."""
        return next(iter(self.adapters.pairs.values()))[0].shape[0] if self.adapters else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all heads."""
        return sum(matrix.nbytes for head in self.heads.values() for matrix in head.values())


def save(artefact: Artefact, folder: Path) -> Path:
    """Write the folder whole, see ``moebench.artefact``."""
    heads = {f"layers.{n}.{part}.weight": head[part] for n, head in artefact.heads.items() for part in PARTS}
    files = {PREROUTER: (_header(artefact, "prerouter"), heads)}
    if artefact.adapters is not None:
        pairs = artefact.adapters.pairs.items()
        sides = {f"{name}.lora_{side}": pair["AB".index(side)] for name, pair in pairs for side in "AB"}
        files[LORA] = (_header(artefact, "lora"), sides)
    return write(folder, files)


def load(folder: Path, adapters: bool = True) -> Artefact:
    """Read and check an artefact; a missing, damaged or foreign file is one line that says what to do.

    Without ``adapters`` their file is not looked at.
    """
    header, tensors = _read(folder / PREROUTER, "prerouter")
    heads: dict[int, dict[str, np.ndarray]] = {}
    for key, array in tensors.items():
        layers, owner, part, weight = (*key.split("."), "", "", "")[:4]
        if (layers, weight) != ("layers", "weight") or part not in PARTS or not owner.isdecimal():
            raise broken(folder / PREROUTER, f"tensor {key} is no part of a head")
        heads.setdefault(int(owner), {})[part] = array
    pairs = None
    if header["rank"] and adapters:
        other, sides = _read(folder / LORA, "lora")
        if differing := sorted(k for k in header if k not in ("kind", "digest") and header[k] != other.get(k)):
            raise broken(folder / LORA, f"it does not belong to {PREROUTER}: {', '.join(differing)} differ")
        try:
            pairs = paired(sides)
        except UsageError as error:
            raise broken(folder / LORA, str(error)) from None
    served = Adapters(header["alpha"] / header["rank"], pairs) if pairs else None
    try:
        shape = header["geometry"]
        base = Base(
            quant=header["quant"], model=header["model"], weights_hash=header["weights_hash"],
            native_top_k=header["native_top_k"], **{k: shape[k] for k in ("layers", "experts", "hidden")},
        )  # fmt: skip
        plan = Plan(base.layers, header["top_k"], tuple(header["consumers"]), header["first_token"])
        made = Artefact(base, plan, heads, served, header["provenance"])
    except (UsageError, KeyError, TypeError, IndexError) as error:
        raise broken(folder, str(error)) from None
    if served and made.rank != header["rank"]:
        raise broken(folder / LORA, f"adapters of rank {made.rank}, the header says {header['rank']}")
    return made


def check(artefact: Artefact, target: Target, top_k: int) -> None:
    """Refuse an artefact of another model, other weights or another number of experts per token."""
    base, shape = artefact.base, target.geometry
    pairs = {
        "weights": (base.weights_hash, target.weights_hash),
        "layers": (base.layers, shape.layers),
        "experts": (base.experts, shape.experts),
        "hidden size": (base.hidden, shape.hidden),
        "K": (artefact.plan.top_k, top_k),
    }
    require_same("edge0", base.model, target.name, pairs, _command(target, top_k))


def find(target: Target, top_k: int) -> Path:
    """The folder of the artefact for these weights and ``top_k``: the user's own first, then the shipped ones."""
    known = []
    for folder, header in stored("edge0", __package__, PREROUTER, NEEDS):
        if header["weights_hash"] == target.weights_hash:
            if header["top_k"] == top_k:
                return folder
            known.append(header["top_k"])
    have = f"those for this model have K {', '.join(map(str, sorted(set(known))))}" if known else "none for this model"
    raise UsageError(f"edge0: no heads for {target.name} with K {top_k} ({have}); make them: {_command(target, top_k)}")


def paired(sides: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """``<name>.lora_A`` and ``<name>.lora_B`` as name -> (A, B); a side alone or another key is an error."""
    names = dict.fromkeys(key.rpartition(".lora_")[0] for key in sides)
    whole = {f"{name}.lora_{side}" for name in names for side in "AB"}
    if odd := sorted(whole.symmetric_difference(sides)):
        raise UsageError(f"adapters come as NAME.lora_A with NAME.lora_B; not so: {', '.join(odd[:3])}")
    return {name: (sides[f"{name}.lora_A"], sides[f"{name}.lora_B"]) for name in names}


def _header(artefact: Artefact, kind: str) -> dict[str, Any]:
    base, plan = dataclasses.asdict(artefact.base), artefact.plan
    return {
        "kind": kind,
        "geometry": {name: base.pop(name) for name in ("layers", "experts", "hidden")},
        **base,
        "top_k": plan.top_k,
        "consumers": list(plan.consumers),
        "first_token": plan.first_token,
        "rank": artefact.rank,
        "alpha": artefact.adapters.scale * artefact.rank if artefact.adapters else 0.0,
        "provenance": dict(artefact.provenance),
    }


def _read(file: Path, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    header, tensors = read(file, NEEDS)
    if header["kind"] != kind:
        raise broken(file, f"it is a {header['kind']} file")
    return header, tensors


def _command(target: Target, top_k: int) -> str:
    return f"moebench prepare system=edge0 model={target.word} k={top_k}"
