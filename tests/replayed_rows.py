"""Replays the committed traces and prints a hash of every row: the same on every processor.

Run in processes of their own by ``test_replay_everywhere``, each with other kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from moebench import hardware
from moebench.config import RunConfig, WorkloadConfig
from moebench.geometry import Geometry
from moebench.harness.cell import run_cell
from moebench.harness.plan import Cell
from moebench.plugins import load_plugins
from moebench.result import to_json
from moebench.trace.format import load

TRACES = Path(__file__).parent.parent / "results" / "baseline" / "traces"
# tinymoe's name and experts, by which fitted files are found, but so large that reads take most of the time
SHAPE = Geometry(
    "tinymoe", layers=8, experts=32, top_k=4, hidden=4096, intermediate=2048, other_parameters=500_000_000,
    vocabulary=384, kv_bytes_per_token=2048,
)  # fmt: skip
RECORDED = {"edge0": "tinymoe-edge0", "bigmomo": "tinymoe-bigmomo"}


def replayed(system: str) -> dict:
    """The row of a system as plain data, without what says where and when it ran."""
    registry = load_plugins()
    spec = registry.system(system)
    trace = load(TRACES / f"{RECORDED.get(system, 'tinymoe')}.safetensors")
    path = Path(os.environ["MOEBENCH_HOME"]) / f"{system}.safetensors"
    trace.take(slice(0, int(trace.sequence_starts[2]))).save(path)  # two requests
    config = RunConfig(
        system, "m4pro", spec.config(), "tinymoe", WorkloadConfig("trace", path=str(path)), scope=spec.scope, chunk=32
    )
    profile = hardware.load(registry.hardware_path("m4pro"))
    engine = spec.engine or profile.engine
    cell = Cell(config, spec, profile, "virtual", "", engine, geometry=replace(SHAPE, quant=config.quant))
    data = json.loads(to_json(run_cell(cell, registry)))
    return {name: value for name, value in data.items() if name not in ("id", "environment", "volatile", "config")}


def digest(rows: dict) -> str:
    """Of rows as ``replayed`` gives them."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    print(json.dumps({name: digest(replayed(name)) for name in sys.argv[1:]}))
