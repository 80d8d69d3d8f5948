"""Parameter files of synthetic routing: per geometry, what the generator is given, to which statistics, from where.

Knows the files' form and which geometry has one; knows not how a fit is found (``scripts/fit_traces.py``) and not what
a statistic means (``moebench.residency.targets``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from moebench.errors import UsageError
from moebench.trace.format import Trace
from moebench.trace.synthetic import SIZES, SyntheticSpec, synthesize

LAWS = tuple(f.name for f in fields(SyntheticSpec) if f.name not in SIZES)
BASES = ("measured", "published", "borrowed")


class FitError(UsageError):
    """A parameter file that contradicts itself or is not known."""


@dataclass(frozen=True)
class Target:
    """One statistic that is matched: its value and source, how far off is still a match, and what was reached."""

    statistic: str
    value: float
    tolerance: float
    source: str
    reached: float | None = None

    def __post_init__(self) -> None:
        if not self.tolerance > 0 or not self.source:
            raise FitError(f"target {self.statistic}: needs a tolerance above 0 and a source")


@dataclass(frozen=True)
class Fit:
    """The parameters of one geometry's routing. ``shape`` is that of the traces the statistics are taken of.

    ``basis``: measured on a real trace, published by others, or borrowed from the statistics of ``borrowed_from``
    where nothing is published for this geometry. ``start``: the geometry whose fit the search began at, where it was
    not the script's own start. ``free``: what the search changed, in ``evaluations`` steps; the rest is the start's.
    """

    model: str
    basis: str
    note: str
    shape: dict[str, int]
    free: tuple[str, ...]
    parameters: dict[str, float]
    targets: tuple[Target, ...] = ()
    borrowed_from: str = ""
    start: str = ""
    evaluations: int = 0
    left_out: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise FitError(f"traces of {self.model}: basis {self.basis!r} is not one of {', '.join(BASES)}")
        if (self.basis == "borrowed") != bool(self.borrowed_from):
            raise FitError(f"traces of {self.model}: borrowed_from stands with basis borrowed, and only there")
        if odd := [name for name in (*self.free, *self.parameters) if name not in LAWS]:
            raise FitError(f"traces of {self.model}: {odd[0]!r} is not one of {', '.join(LAWS)}")
        if odd := [name for name in self.shape if name not in SIZES]:
            raise FitError(f"traces of {self.model}: shape has {odd[0]!r}, which is not one of {', '.join(SIZES)}")

    def spec(self, **sizes: int) -> SyntheticSpec:
        """The generator's input for a trace of these sizes, by default those of the fit."""
        laws: dict[str, Any] = dict(self.parameters)
        return SyntheticSpec(**{**self.shape, **sizes}, **laws)

    @property
    def assumption(self) -> str:
        """What a row says of routing that this fit made."""
        named = [target.statistic for target in self.targets]
        some = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        if not named:
            return f"with the parameters of {self.borrowed_from}, nothing being published for {self.model}"
        if self.basis == "borrowed":
            return f"fitted to {some} of {self.borrowed_from}"
        return f"fitted to {self.basis} {some}"


def load(path: Path) -> Fit:
    """Read a parameter file; what is wrong with it is one line."""
    try:
        data = yaml.safe_load(path.read_text())
        targets = tuple(Target(name, **about) for name, about in (data.pop("targets", None) or {}).items())
        listed: dict[str, Any] = {name: tuple(data.pop(name, None) or ()) for name in ("free", "left_out")}
        return Fit(**data, **listed, targets=targets)
    except FitError as error:
        raise FitError(f"{path}: {error}") from None
    except (OSError, yaml.YAMLError, TypeError, AttributeError) as error:
        raise FitError(f"{path}: {' '.join(str(error).split())}") from None


def folder() -> Path:
    """Where the parameter files that ship lie."""
    return Path(str(resources.files("moebench.configs"))) / "traces"


def names() -> list[str]:
    """Geometries that have a parameter file."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def of_model(name: str) -> Fit | None:
    """The fit of a geometry by name, or None: then the generator's defaults are what there is."""
    path = folder() / f"{name}.yaml"
    return load(path) if path.is_file() else None


def synthetic(name: str, **sizes: int) -> Trace:
    """Synthetic routing of a geometry with the parameters of its file, else with the generator's defaults.

    ``metadata["fitted"]`` says which, as a row prints it.
    """
    fit = of_model(name)
    trace = synthesize(fit.spec(**sizes) if fit else SyntheticSpec(**sizes))
    said = fit.assumption if fit else f"with the general parameters, none being fitted to {name}"
    return replace(trace, metadata={**trace.metadata, "fitted": said})
