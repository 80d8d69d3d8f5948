"""What the race does to a machine, and undoes: empty page cache, a loop device of small readahead, fio, children held
to a memory limit. Linux, as root. Knows no model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cgroups

from moebench.errors import UsageError
from moebench.units import GB

READAHEAD_KIB = 128  # Linux's own default, for a map whose pages are wanted at random
FIO_S = 1.5
FIO = {  # settings that are tried at an expert's size: their options, and what is in flight
    "psync 2": ("--ioengine=psync", "--numjobs=2"),
    "psync 4": ("--ioengine=psync", "--numjobs=4"),
    "psync 8": ("--ioengine=psync", "--numjobs=8"),
    "io_uring 8": ("--ioengine=io_uring", "--iodepth=8"),
}
DROP = Path("/proc/sys/vm/drop_caches")


def refusal() -> str | None:
    """Why the race cannot be run here; None where it can."""
    if not os.access(DROP, os.W_OK):
        return f"this user may not write to {DROP}, and without an empty page cache no arm begins like another"
    if shutil.which("fio") is None:
        return "fio is not installed (apt-get install fio): the disk must be measured beside the arms"
    return cgroups.refusal(cgroups.Limits(memory=1 << 30))


def drop_caches() -> None:
    """Write back and forget all cached files of the machine."""
    os.sync()
    DROP.write_text("3\n")


@contextmanager
def awake() -> Iterator[None]:
    """No core sleeps: a process spins on each, and gives way to any other. A virtual processor that sleeps comes back
    late; an arm that computes keeps its own awake, and fio by itself would not.
    """
    code = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    spinners = [subprocess.Popen([sys.executable, "-c", code]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def fio(path: Path, nbytes: int, seed: int) -> dict[str, float]:
    """GB/s of aligned random direct reads of ``nbytes`` at each setting, no core asleep."""
    with awake():
        return {name: _fio(path, nbytes, seed, options) for name, options in FIO.items()}


def _fio(path: Path, nbytes: int, seed: int, options: Sequence[str]) -> float:
    command = [
        "fio", "--name=read", f"--filename={path}", "--rw=randread", f"--bs={nbytes}", "--direct=1", "--readonly",
        "--time_based", f"--runtime={FIO_S}", f"--randseed={seed}", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"fio ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    rate: float = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"]
    return rate / GB


def readahead_kib(path: Path) -> int:
    """Readahead of the disk that holds ``path``."""
    return int(Path(f"/sys/dev/block/{cgroups.disk_of(path)}/queue/read_ahead_kb").read_text())


@contextmanager
def small_readahead(path: Path) -> Iterator[Path]:
    """``path`` itself where its disk reads ahead READAHEAD_KIB at most; else a read-only loop device that does."""
    if readahead_kib(path) <= READAHEAD_KIB:
        yield path
        return
    command = ["losetup", "--find", "--show", "--read-only", "--direct-io=on", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UsageError(f"no loop device can be made here: {made.stderr.strip()}")
    device = Path(made.stdout.strip())
    try:
        Path(f"/sys/block/{device.name}/queue/read_ahead_kb").write_text(str(READAHEAD_KIB))
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=False)


def child(
    command: Sequence[str], memory: int | None, environment: Mapping[str, str], seconds: float = 1200
) -> dict[str, Any]:
    """The JSON document that a command prints last, run within ``memory`` bytes; ``error`` says why there is none."""
    if memory is None:
        return _document(command, environment, seconds)
    with cgroups.group(cgroups.Limits(memory=memory)) as group:
        found = _document(group.command(command), environment, seconds)
        return found | {"charged_mib": (group.peak_bytes() or 0) >> 20}


def _document(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds, env={**os.environ, **environment}
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {seconds:g} s"}
    if done.returncode == -9:
        return {"error": "killed: it needs more memory than the limit"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": said[-1][:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])
