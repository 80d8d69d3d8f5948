"""A tiny geometry and machine that run through the whole harness, for its tests."""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path

import pytest
import yaml

from moebench.machine import detect

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
REPLAY = {"model": "mini", "hw": "m4pro", **SHORT}
WORDS = [f"{key}={value}" for key, value in REPLAY.items()]
LIVE = {
    "model": "tinymoe", "quality": "none", "numerics": "fast", "warmup_tokens": 2,
    "workload.requests": 2, "workload.new_tokens": 6,
}  # fmt: skip
PLUGIN = """
from pathlib import Path
from moebench.hookspecs import hookimpl

@hookimpl
def register_models(register):
    register(Path(__file__).with_name("mini.yaml"))
"""


def install_plugin(folder: Path, name: str, source: str) -> str:
    """Make a module look like an installed distribution with one ``moebench`` entry point; returns the module's name.

    ``folder`` must stand on the search path.
    """
    module = f"mb_test_{name}"
    (folder / f"{module}.py").write_text(source)
    info = folder / f"dist_{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[moebench]\n{name} = {module}\n")
    return module


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Installs plugins by name and source for one test, in an empty home; no others are loaded."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setattr("moebench.plugins.WARNED", set())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made: dict[str, str] = {}

    def install(name: str, source: str) -> None:
        made[name] = install_plugin(tmp_path, name, source)
        monkeypatch.setenv("MOEBENCH_PLUGINS", ",".join(made))

    yield install
    for module in made.values():
        sys.modules.pop(module, None)


@pytest.fixture
def mini(plugin, tmp_path):
    """The geometry ``mini``, registered by a plugin, also in processes that a run starts."""
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(MINI))
    plugin("mini", PLUGIN)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Packs of the embedded model, made once for all tests of a file."""
    return tmp_path_factory.mktemp("packs")


@pytest.fixture
def live(mini, packs, tmp_path, monkeypatch):
    """An empty home that shares its packs with the other tests."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "packs").symlink_to(packs)


def error_line(capsys) -> str:
    """What a command that was used wrongly says."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moebench: error")]
    return line


def make_host(home: Path, **changes) -> Path:
    """Write ``hw=host`` as a calibration would, with numbers that nobody measured."""
    text = resources.files("moebench.hardware_profiles").joinpath("m4pro.yaml").read_text()
    here = {"cpu": f"^{re.escape(detect().cpu)}$"}
    data = yaml.safe_load(text) | {"id": "host", "title": "this machine", "model": "", "match": here, **changes}
    path = home / "hardware" / "host.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(data))
    return path
