"""The built wheel has every part, runs in an empty folder and keeps the architecture contract; a breach is seen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("moebench", "systems", "models", "hardware_profiles", "configs", "pyproject.toml", "README.md", "LICENSE")
pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the source tree")


def copy_tree(target: Path) -> Path:
    """The parts of the source tree that go into a wheel, without build leftovers."""
    target.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / part, target)
    return target


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The wheel, built and unpacked into an empty folder."""
    scratch = tmp_path_factory.mktemp("wheel")
    source = copy_tree(scratch / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = scratch / "built"
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(built), str(source)]
    subprocess.run(wheel, check=True, capture_output=True)
    (file,) = built.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(scratch / "site"), str(file)], check=True)
    return scratch / "site"


def run(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess:
    """``python -m moebench.cli`` from the unpacked wheel alone, in ``cwd``."""
    environment = {**os.environ, "PYTHONPATH": str(site), "MOEBENCH_HOME": str(cwd / "home"), "MOEBENCH_PLUGINS": ""}
    command = [sys.executable, "-c", "import sys; from moebench.cli import main; sys.exit(main())", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_runs_the_main_job_in_an_empty_folder(site, tmp_path):
    done = run(site, tmp_path, "run", "system=lru", "hw=m4pro", "quality=none", "workload.requests=1")
    assert done.returncode == 0, done.stderr
    assert {"tinymoe", "qwen3.6-35b-a3b"} <= set(done.stdout.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "results"]
    assert len(list(tmp_path.glob("results/m4pro/*/*.json"))) == 2
    done = run(site, tmp_path, "report")
    assert done.returncode == 0, done.stderr
    assert "<caption" in (tmp_path / "reports" / "report.html").read_text()


def test_everything_that_can_be_named_is_in_the_wheel(site, tmp_path):
    listed = run(site, tmp_path, "list").stdout.split()
    shipped = [p.stem for folder in ("models", "hardware_profiles") for p in (ROOT / folder).glob("*.yaml")]
    assert set(shipped) <= set(listed)
    assert {"lru", "belady", "resident", "ondemand", "mmap", "direct"} <= set(listed)
    assert run(site, tmp_path, "new-system", "tide").returncode == 0
    assert (tmp_path / "tide" / "moebench_tide" / "__init__.py").is_file()


def check(source: Path) -> int:
    """Exit code of the architecture check on a source tree."""
    command = [sys.executable, str(ROOT / "scripts" / "check_architecture.py"), str(source)]
    return subprocess.run(command, capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (None, ""),
        ("moebench/engine/acquire.py", "import moebench.systems.cached"),
        ("moebench/residency/tier.py", "import moebench.engine.loop"),
        ("systems/cached/__init__.py", "import torch"),
    ],
)
def test_the_contract_is_kept_and_a_planted_breach_is_seen(tmp_path, file, line):
    source = copy_tree(tmp_path / "source")
    stale = source / "build" / "lib" / "moebench" / "engine"  # of an earlier build: no part of the tree
    stale.mkdir(parents=True)
    (stale / "gone.py").write_text("import moebench.systems.cached\n")
    if file:
        path = source / file
        text = path.read_text()
        path.write_text(
            text.replace("from __future__ import annotations\n", f"from __future__ import annotations\n{line}\n")
        )
    assert (check(source) == 0) == (file is None)
