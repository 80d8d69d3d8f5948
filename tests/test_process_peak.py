"""A measured run with budget B holds B of expert bytes and no more: by its ledger, and by its process's own peak."""

from __future__ import annotations

import pytest
import yaml
from harness_fixtures import MINI, make_host, plugin  # noqa: F401 - a fixture

import moebench
from moebench.geometry import Geometry
from moebench.store.pack import Pack
from moebench.units import GIB, MIB

LARGE = {**MINI, "name": "large", "layers": 6, "experts": 32, "hidden": 1024, "intermediate": 1024}
PLUGIN = """
from pathlib import Path
from moebench.hookspecs import hookimpl

@hookimpl
def register_models(register):
    register(Path(__file__).with_name("large.yaml"))
"""
BUDGET = 24 * MIB
ALLOWANCE = 4 * MIB  # allocator and threads differ by that much from run to run
RUN = {
    "hw": "host", "model": "large", "system": "lru", "workload.requests": 2, "workload.prompt_tokens": 8,
    "workload.new_tokens": 24, "warmup_tokens": 2,
}  # fmt: skip


@pytest.fixture
def large(plugin, tmp_path):  # noqa: F811
    """A machine and a geometry whose experts take more than ten times the budget."""
    make_host(tmp_path / "home")
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(LARGE))
    plugin("large", PLUGIN)
    return Geometry(**LARGE)


def peak(budget: int, engine: str):
    (row,) = moebench.run(**RUN, engine=engine, budget=f"{budget}B")
    assert row.status == "ok", row.error
    return row, row.metrics["process_peak_gib"].value * GIB


@pytest.mark.parametrize("engine", ["pread", "direct"])
def test_the_process_grows_by_the_budget_and_not_by_the_pack(large, tmp_path, engine):
    assert large.routed_bytes > 10 * BUDGET
    least = 4 * MIB + large.top_k * large.slot_bytes  # slots for one token and the engine's buffers
    peak(least, engine)  # writes the pack
    (made,) = (path for path in (tmp_path / "home" / "packs").glob("random-large-*") if path.is_dir())
    assert Pack.open(made).file_path.stat().st_size > 10 * BUDGET
    _, base = peak(least, engine)
    row, grown = peak(BUDGET, engine)
    _, everything = peak(10 * BUDGET, engine)
    assert grown - base <= BUDGET - least + ALLOWANCE
    assert everything - grown > 4 * BUDGET  # a larger budget does show
    # the ledger of a replay that only reads: expert slots and the engine's buffers, no more than the budget
    slots = row.protocol["slots"]["device"]
    experts = round(row.metrics["peak_active_gib"].value * GIB)
    assert slots * large.slot_bytes <= experts <= BUDGET
    assert experts + large.slot_bytes > BUDGET
