"""A tiny geometry and machine that run through the whole harness, for its tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moebench import plugins

MINI = {
    "name": "mini",
    "layers": 4,
    "experts": 16,
    "top_k": 2,
    "hidden": 64,
    "intermediate": 128,
    "other_parameters": 20000,
    "vocabulary": 100,
    "kv_bytes_per_token": 256,
    "fixed_state_bytes": 1000,
}
SHORT = {"workload.requests": 2, "workload.prompt_tokens": 8, "workload.new_tokens": 24, "warmup_tokens": 4}


@pytest.fixture
def mini(tmp_path, monkeypatch):
    """Register the geometry ``mini`` as a plugin would, in an empty home and with no foreign plugins."""
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(MINI))
    register_models(monkeypatch, tmp_path / "mini.yaml")


def register_models(monkeypatch, *paths: Path) -> None:
    """Offer geometries beside the shipped ones."""
    shipped = plugins._shipped

    def more(registry):
        shipped(registry)
        for path in paths:
            registry.add("models", path.stem, path, "test")

    monkeypatch.setattr(plugins, "_shipped", more)


def make_host(home: Path, **changes) -> Path:
    """Write ``hw=host`` as a calibration would, with numbers that nobody measured."""
    from importlib import resources

    text = resources.files("moebench.hardware_profiles").joinpath("m4pro.yaml").read_text()
    data = yaml.safe_load(text) | {"id": "host", "title": "this machine", "model": "", "match": {}, **changes}
    path = home / "hardware" / "host.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(data))
    return path
