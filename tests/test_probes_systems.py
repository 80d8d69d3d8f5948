"""What hooks and loop take under a system is measured in runs; a system that cannot run here is told, not guessed."""

from __future__ import annotations

import dataclasses

import pytest

from moebench.errors import MoebenchError
from moebench.plugins import load_plugins
from moebench.probes import systems
from moebench.probes.systems import Runs, Taken, colder


def test_hooks_are_timed_by_system_and_what_cannot_run_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    registry = load_plugins(quiet=True)

    def refuse(config, run):
        raise MoebenchError("no files for it here")

    broken = dataclasses.replace(registry.systems["lfu"], make=refuse)
    registry.systems = {"lru": registry.systems["lru"], "lfu": broken, "resident": registry.systems["resident"]}
    monkeypatch.setattr(systems, "load_plugins", lambda quiet: registry)
    for computes in (False, True):
        runs = systems.run_all(2, computes)
        hooks = runs.hooks()
        assert set(hooks) == {"lru", "resident"}
        assert len(hooks["lru"].values) == 2
        assert hooks["lru"].median > 0
        assert hooks["resident"].median == 0  # it has none that are called
        assert all(one.loop_us > 0 and one.loads > 0 for one in runs.taken["lru"])
        assert all(one.loads == 0 for one in runs.taken["resident"])
        assert runs.refused == {"lfu": "no files for it here"}
    assert systems.run_all(0, False).hooks() == {}


def runs(nothing, everything, loads=32.0):
    return Runs({"resident": [Taken(0.0, us, 0.0) for us in nothing], "ondemand": [
        Taken(0.0, us, loads) for us in everything
    ]})  # fmt: skip


def test_what_the_loop_takes_longer_where_a_model_computes_is_told_by_layer_and_by_load():
    layer, load = colder(runs([200, 210], [1600, 1500]), runs([520, 530], [2560, 2460]), 8)
    assert layer.values == (40, 40)
    assert load.values == (20, 20)
    layer, load = colder(runs([200], [1600]), runs([190], [1500]), 8)
    assert (layer.values, load.values) == ((0,), (0,))
    with pytest.raises(MoebenchError, match="ondemand could not be run"):
        colder(runs([200], [1600]), Runs({"resident": [Taken(0.0, 1.0, 0.0)]}), 8)
