"""Ctrl-C and SIGTERM in every command that writes, full and read-only disks, limits on files and descriptors: one line,
no traceback, nothing left behind but what the same command goes on from, and then the bytes of an undisturbed run.
"""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault_fixtures import TIMES, listing, server, tally  # noqa: F401 - fixture
from test_faults_kills import FITS, OTHERS, PACKS, check_standing, chosen, content, fresh, place, whole  # noqa: F401

LONG = TIMES > 1
COMMANDS = chosen(PACKS + FITS + OTHERS) if LONG else [PACKS[0], OTHERS[0]]
STOPS = 2 * TIMES
SHARES = (0.02, 0.3, 0.6, 0.9, 1.0) if LONG else (0.3, 0.9)  # of what a command writes, as room on the disk
LIMITS = [("RLIMIT_FSIZE", n) for n in ((0, 2000, 30_000, 100_000) if LONG else (2000,))]
LIMITS += [("RLIMIT_NOFILE", n) for n in ((4, 5, 6, 7, 9) if LONG else (6,))]


def mounts() -> str | None:
    """Why no small disk can be mounted here; None where one can."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
            return "only root may mount a small disk"
        subprocess.run(["umount", folder], check=True)
    return None


@contextmanager
def disk(folder: Path, kib: int):
    """A disk of so many KiB in the place of ``folder``."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def check_ended(found, command, out, expected) -> bool:
    """A command that was in trouble is done, or says why in one line; returns whether it is done."""
    check_standing(command, out, expected)
    if found.code == 0:
        assert content(command, out) == expected
        return True
    assert found.code in (1, 2), found.err
    assert found.error
    return False


@pytest.mark.parametrize("whole", COMMANDS, ids=str, indirect=True)
def test_a_stop_is_one_line_and_the_same_command_goes_on(server, place, whole):
    command, expected, done = whole
    draw, stopped = random.Random(command.name), 0
    scratch = place / "tmp"
    scratch.mkdir(exist_ok=True)
    order = {"root": place / "out", "environ": {"TMPDIR": str(scratch)}}
    for number in range(STOPS):
        out, kind = fresh(place), (signal.SIGINT, signal.SIGTERM)[number % 2]
        found = server.moebench(*command.words.split(), seconds=draw.uniform(0.1, 0.9) * done.s, signal=kind, **order)
        if not check_ended(found, command, out, expected):
            assert found.code == 1
            assert "stopped by" in found.error
            assert not [name for name in listing(out) if Path(name).name.endswith(".new")]
            stopped += 1
        assert not list(scratch.iterdir())
        again = server.moebench(*command.words.split(), **order)
        assert again.code == 0 or "exists already" in again.error, again.err
        assert content(command, out) == expected
    tally("Ctrl-C and SIGTERM", command.name, stopped, "one line each; every rerun ended with the same bytes")


@pytest.mark.parametrize("whole", COMMANDS, ids=str, indirect=True)
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_disk_that_takes_nothing_more_is_one_line_and_room_is_enough_to_go_on(server, place, whole, kind):
    if (why := mounts()) is not None:
        pytest.skip(why)
    command, expected, _ = whole
    size = sum(path.stat().st_size for path in (place / "out").rglob("*") if path.is_file()) // 1024
    out, refused = fresh(place), 0
    for part in SHARES if kind == "full" else (1.0,):
        with disk(out, max(4, int(part * size)) if kind == "full" else 20 * size + 4000):
            if kind == "read-only":
                subprocess.run(["mount", "-o", "remount,ro", str(out)], check=True)
            found = server.moebench(*command.words.split())
            refused += not check_ended(found, command, out, expected)
            if kind == "full" and command.name != "model random":  # that wants half a GiB free
                subprocess.run(["mount", "-o", f"remount,size={20 * size + 4000}k", str(out)], check=True)
                again = server.moebench(*command.words.split())
                assert again.code == 0 or "exists already" in again.error, again.err
                assert content(command, out) == expected
    assert refused or (kind == "full" and size < 8)
    tally(f"{kind} disk", command.name, refused, "one line each; with room every rerun ended with the same bytes")


def test_a_home_that_nobody_may_write_serves_what_is_in_it(server, place):
    if (why := mounts()) is not None:
        pytest.skip(why)
    (home := place / "kept").mkdir(exist_ok=True)
    run = (
        "run system=lru hw=m4pro model=./small quality=none numerics=fast workload.requests=1 workload.new_tokens=4 "
        "warmup_tokens=1 out=rows"
    )
    with disk(home, 4000):
        order = {"environ": {"MOEBENCH_HOME": str(home)}}
        subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
        assert "Read-only file system" in server.moebench(*run.split(), **order).error
        subprocess.run(["mount", "-o", "remount,rw", str(home)], check=True)
        done = server.moebench(*run.split(), **order)
        assert done.code == 0, done.err + done.out
        subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
        done = server.moebench(*run.split(), **order)
        assert done.code == 0, done.err + done.out
    tally("read-only home", "run live", 2, "one line without the pack, as ever with it")


@pytest.mark.parametrize("whole", COMMANDS, ids=str, indirect=True)
def test_limits_on_files_and_descriptors_are_one_line(server, place, whole):
    command, expected, _ = whole
    refused = 0
    for name, limit in LIMITS:
        out = fresh(place)
        found = server.moebench(*command.words.split(), limits={name: limit})
        if found.code == 1 and name == "RLIMIT_FSIZE" and not found.err:
            continue  # not even the line could be written
        refused += not check_ended(found, command, out, expected)
        again = server.moebench(*command.words.split())
        assert again.code == 0 or "exists already" in again.error, again.err
        assert content(command, out) == expected
    tally("RLIMIT_FSIZE, NOFILE", command.name, refused, "one line each; every rerun ended with the same bytes")
