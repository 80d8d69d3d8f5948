"""The shape of a Mixture-of-Experts model: how many experts, how large, and what a token costs.

A geometry is all that replay needs of a model. Layers are counted over MoE layers only (0 .. layers-1); an expert's
flat key is ``layer * experts + expert``. Knows no weights and no devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from moebench.arithmetic import Number, whole
from moebench.errors import UsageError
from moebench.units import align_up
from moebench.yamlfile import read_yaml

EMBEDDED = "tinymoe"
QUANT_BITS = {"none": 16.0, "int8": 8.0, "int4": 4.0}
SECTIONS = ("parts", "config", "published", "context_flops")  # of a geometry's file, beside the fields
FORMULAS = ("kv_bytes_per_token", "fixed_state_bytes")  # fields that a file may give as a formula
COUNTS = (
    "other_parameters",
    "shared_experts",
    "shared_intermediate",
    "dense_layers",
    "dense_intermediate",
    "vocabulary",
)
KINDS = {"int": (int, "a whole number"), "str": (str, "text"), "bool": (bool, "true or false")}


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
    weights. ``stored_bytes`` are the bytes of a routed expert that a pack holds, where no formula says them (0: one
    does): under quant ``stored``, where each tensor has bits of its own, and in bytes with more scales.
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
    stored_bytes: int = 0
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "hidden", "intermediate", "group"):
            if getattr(self, name) < 1:
                raise GeometryError(f"geometry {self.name}: {name} must be at least 1, got {getattr(self, name)}")
        for name in (*COUNTS, *FORMULAS):
            if getattr(self, name) < 0:
                raise GeometryError(f"geometry {self.name}: {name} must be at least 0, got {getattr(self, name)}")
        if self.top_k > self.experts:
            raise GeometryError(f"geometry {self.name}: top_k {self.top_k} exceeds experts {self.experts}")
        if self.matrices not in (1, 3):
            raise GeometryError(f"geometry {self.name}: matrices must be 3, or 1 for a single one, got {self.matrices}")
        if self.quant not in (*QUANT_BITS, "stored"):
            raise GeometryError(f"geometry {self.name}: quant {self.quant!r} is not one of {', '.join(QUANT_BITS)}")
        if self.quant == "stored" and not self.stored_bytes:
            raise GeometryError(
                f"quant=stored keeps a quantised checkpoint's codes; {self.name} is a geometry: say int4, int8 or none"
            )

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per expert weight: q plus a bf16 scale and a bf16 bias per group (int4), one scale a row
        (int8); the mean where the bytes are those of a pack.
        """
        if self.stored_bytes:
            return 8 * self.stored_bytes / self.expert_parameters
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
        if self.stored_bytes:
            return self.stored_bytes
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
    def shared_parameters(self) -> int:
        """Parameters of all shared experts, three matrices each."""
        return self.layers * 3 * self.hidden * self.shared_intermediate * self.shared_experts

    @property
    def dense_block_parameters(self) -> int:
        """Parameters of the blocks that stand in the place of experts in the first layers."""
        return self.dense_layers * 3 * self.hidden * self.dense_intermediate

    @property
    def dense_parameters(self) -> int:
        """Always-resident parameters: everything but the routed experts."""
        return self.other_parameters + self.shared_parameters + self.dense_block_parameters

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

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        return self.keys * self.expert_parameters + self.dense_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: all always-resident ones, embeddings too, and its own routed experts."""
        return self.dense_parameters + self.layers * self.top_k * self.expert_parameters

    @property
    def dense_flops_per_token(self) -> int:
        """Multiply-adds counted twice, over all always-resident parameters but an input embedding that is looked up."""
        return 2 * (self.dense_parameters - (0 if self.tied else self.vocabulary * self.hidden))

    def expert_flops_per_row(self) -> float:
        """FLOPs of one routed expert for one token row: 2 * 3 * hidden * intermediate."""
        return 2.0 * self.expert_parameters


def embedded_folder() -> Path:
    """The checkpoint that ships with moebench."""
    return Path(str(resources.files("moebench.models.tinymoe"))) / "checkpoint"


def load(path: str | Path) -> Geometry:
    """Read a geometry from a YAML file; unknown and missing keys are errors that list the valid ones."""
    try:
        data = read_yaml(path)
    except ValueError as error:
        raise GeometryError(str(error)) from None
    return from_dict(data, where=str(path))


def from_dict(data: Any, where: str = "geometry") -> Geometry:
    """Build a geometry from parsed YAML, rejecting unknown or missing keys by name and values of another kind.

    ``other_parameters`` may be given as ``parts``, formulas by name that are added up.
    """
    if not isinstance(data, dict):
        raise GeometryError(f"{where}: expected a mapping of geometry fields")
    known = {*Geometry.__dataclass_fields__, *SECTIONS}
    if unknown := {str(key)[:40] for key in data if key not in known}:
        raise GeometryError(f"{where}: unknown field {', '.join(sorted(unknown))}; valid: {', '.join(sorted(known))}")
    fields = {key: value for key, value in data.items() if key not in SECTIONS}
    try:
        names = formula_names(data)
        for key in set(FORMULAS) & set(fields):
            fields[key] = whole(fields[key], names)
        if "parts" in data:
            if "other_parameters" in data:
                raise UsageError("other_parameters is the sum of parts; give one of them")
            fields["other_parameters"] = sum(parts(data).values())
        for key, value in fields.items():
            _check_kind(key, value)
        return Geometry(**fields)
    except (TypeError, UsageError) as error:
        raise GeometryError(f"{where}: {error}") from None


def parts(data: Mapping[str, Any]) -> dict[str, int]:
    """Parameters of each term of a file's ``parts``, in its order."""
    given, names = data["parts"], formula_names(data)
    if not isinstance(given, dict):
        raise UsageError("parts must be a mapping of names to formulas")
    return {str(name): whole(formula, names) for name, formula in given.items()}


def formula_names(data: Mapping[str, Any]) -> dict[str, Number]:
    """What a formula of a geometry's file may name: its fields and the numbers of its ``config``."""
    config = data.get("config", {})
    if not isinstance(config, dict):
        raise UsageError("config must be a mapping, as config.json is")
    if config and type(config.get("model_type")) is not str:
        raise UsageError("config lacks model_type, the family's name in transformers")
    return {
        str(key): value for source in (config, data) for key, value in source.items() if type(value) in (int, float)
    }


def _check_kind(key: str, value: Any) -> None:
    if key == "sources":
        good, text = isinstance(value, dict) and all(type(part) is str for part in (*value, *value.values())), "texts"
    else:
        kind, text = KINDS[str(Geometry.__dataclass_fields__[key].type)]
        good = type(value) is kind
    if not good:
        raise UsageError(f"{key} must be {text}, got {str(value)[:60]!r}")
