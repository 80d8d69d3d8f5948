"""What one hook of each system takes: a measured replay of the shipped model's routing under every one of them, and a
run of the model under those that bring something of their own to it, whose hooks may compute.

Real reads stand between the hooks, as in runs: without them caches stay warm, and a hook takes a fraction. Knows the
harness and the registry; knows no system by name.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
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
ANY = "m4pro"  # declares a machine, as a plan needs; what is measured is this one


def hook_calls(turns: int, computes: bool = False) -> tuple[dict[str, Samples], dict[str, str]]:
    """Microseconds of a hook by system, one sample a turn, systems in turn; and why one could not be measured. Where
    the model ``computes``, of the systems that bring something to it.
    """
    registry = load_plugins(quiet=True)
    found: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = trace_format.load(str(resources.files("moebench.models.tinymoe").joinpath(TRACE)))
        path = whole.take(slice(0, int(whole.sequence_starts[SEQUENCES]))).save(Path(folder) / "part.safetensors")
        work = WorkloadConfig("trace", "trace", str(path))
        if computes:
            work = WorkloadConfig("prompts", "prompts", requests=REQUESTS, new_tokens=NEW_TOKENS)
        wanted = [name for name, spec in registry.systems.items() if not computes or spec.brings]
        for _ in range(turns):
            for name in [name for name in wanted if name not in refused]:
                try:
                    found.setdefault(name, []).append(_once(name, work, registry))
                except MoebenchError as error:
                    refused[name] = str(error)
    return {name: Samples(tuple(us)) for name, us in found.items() if name not in refused}, refused


def _once(name: str, work: WorkloadConfig, registry: Registry) -> float:
    spec = registry.system(name)
    config = RunConfig(
        name, ANY, spec.config(), EMBEDDED, work, budget=BUDGET, mode="model", engine=spec.engine or ENGINE,
        quality=QualityConfig("none"), warmup_tokens=WARMUP,
    )  # fmt: skip
    (cell,) = plan(config, registry)
    took = run_cell(replace(cell, clock="wall", why="calibration"), registry).volatile
    calls = took.get("hook_calls_per_token", 0)
    return took["hook_us_per_token"] / calls if calls else 0.0
