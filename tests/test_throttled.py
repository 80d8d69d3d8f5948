"""``scripts/throttled.sh``: a command is held to its limits, and nothing of them is left however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "throttled.sh"
GROUPS = Path("/sys/fs/cgroup")
REFUSED = 77


def start(*words: str, **more) -> subprocess.Popen:
    """The script, under way."""
    environment = {**os.environ, "PYTHON": sys.executable}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(SCRIPT), *words], env=environment, **pipes, **more)


def held(run: subprocess.Popen) -> list[Path]:
    """Groups of a script that exist now: the script becomes what makes them."""
    return [folder for depth in ("*", "*/*") for folder in GROUPS.glob(f"{depth}/moebench-{run.pid}")]


@pytest.fixture
def able():
    """Skips where this machine has no control groups for us; what the script says then has a test of its own."""
    found = start("memory=1GiB", "--", "true")
    _, said = found.communicate(timeout=60)
    if found.returncode == REFUSED:
        pytest.skip(said.strip())


def test_it_says_in_one_line_where_it_cannot(tmp_path):
    blocked = tmp_path / "benchmarks"
    blocked.mkdir()
    (tmp_path / "scripts").mkdir()
    copy = tmp_path / "scripts" / "throttled.sh"
    copy.write_text(SCRIPT.read_text())
    copy.chmod(0o755)
    (blocked / "cgroups.py").write_text(
        "import sys\nprint('cgroups: no such thing here', file=sys.stderr)\nsys.exit(2)\n"
    )
    marker = tmp_path / "ran"
    run = subprocess.run(
        [str(copy), "memory=1GiB", "--", "touch", str(marker)],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == REFUSED
    assert run.stderr.strip() == "throttled.sh: not here: cgroups: no such thing here"
    assert not marker.exists()


def test_wrong_use_is_told_how():
    run = start("memory=1GiB")
    _, said = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "COMMAND" in said


def test_the_commands_status_is_the_scripts(able):
    run = start("memory=1GiB", "--", "sh", "-c", "exit 5")
    run.communicate(timeout=60)
    assert run.returncode == 5
    assert not held(run)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_group_and_no_process(able, how, tmp_path):
    marker = tmp_path / "pid"
    run = start("memory=1GiB", "--", "sh", "-c", f"echo $$ > {marker}; exec sleep 60", start_new_session=True)
    until = time.monotonic() + 30
    while not (marker.exists() and marker.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.05)
    assert held(run), "the command runs in no group"
    run.send_signal(how)
    run.communicate(timeout=30)
    assert run.returncode
    assert not held(run)
    assert not Path(f"/proc/{marker.read_text().strip()}").exists()
