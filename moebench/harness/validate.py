"""Cells run twice, measured on this machine and modeled from its profile, for what forecasts are off by.

Measured cells take turns over their repeats, each in a process of its own; modeled ones run side by side before. Knows
configurations and rows; judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from statistics import median
from typing import Any

from moebench.config import QualityConfig, RunConfig, WorkloadConfig
from moebench.errors import MoebenchError
from moebench.geometry import EMBEDDED
from moebench.harness.compare import Arm, arms, run_arms
from moebench.harness.isolate import Nursery
from moebench.harness.relocation import overlays
from moebench.harness.run import planned
from moebench.plugins import Registry, load_plugins
from moebench.result import Row
from moebench.store.overlay import remove_dead
from moebench.systemspec import SystemSpec
from moebench.validation import TIMES, TRAFFIC, Compared

TRACE = "traces/held_out.safetensors"  # of the embedded model
ANY = "any"  # the budget of a system that ignores it


@dataclass(frozen=True)
class Kind:
    """One kind of cell: a model, what is asked of it, and how the same is modeled."""

    model: str
    workload: WorkloadConfig
    warmup: int
    modeled: str  # mode= of the forecast


def kinds(trace: str = "") -> dict[str, Kind]:
    """The kinds of cells by name; ``trace`` takes the place of the shipped model's routing."""
    path = trace or str(resources.files("moebench.models.tinymoe").joinpath(TRACE))
    return {
        "live": Kind("tinymoe", WorkloadConfig("prompts", "prompts", requests=2, new_tokens=64), 16, "model"),
        "replay": Kind("tinymoe", WorkloadConfig("trace", "trace", path), 16, "model_io"),
        "large": Kind("olmoe-1b-7b", WorkloadConfig(requests=1, prompt_tokens=4, new_tokens=20), 4, "model_io"),
    }


@dataclass(frozen=True)
class Pair:
    """A cell to be compared: how it is measured and how it is modeled."""

    kind: str
    spec: SystemSpec
    budget: str
    measured: Arm
    modeled: Arm


@dataclass
class Found:
    """What came of a pair so far."""

    rows: list[Row] = field(default_factory=list)
    modeled: Row | None = None
    errors: dict[str, str] = field(default_factory=dict)  # by side

    @property
    def failed(self) -> bool:
        """Whether measuring failed: again would be the same."""
        return "measured" in self.errors

    @property
    def error(self) -> str:
        """What went wrong on one side only."""
        return "; ".join(f"{side}: {text}" for side, text in self.errors.items()) if len(self.errors) == 1 else ""


def pairs(hw: str, wanted: dict[str, Kind], systems: Sequence[str], budgets: Sequence[str], registry: Registry,
          out: str) -> list[Pair]:  # fmt: skip
    """All cells; what cannot be planned raises before anything runs."""
    found = []
    for name, kind in wanted.items():
        for system in systems:
            spec = registry.system(system)
            own = spec.sizing == "budget" and spec.engine != "mmap"  # otherwise a budget changes nothing
            for budget in budgets if own else budgets[:1]:
                config = RunConfig(
                    system, hw, spec.config(), kind.model, kind.workload, budget=budget,
                    quality=QualityConfig("none"), mode="measure", warmup_tokens=kind.warmup, out=out,
                )  # fmt: skip
                (measured,) = arms([config], registry)
                (modeled,) = arms([replace(config, mode=kind.modeled)], registry)
                found.append(Pair(name, spec, budget if own else ANY, measured, modeled))
    return found


class Validation:
    """Runs all pairs and keeps what came of them."""

    def __init__(self, todo: Sequence[Pair], repeats: int, registry: Registry) -> None:
        self.pairs, self.repeats, self.registry = list(todo), repeats, registry
        self.found = [Found() for _ in self.pairs]

    def run(self, progress: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
        """Every row as it comes: the modeled ones, then the measured ones, repeat by repeat."""
        count = len(self.pairs)
        for number, (at, rows) in enumerate(run_arms([pair.modeled for pair in self.pairs]), 1):
            progress(f"modeled {number} of {count}: {self._name(at)}")
            self._keep(at, rows[0], modeled=True)
            yield rows[0]
        library = any(pair.measured.config.model == EMBEDDED for pair in self.pairs)
        with Nursery(warm_up, library) as fresh:
            for repeat in range(self.repeats):
                for at in range(count):
                    if self.found[at].failed:
                        continue
                    progress(f"measured {repeat + 1} of {self.repeats}, {at + 1} of {count}: {self._name(at)}")
                    row = self._measure(at, fresh)
                    if row is not None:
                        yield row

    def _measure(self, at: int, fresh: Nursery) -> Row | None:
        arm = self.pairs[at].measured
        try:
            row = fresh(planned, arm.config, arm.number, False, True)
        finally:  # whatever ended the process, its copy of a pack does not stay
            remove_dead(overlays())
        if isinstance(row, MoebenchError):
            self.found[at].errors["measured"] = str(row)
            return None
        self._keep(at, row, modeled=False)
        return row

    def _keep(self, at: int, row: Row, modeled: bool) -> None:
        found = self.found[at]
        if row.status == "failed":
            found.errors["modeled" if modeled else "measured"] = str(row.error)
        elif modeled:
            found.modeled = row
        else:
            found.rows.append(row)

    def _name(self, at: int) -> str:
        pair = self.pairs[at]
        return f"{pair.kind} {pair.spec.id} {pair.budget}"

    def compared(self) -> list[Compared]:
        """Every pair that ran, or failed on one side; one that failed on both alike is left out."""
        both = zip(self.pairs, self.found, strict=True)
        return [_compared(pair, found) for pair, found in both if len(found.errors) < 2]

    def unfit(self) -> list[str]:
        """What ran on neither side, and why: what cannot be here is forecast to be so."""
        ran = [(self._name(at), found.errors) for at, found in enumerate(self.found)]
        return [f"{name}: {errors['measured']}" for name, errors in ran if len(errors) == 2]


def warm_up(library: bool) -> None:
    """Load what cells need, in the process that theirs are children of; ``library``: what the embedded model needs."""
    load_plugins(quiet=True)
    if library:
        from moebench.backends import torch_geometry, torch_model  # noqa: F401 - to have them
        from moebench.geometry import embedded_folder
        from moebench.harness.assets import load_tokenizer

        load_tokenizer(embedded_folder())


def numbers(row: Row) -> dict[str, float]:
    """What is compared of a row. The speed of one that only reads is that of the loop: tokens over seconds of steps."""
    found = {name: row.metrics[name].value for name in (*TIMES, *TRAFFIC)}
    if found["decode_tok_s"] is None:
        steps: dict[str, Any] = row.details["steps"]
        found["decode_tok_s"] = 1e3 * sum(steps["tokens"]) / sum(steps["ms"])
    return {name: value for name, value in found.items() if value is not None}


def _compared(pair: Pair, found: Found) -> Compared:
    each = [numbers(row) for row in found.rows]
    names = set(each[0]).intersection(*each) if each else set()
    parts = [row.details["split_ms_per_token"] for row in found.rows]
    split = {"measured": {name: median(part[name] for part in parts) for name in parts[0]}} if parts else {}
    if found.modeled is not None:
        split["modeled"] = found.modeled.details["split_ms_per_token"]
    return Compared(
        pair.kind, pair.spec.id, pair.budget, pair.spec.timing_dependent or pair.spec.reads_ahead,
        measured={name: tuple(one[name] for one in each) for name in sorted(names)},
        modeled={} if found.modeled is None else numbers(found.modeled),
        parts=split,
        page_cache="; ".join(dict.fromkeys(str(row.protocol["page_cache"]) for row in found.rows)),
        error=found.error,
    )  # fmt: skip
