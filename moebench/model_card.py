"""A geometry's file in full: besides the geometry the terms it is summed from, the model's configuration, and figures
that others published, each beside what the formulas give.

Knows no model by name; builds and reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moebench import geometry
from moebench.arithmetic import Number, evaluate
from moebench.errors import UsageError
from moebench.geometry import Geometry, GeometryError
from moebench.units import GIB, KIB, MIB
from moebench.yamlfile import read_yaml

UNITS = {
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "bytes": 1,
    "MB": 10**6,
    "GB": 10**9,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
DERIVED = (
    "parameters",
    "active_parameters",
    "expert_parameters",
    "dense_parameters",
    "expert_bytes",
    "routed_bytes",
    "dense_bytes",
)
ENTRY = ("what", "value", "formula", "source", "why")


@dataclass(frozen=True)
class Published:
    """A figure of a publication and what the formula gives in its unit; ``why`` says what makes a large gap."""

    what: str
    value: float
    unit: str
    formula: str
    computed: float
    source: str
    why: str = ""

    @property
    def gap(self) -> float:
        """(computed - published) / published."""
        return self.computed / self.value - 1


@dataclass(frozen=True)
class ModelCard:
    """One file of ``models/``; ``data`` is its plain content."""

    geometry: Geometry
    data: Mapping[str, Any]

    @cached_property
    def parts(self) -> dict[str, int]:
        """Parameters of each named term of ``other_parameters``; empty where the file gives the sum alone."""
        return geometry.parts(self.data) if "parts" in self.data else {}

    @property
    def config(self) -> dict[str, Any]:
        """The model's ``config.json`` as far as it is known, for transformers; empty where its family is not there."""
        return dict(self.data.get("config", {}))

    @cached_property
    def names(self) -> dict[str, Number]:
        """What formulas may name: fields, numbers of the configuration, derived sizes and parts."""
        fields = [name for name, field in Geometry.__dataclass_fields__.items() if field.type == "int"]
        sizes = {name: getattr(self.geometry, name) for name in (*fields, *DERIVED)}
        return {**geometry.formula_names(self.data), **sizes, **self.parts}

    @cached_property
    def context_flops(self) -> Number:
        """FLOPs that attention adds to a token for each token before it; 0 where the file does not say."""
        return evaluate(self.data.get("context_flops", 0), self.names)

    @cached_property
    def published(self) -> tuple[Published, ...]:
        """The figures of others, in the file's order; raises ``UsageError`` where one is not complete."""
        entries = self.data.get("published", [])
        if not isinstance(entries, list):
            raise UsageError("published must be a list")
        return tuple(self._published(entry) for entry in entries)

    def _published(self, entry: Any) -> Published:
        if not isinstance(entry, dict) or not {*ENTRY[:4]} <= set(entry) <= set(ENTRY):
            raise UsageError(f"an entry of published has {', '.join(ENTRY[:4])} and perhaps why")
        number, _, unit = str(entry["value"]).partition(" ")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if unit not in UNITS or not 0 < value < float("inf"):
            raise UsageError(
                f"published value {str(entry['value'])[:40]!r} is not NUMBER UNIT; units: {', '.join(UNITS)}"
            )
        computed = evaluate(entry["formula"], self.names) / UNITS[unit]
        what, formula, source, why = (str(entry.get(key, "")) for key in ("what", "formula", "source", "why"))
        return Published(what, value, unit, formula, computed, source, why)


def load(path: str | Path) -> ModelCard:
    """Read and check a geometry's file, its formulas included; one line says what is wrong with it."""
    try:
        data = read_yaml(path)
    except ValueError as error:
        raise GeometryError(str(error)) from None
    card = ModelCard(geometry.from_dict(data, where=str(path)), data)
    try:
        _ = card.published, card.context_flops  # both are computed from formulas, which may be wrong
    except (UsageError, OverflowError) as error:
        raise GeometryError(f"{path}: {error}") from None
    return card
