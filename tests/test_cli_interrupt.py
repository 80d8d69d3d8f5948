"""Ctrl-C, SIGTERM and SIGHUP in a measured run end its process too, and are one line and exit code 1; a run that is
killed takes its process with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

PARENT = """
import sys, time
sys.path[:0] = {path!r}
from moebench import harness
from moebench.cli import main
from moebench.harness.isolate import isolated
from test_cli_interrupt import wait

harness.run = lambda config, strict=True: isolated(wait, {file!r})
sys.exit(main(["run"]))
"""


def wait(file: str) -> None:
    """Say who runs, then never end."""
    with open(file + ".new", "w") as out:
        out.write(str(os.getpid()))
    os.rename(file + ".new", file)
    time.sleep(600)


def stopped(tmp_path, send):
    """Parent and the words on its stderr, after ``send(pid)`` while its child hangs."""
    file = tmp_path / "child"
    code = PARENT.format(path=[os.path.dirname(__file__)], file=str(file))
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "MOEBENCH_PLUGINS": "", "MOEBENCH_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        send(process.pid)
        _, told = process.communicate(timeout=30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process, told, file.read_text()


SENDS = {
    "Ctrl-C": lambda pid: os.killpg(pid, signal.SIGINT),  # as a terminal does: to all of the group
    "SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM),
    "SIGHUP": lambda pid: os.kill(pid, signal.SIGHUP),
}


@pytest.mark.parametrize("how", list(SENDS))
def test_a_stop_ends_parent_and_child_with_one_line(tmp_path, how):
    process, told, child = stopped(tmp_path, SENDS[how])
    assert told.splitlines() == [f"moebench: error: stopped by {how}"]
    assert process.returncode == 1
    assert not os.path.exists(f"/proc/{child}")
    assert not [path for path in (tmp_path / "results").rglob("*") if path.is_file()]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a run whose parent was killed goes on to its end")
def test_a_killed_run_takes_its_process_with_it(tmp_path):
    process, _, child = stopped(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL))
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}")
