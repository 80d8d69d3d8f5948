"""What one hook of a system takes is measured under real reads; a system that cannot run here is told, not guessed."""

from __future__ import annotations

import dataclasses

from moebench.errors import MoebenchError
from moebench.plugins import load_plugins
from moebench.probes import systems


def test_hooks_are_timed_by_system_and_what_cannot_run_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    registry = load_plugins(quiet=True)

    def refuse(config, run):
        raise MoebenchError("no files for it here")

    broken = dataclasses.replace(registry.systems["lfu"], make=refuse)
    registry.systems = {"lru": registry.systems["lru"], "lfu": broken, "resident": registry.systems["resident"]}
    monkeypatch.setattr(systems, "load_plugins", lambda quiet: registry)
    found, refused = systems.hook_calls(2)
    assert set(found) == {"lru", "resident"}
    assert len(found["lru"].values) == 2
    assert found["lru"].median > 0
    assert found["resident"].median == 0  # it has none that are called
    assert refused == {"lfu": "no files for it here"}
    assert systems.hook_calls(0) == ({}, {})
