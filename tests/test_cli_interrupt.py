"""Ctrl-C in a measured run ends its process too, and is one line and exit code 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

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


def test_ctrl_c_ends_parent_and_child_with_one_line(tmp_path):
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
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
        _, told = process.communicate(timeout=30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert told.splitlines() == ["moebench: error: stopped by Ctrl-C"]
    assert process.returncode == 1
    assert not os.path.exists(f"/proc/{file.read_text()}")
    assert not [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
