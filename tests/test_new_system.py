"""``moebench new-system`` writes a whole package or nothing, refuses names in one line, and what it writes works."""

from __future__ import annotations

import importlib
import json
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harness_fixtures import plugin  # noqa: F401 - a fixture

from moebench.cli import main
from moebench.commands import new_system
from moebench.plugins import load_plugins


@pytest.fixture
def write(plugin, tmp_path, capsys):  # noqa: F811
    """Writes a package under a name, as an installed one where asked; returns its folder."""

    def write(name: str, *words: str, installed: bool = False) -> Path:
        assert main(["new-system", name, *words]) == 0
        printed = capsys.readouterr().out.splitlines()
        folder = tmp_path / json.loads(printed[-1])["folder"]
        if installed:
            plugin(name, f"from moebench_{name} import register_systems")
            sys.path.insert(0, str(folder))
        return folder

    before, modules = list(sys.path), set(sys.modules)
    yield write
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith(("moebench_", "test_tide")):
            del sys.modules[name]


def one_line(capsys, *words: str) -> str:
    """The error of wrong use."""
    assert main(["new-system", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_it_writes_a_whole_package_under_the_given_name(write, tmp_path):
    folder = write("high_tide")
    assert folder == tmp_path / "high_tide"
    files = {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}
    assert set(files) == {"pyproject.toml", "README.md", "moebench_high_tide/__init__.py", "tests/test_high_tide.py"}
    assert not any("mysystem" in text.lower() for text in files.values())
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["entry-points"]["moebench"] == {"high_tide": "moebench_high_tide"}
    assert project["tool"]["setuptools"]["packages"] == ["moebench_high_tide"]
    assert files["README.md"].startswith("# High Tide\n")
    checked = subprocess.run([sys.executable, "-m", "compileall", "-q", folder], capture_output=True, check=False)
    assert checked.returncode == 0
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((folder / "tests").stat().st_mode)


def test_the_system_registers_with_a_help_text_for_each_option(write, capsys):
    write("tide", installed=True)
    registry = load_plugins()
    assert registry.origin["systems/tide"] == "tide (dist-tide 1.2)"
    assert main(["list", "systems", "-v"]) == 0
    shown = capsys.readouterr()
    assert "system.order=2.0  what one layer" in shown.out
    assert shown.err == ""
    assert main(["run", "system=tide", "system.order=-1", "hw=m4pro"]) == 2
    assert "between 0 and 1000" in capsys.readouterr().err


@pytest.mark.parametrize("off", [False, True])
def test_its_own_test_fails_when_the_mechanism_is_switched_off(write, off):
    folder = write("tide", installed=True)
    source = folder / "moebench_tide" / "__init__.py"
    mechanism = "age + self.order * ahead"
    assert source.read_text().count(mechanism) == 1
    if off:
        source.write_text(source.read_text().replace(mechanism, "age"))
    sys.path.insert(0, str(folder / "tests"))
    test = importlib.import_module("test_tide").test_the_order_of_layers_saves_reads
    if off:
        with pytest.raises(AssertionError):
            test()
    else:
        test()


@pytest.mark.parametrize("name", ["Tide", "1x", "a__b", "a-b", "a b", "", "tide_", "lru", "all", "hw", "workload"])
def test_a_name_that_cannot_be_is_one_line(plugin, tmp_path, capsys, name):  # noqa: F811
    before = list(tmp_path.iterdir())
    assert one_line(capsys, name).startswith("moebench: error: ")
    assert list(tmp_path.iterdir()) == before


def test_a_package_that_is_installed_already_is_one_line(write, capsys):
    write("tide", installed=True)
    assert "registered already, by tide (dist-tide 1.2)" in one_line(capsys, "tide", "out=other")
    write("ebb", "out=elsewhere")
    sys.path.insert(0, str(Path("elsewhere").resolve()))
    importlib.invalidate_caches()
    assert "moebench_ebb is installed already" in one_line(capsys, "ebb", "out=other")


@pytest.mark.parametrize("words", [(), ("a", "b"), ("a", "uot=x"), ("a", "out=/dev/null/x")])
def test_wrong_words_are_one_line(plugin, capsys, words):  # noqa: F811
    assert one_line(capsys, *words)


def test_nothing_that_stands_there_is_touched(write, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("a file")
    for out in ("full", "file"):
        assert "not an empty folder" in one_line(capsys, "tide", f"out={out}")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    assert (write("tide", "out=empty") / "pyproject.toml").is_file()
    assert (write("tide", "out=new/deeper") / "pyproject.toml").is_file()


def test_it_writes_all_or_nothing(plugin, tmp_path, capsys, monkeypatch):  # noqa: F811
    plain, written = Path.write_text, []

    def full(self, text):
        written.append(self)
        if len(written) == len(new_system.FILES):
            raise OSError(28, "No space left on device")
        return plain(self, text)

    before = set(tmp_path.rglob("*"))
    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left" in one_line(capsys, "tide")
    assert set(tmp_path.rglob("*")) == before
