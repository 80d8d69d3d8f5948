"""Third parties register through the hooks of the built-in systems; a broken one costs one warning line."""

from __future__ import annotations

import sys
import textwrap

import pytest

from moebench.cli import main
from moebench.errors import UsageError
from moebench.plugins import BUILTIN, load_plugins
from moebench.systemspec import SystemSpec

GOOD = """
    from dataclasses import dataclass
    from pathlib import Path
    from moebench.hookspecs import hookimpl
    from moebench.systemspec import SystemSpec

    @dataclass(frozen=True)
    class Knobs:
        depth: int = 3

    @hookimpl
    def register_systems(register):
        register(SystemSpec("foreign", "Foreign", "from elsewhere", lambda config, run: None, config=Knobs))

    @hookimpl
    def register_hardware(register):
        register(Path(__file__).with_name("toaster.yaml"))

    @hookimpl
    def register_io(register):
        register("carrier_pigeon", lambda pack: None)
"""
MISSPELT = """
    from moebench.hookspecs import hookimpl

    @hookimpl
    def regster_systems(register):
        pass
"""
LATE = """
    from moebench.hookspecs import hookimpl
    from moebench.systemspec import SystemSpec

    @hookimpl
    def register_systems(register):
        register(SystemSpec("half_done", "Half", "never seen", lambda config, run: None))
        raise RuntimeError("out of luck")
"""
TWICE = """
    from moebench.hookspecs import hookimpl
    from moebench.systemspec import SystemSpec

    @hookimpl
    def register_systems(register):
        register(SystemSpec("lru", "Mine", "takes a name", lambda config, run: None))
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a module look like an installed distribution with one ``moebench`` entry point."""
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MOEBENCH_PLUGINS", raising=False)
    monkeypatch.setattr("moebench.plugins.WARNED", set())
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "toaster.yaml").write_text("id: [toaster")
    made = []

    def make(name: str, source: str) -> None:
        module = f"mb_test_{name}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"dist_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[moebench]\n{name} = {module}\n")
        made.append(module)

    yield make
    for module in made:
        sys.modules.pop(module, None)


def warnings(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line]


def test_an_installed_plugin_stands_in_the_list_with_its_origin(install, capsys):
    install("good", GOOD)
    assert main(["list", "systems", "engines", "-v"]) == 0
    shown = capsys.readouterr()
    line = next(line for line in shown.out.splitlines() if line.strip().startswith("foreign"))
    assert "dist-good 1.2" in line
    assert "system.depth=3" in shown.out
    assert "carrier_pigeon" in shown.out
    assert shown.err == ""


def test_a_plugin_that_cannot_be_imported_costs_one_line(install, capsys):
    install("good", GOOD)
    install("bad", "import a_module_that_is_not_there")
    registry = load_plugins()
    (line,) = warnings(capsys)
    assert line.startswith("moebench: warning: plugin bad (dist-bad 1.2)")
    assert "a_module_that_is_not_there" in line
    assert "foreign" in registry.systems


def test_a_misspelt_hook_is_named_with_the_valid_ones(install, capsys):
    install("typo", MISSPELT)
    load_plugins()
    (line,) = warnings(capsys)
    assert "regster_systems" in line
    assert "dist-typo" in line
    assert "register_systems" in line.replace("regster_systems", "")


def test_a_plugin_that_fails_half_way_leaves_nothing(install, capsys):
    install("late", LATE)
    registry = load_plugins()
    (line,) = warnings(capsys)
    assert "out of luck" in line
    assert "half_done" not in registry.systems
    assert not any("late" in owner for owner in registry.origin.values())


def test_a_name_that_is_taken_is_refused_and_the_first_owner_keeps_it(install, capsys):
    install("twice", TWICE)
    registry = load_plugins()
    (line,) = warnings(capsys)
    assert "lru" in line
    assert registry.systems["lru"].title != "Mine"


@pytest.mark.parametrize(("wanted", "seen"), [("", False), ("good", True), ("bad", False)])
def test_the_environment_chooses_which_plugins_load(install, capsys, monkeypatch, wanted, seen):
    install("good", GOOD)
    install("bad", "raise RuntimeError('loaded')")
    monkeypatch.setenv("MOEBENCH_PLUGINS", wanted)
    assert ("foreign" in load_plugins().systems) is seen
    assert len(warnings(capsys)) == (wanted == "bad")


def test_a_plugin_that_is_asked_for_and_missing_is_said(install, capsys, monkeypatch):
    install("good", GOOD)
    monkeypatch.setenv("MOEBENCH_PLUGINS", "god")
    load_plugins()
    (line,) = warnings(capsys)
    assert "'god'" in line
    assert "good" in line


def test_every_builtin_registers_something(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    registry = load_plugins()
    assert len(BUILTIN) >= 5
    assert {"lru", "slru", "belady", "resident", "ondemand"} <= set(registry.systems)
    assert {"mmap", "pread", "direct"} <= set(registry.engines)
    for spec in registry.systems.values():
        assert spec.fidelity(spec.config()) in ("exact", "advisory", "altered")


def test_a_users_own_profile_is_found_and_cannot_replace_a_shipped_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    monkeypatch.setattr("moebench.plugins.WARNED", set())
    shipped = load_plugins().hardware["m4pro"]
    folder = tmp_path / "hardware"
    folder.mkdir()
    for name in ("attic", "m4pro"):
        (folder / f"{name}.yaml").write_text(shipped.read_text())
    registry = load_plugins()
    assert registry.hardware["attic"] == folder / "attic.yaml"
    assert registry.hardware["m4pro"] == shipped
    assert len(warnings(capsys)) == 1


@pytest.mark.parametrize("changes", [{"id": "Not an id"}, {"config": dict}, {"config": type("Plain", (), {})}])
def test_a_spec_that_cannot_work_is_refused(changes):
    values = {"id": "fine", "title": "T", "summary": "s", "make": lambda config, run: None} | changes
    with pytest.raises(ValueError, match="system"):
        SystemSpec(**values)


def test_unknown_names_list_the_valid_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    registry = load_plugins()
    with pytest.raises(UsageError, match=r"did you mean slru.*valid: .*lru"):
        registry.system("slur")
    with pytest.raises(UsageError, match=str(tmp_path)):
        registry.hardware_path("m5")
    with pytest.raises(UsageError, match="pread"):
        registry.engine("prea")
    with pytest.raises(UsageError, match="olmoe-1b-7b"):
        registry.model_path("olmo")
