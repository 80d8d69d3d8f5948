"""What hooks and loop take under a system: measured replays of the shipped model's routing, and runs of that model.

Real reads stand between the hooks, as in runs: without them caches stay warm, and a hook takes a fraction. So it is
with the loop where a model computes. Knows the harness and the registry, and by name who reads nothing and who all.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from moebench.config import QualityConfig, RunConfig, WorkloadConfig
from moebench.errors import MoebenchError
from moebench.geometry import EMBEDDED
from moebench.harness.cell import run_cell
from moebench.harness.plan import plan
from moebench.plugins import Registry, load_plugins
from moebench.probes.samples import Samples
from moebench.trace import format as trace_format

TRACE = "traces/held_out.safetensors"
SEQUENCES, BUDGET, WARMUP, ENGINE = 2, "0.5", 16, "direct"
REQUESTS, NEW_TOKENS = 1, 48
NOTHING, ALL = "resident", "ondemand"  # what these systems read
ANY = "m4pro"  # declares a machine, as a plan needs; what is measured is this one


@dataclass(frozen=True)
class Taken:
    """Of one run: microseconds of a hook, of the loop itself for a token, and experts loaded for a token."""

    hook_us: float
    loop_us: float
    loads: float


@dataclass
class Runs:
    """What runs of each system took, one of each a turn, and why one could not be run."""

    taken: dict[str, list[Taken]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def hooks(self) -> dict[str, Samples]:
        """Microseconds of a hook by system."""
        return {name: Samples(tuple(one.hook_us for one in runs)) for name, runs in self.taken.items()}


def run_all(turns: int, computes: bool) -> Runs:
    """Every system in turn: a replay, or a run in which the model ``computes``."""
    registry, found = load_plugins(quiet=True), Runs()
    with tempfile.TemporaryDirectory() as folder:
        whole = trace_format.load(str(resources.files("moebench.models.tinymoe").joinpath(TRACE)))
        path = whole.take(slice(0, int(whole.sequence_starts[SEQUENCES]))).save(Path(folder) / "part.safetensors")
        work = WorkloadConfig("trace", "trace", str(path))
        if computes:
            work = WorkloadConfig("prompts", "prompts", requests=REQUESTS, new_tokens=NEW_TOKENS)
        for _ in range(turns):
            for name in [name for name in registry.systems if name not in found.refused]:
                try:
                    found.taken.setdefault(name, []).append(_once(name, work, registry))
                except MoebenchError as error:
                    found.refused[name] = str(error)
                    found.taken.pop(name, None)
    return found


def colder(replays: Runs, live: Runs, layers: int) -> tuple[Samples, Samples]:
    """Microseconds that the loop's own time grows by where a model computes between its parts: for a layer, of runs
    that read nothing, and for an expert that is loaded, of runs that read all; raises where one of them did not run.
    """
    for runs in (replays, live):
        if missing := {NOTHING, ALL} - set(runs.taken):
            raise MoebenchError(f"{min(missing)} could not be run")
    layer, load = [], []
    for at in range(len(live.taken[ALL])):
        more = {name: live.taken[name][at].loop_us - replays.taken[name][at].loop_us for name in (NOTHING, ALL)}
        layer.append(max(0.0, more[NOTHING]) / layers)
        load.append(max(0.0, more[ALL] - more[NOTHING]) / live.taken[ALL][at].loads)
    return Samples(tuple(layer)), Samples(tuple(load))


def _once(name: str, work: WorkloadConfig, registry: Registry) -> Taken:
    spec = registry.system(name)
    config = RunConfig(
        name, ANY, spec.config(), EMBEDDED, work, budget=BUDGET, mode="model", engine=spec.engine or ENGINE,
        quality=QualityConfig("none"), warmup_tokens=WARMUP,
    )  # fmt: skip
    (cell,) = plan(config, registry)
    row = run_cell(replace(cell, clock="wall", why="calibration"), registry)
    hooks_us, calls = (row.volatile.get(f"{what}_per_token", 0) for what in ("hook_us", "hook_calls"))
    split: dict[str, float] = row.details["split_ms_per_token"]
    loads = row.metrics["reads_per_token"].value or 0.0
    return Taken(hooks_us / calls if calls else 0.0, max(0.0, 1e3 * split["overhead"] - hooks_us), loads)
