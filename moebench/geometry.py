"""The shape of a Mixture-of-Experts model: how many experts, how large, and what a token costs.

A geometry is all that replay needs of a model. Layers are counted over MoE layers only (0 .. layers-1); an expert's
flat key is ``layer * experts + expert``. Knows no weights and no devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from moebench.errors import UsageError
from moebench.units import align_up

EMBEDDED = "tinymoe"
QUANT_BITS = {"none": 16.0, "int8": 8.0, "int4": 4.0}


class GeometryError(UsageError):
    """A model geometry that contradicts itself or is not known."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one MoE model; every derived byte and FLOP count has its formula here.

    ``other_parameters`` counts what is neither a routed expert nor a shared expert: embeddings, attention, routers,
    norms. ``kv_bytes_per_token`` is the state that grows with context, over all layers; ``fixed_state_bytes`` the state
    that does not (recurrent and convolution states).
    ``matrices`` of [intermediate, hidden] make an expert: gate, up and down, or a single one where that is the unit of
    caching. ``tied``: input embedding and head are one matrix. Shared experts are always resident and count as dense
    weights.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    other_parameters: int
    shared_experts: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    quant: str = "int4"
    group: int = 64
    kv_bytes_per_token: int = 0
    fixed_state_bytes: int = 0
    vocabulary: int = 0
    tied: bool = False
    matrices: int = 3
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "hidden", "intermediate"):
            if getattr(self, name) < 1:
                raise GeometryError(f"geometry {self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.top_k > self.experts:
            raise GeometryError(f"geometry {self.name}: top_k {self.top_k} exceeds experts {self.experts}")
        if self.matrices not in (1, 3):
            raise GeometryError(f"geometry {self.name}: matrices must be 3, or 1 for a single one, got {self.matrices}")
        if self.quant not in QUANT_BITS:
            raise GeometryError(f"geometry {self.name}: quant {self.quant!r} is not one of {', '.join(QUANT_BITS)}")

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per expert weight: q plus a bf16 scale and a bf16 bias per group (int4), one scale a row
        (int8).
        """
        if self.quant == "int4":
            return 4.0 + 32.0 / self.group
        return QUANT_BITS[self.quant]

    @property
    def expert_parameters(self) -> int:
        """Gate, up and down projections of one routed expert: 3 * hidden * intermediate."""
        return self.matrices * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert on storage: parameters * bits per weight / 8, plus the row scales of int8."""
        scales = 2 * self.intermediate + self.hidden if self.matrices == 3 else self.intermediate
        rows = 2 * scales if self.quant == "int8" else 0
        return int(self.expert_parameters * self.bits_per_weight / 8) + rows

    @property
    def slot_bytes(self) -> int:
        """Bytes one cache slot takes: the expert rounded up to whole 4096-byte pages, so that direct reads fit."""
        return align_up(self.expert_bytes)

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts; a fractional budget refers to this."""
        return self.layers * self.experts * self.expert_bytes

    @property
    def dense_parameters(self) -> int:
        """Always-resident parameters: everything but the routed experts."""
        shared = self.layers * 3 * self.hidden * self.shared_intermediate * self.shared_experts
        return self.other_parameters + shared + self.dense_layers * 3 * self.hidden * self.dense_intermediate

    @property
    def dense_bytes(self) -> int:
        """Bytes of the always-resident parameters at this quantisation's bits per weight."""
        return int(self.dense_parameters * self.bits_per_weight / 8)

    @property
    def keys(self) -> int:
        """Number of (layer, expert) pairs."""
        return self.layers * self.experts

    def key(self, layer: int, expert: int) -> int:
        """The flat key of one expert."""
        return layer * self.experts + expert

    def dense_flops_per_token(self) -> float:
        """Multiply-adds counted twice, over all always-resident parameters."""
        return 2.0 * self.dense_parameters

    def expert_flops_per_row(self) -> float:
        """FLOPs of one routed expert for one token row: 2 * 3 * hidden * intermediate."""
        return 2.0 * self.expert_parameters


def embedded_folder() -> Path:
    """The checkpoint that ships with moebench."""
    return Path(str(resources.files("moebench.models.tinymoe"))) / "checkpoint"


def load(path: str | Path) -> Geometry:
    """Read a geometry from a YAML file; unknown and missing keys are errors that list the valid ones."""
    try:
        return from_dict(yaml.safe_load(Path(path).read_text()), where=str(path))
    except (OSError, yaml.YAMLError) as error:
        raise GeometryError(f"{path}: {' '.join(str(error).split())}") from None


def from_dict(data: Any, where: str = "geometry") -> Geometry:
    """Build a geometry from parsed YAML, rejecting unknown or missing keys by name."""
    if not isinstance(data, dict):
        raise GeometryError(f"{where}: expected a mapping of geometry fields")
    known = set(Geometry.__dataclass_fields__)
    if unknown := set(data) - known:
        raise GeometryError(f"{where}: unknown field {', '.join(sorted(unknown))}; valid: {', '.join(sorted(known))}")
    try:
        return Geometry(**data)
    except TypeError as error:
        raise GeometryError(f"{where}: {error}") from None
