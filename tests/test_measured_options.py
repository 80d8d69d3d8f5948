"""Options of measured runs alone: how many experts are read at a time, how many threads compute, how they wait."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import os
import sys

import pytest
from harness_fixtures import LIVE, REPLAY, live, make_host, mini, packs, plugin  # noqa: F401 - fixtures

import moebench
from moebench import machine
from moebench.errors import UsageError
from moebench.harness.isolate import isolated
from moebench.store import engine_threads, engine_uring


@pytest.fixture
def inline(monkeypatch, tmp_path):
    """Measured cells run in this process, on this machine."""
    make_host(tmp_path / "home")
    monkeypatch.setattr(sys.modules["moebench.harness.run"], "isolated", lambda work, *given: work(*given))


@pytest.mark.parametrize(("engine", "named"), [("direct", "threads"), ("pread", "threads"), ("uring", "depth")])
def test_depth_is_what_the_engine_reads_at_a_time(mini, inline, monkeypatch, engine, named):
    opened = []
    kinds = {
        "direct": engine_threads.DirectEngine,
        "pread": engine_threads.PreadEngine,
        "uring": engine_uring.UringEngine,
    }
    made = kinds[engine].__init__
    monkeypatch.setattr(
        kinds[engine], "__init__", lambda self, pack, **given: opened.append(given) or made(self, pack, **given)
    )
    (row,) = moebench.run(**{**REPLAY, "hw": "host", "system": "ssd_llama", "engine": engine, "depth": 3})
    assert row.status == "ok", row.error
    assert [given[named] for given in opened] == [3]
    assert row.config["depth"] == 3
    (row,) = moebench.run(**{**REPLAY, "hw": "host", "system": "ssd_llama", "engine": engine})
    assert named not in opened[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hw": "m4pro", "depth": 2}, "in a measured run"),
        ({"hw": "host", "depth": 2, "engine": "faulty"}, "direct"),
        ({"hw": "m4pro", "threads": 2}, "threads="),
        ({"hw": "host", "threads": 2}, "threads="),
        ({"hw": "host", "depth": -1}, "at least 0"),
    ],
)
def test_what_would_change_nothing_is_refused(mini, inline, options, said):
    with pytest.raises(UsageError, match=said):
        moebench.run(**{**REPLAY, "system": "lru", **options})


@pytest.mark.parametrize("asked", [0, 2])
def test_a_measured_run_computes_with_so_many_threads_and_says_so(live, inline, monkeypatch, asked):
    import torch

    told, before = [], torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(machine, "cores", lambda: 6)
    (row,) = moebench.run(**LIVE, hw="host", system="lru", threads=asked)
    assert row.status == "ok", row.error
    assert told[-1] == row.environment["threads"] == (asked or 5)
    (row,) = moebench.run(**LIVE, hw="m4pro", system="lru")
    assert told[-1] == 1
    assert "threads" not in row.environment
    assert torch.get_num_threads() == before


def seen() -> str | None:
    """What a process of a run is told of how OpenMP's threads wait."""
    return os.environ.get("OMP_WAIT_POLICY")


def test_threads_of_a_run_wait_without_spinning_unless_the_user_says_so(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert isolated(seen) == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert isolated(seen) == "ACTIVE"
