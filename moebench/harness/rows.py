"""Rows of cells: of what ran, of what failed, and of what others published.

Knows sessions and metrics; runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moebench import machine
from moebench.config import RunConfig
from moebench.harness import environment, figures
from moebench.harness.blame import reason
from moebench.harness.plan import Cell
from moebench.harness.session import Session
from moebench.result import Metric, Row, metric
from moebench.systemspec import Equipment, Published, SystemSpec

NAMELESS = ("trace", "synthetic")


def run_row(
    cell: Cell,
    runs: Sequence[Session],
    workload: dict,
    metrics: dict[str, Metric],
    cache_state: str,
    assumptions: list[str],
    equipment: Equipment,
) -> Row:
    """The row of a cell that ran, once or several times."""
    config = cell.config
    return Row(
        system=cell.spec.id,
        fidelity=cell.spec.fidelity(config.knobs),
        hw=config.hw,
        model=cell.model,
        workload_name=_workload_name(cell),
        config={**config.resolved(), "engine": cell.engine, "model": cell.model},
        environment={**machine.environment(), **environment.processors(cell)},
        workload=workload,
        protocol={
            "clock": cell.clock,
            "why": cell.why,
            "profile": cell.profile.digest,
            "warmup_tokens": config.warmup_tokens,
            "repeats": len(runs),
            "page_cache": cache_state,
            "slots": {t.name: t.slots for t in runs[0].experts.tiers},
            "counters": runs[-1].hooks.report(),
            "equipment": dict(equipment.files),
        },
        metrics=metrics,
        assumptions=(*assumptions, *environment.transferred(cell)),
        details=runs[0].anatomy.details(runs[0].experts.geometry, cell.live),
        volatile=runs[0].anatomy.hook_cost(),
    )


def _workload_name(cell: Cell) -> str:
    """What a row's workload is called: a trace by its file, unless it was given a name."""
    workload = cell.config.workload
    if cell.live:
        return "prompts"
    return Path(workload.path).stem if workload.kind == "trace" and workload.name in NAMELESS else workload.name


def published_rows(spec: SystemSpec, config: RunConfig, model: str) -> list[Row]:
    """What others published for this system, machine, model and these options: nothing here was run."""
    fitting = [found for found in spec.published if (found.hw, found.model) == (config.hw, model)]
    return [_published_row(spec, config, found) for found in fitting if found.where(config.knobs, config)]


def _published_row(spec: SystemSpec, config: RunConfig, found: Published) -> Row:
    metrics = {name: metric(name, None, None, 0, "the publication does not report it") for name in figures.TABLE}
    for name, (value, source) in found.figures().items():
        metrics[name] = metric(name, value, "published", source=source)
    return Row(
        system=spec.id,
        fidelity=spec.fidelity(config.knobs),
        hw=found.hw,
        model=found.model,
        workload_name="published",
        config={},
        environment={},
        workload={"kind": "published", "seed": 0, "hash": ""},
        protocol={"setting": found.setting},
        metrics=metrics,
        assumptions=(f"published figures: {found.setting}",),
    )


def failed_row(cell: Cell, error: Exception) -> Row:
    """A row for a cell that could not run: the error takes the place of the numbers, so that it never just drops
    out.
    """
    missing = {name: metric(name, None, None, 0, "the run failed") for name in figures.TABLE}
    return Row(
        system=cell.spec.id,
        fidelity=cell.spec.fidelity(cell.config.knobs),
        hw=cell.config.hw,
        model=cell.model,
        workload_name=_workload_name(cell),
        config={**cell.config.resolved(), "engine": cell.engine, "model": cell.model},
        environment=machine.environment(),
        workload={"kind": cell.config.workload.kind, "seed": cell.config.workload.seed, "hash": ""},
        protocol={"clock": cell.clock, "why": cell.why},
        metrics=missing,
        status="failed",
        error=reason(error),
    )
