"""Control groups of benchmarks: what is written where, by version; that they are undone, and what they say where they
cannot be. Folders of a temporary path stand in for the kernel's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moebench.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import cgroups
from cgroups import Limits, disk_of, group, refusal

MIB = 1 << 20


class FakeFolder:
    """Lets a plain folder be removed with the files that the kernel would have made in it."""

    def __init__(self, monkeypatch):
        rmdir = Path.rmdir

        def emptied(folder):
            for file in folder.iterdir():
                file.unlink()
            rmdir(folder)

        monkeypatch.setattr(Path, "rmdir", emptied)


@pytest.fixture
def version1(tmp_path, monkeypatch):
    """A machine with the controllers of version 1."""
    FakeFolder(monkeypatch)
    for controller in ("memory", "blkio"):
        (tmp_path / controller).mkdir()
    monkeypatch.setattr(cgroups, "disk_of", lambda path: "254:0")
    return tmp_path


@pytest.fixture
def version2(tmp_path, monkeypatch):
    """A machine with version 2 alone, whose root delegates nothing yet."""
    FakeFolder(monkeypatch)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("pids\n")
    monkeypatch.setattr(cgroups, "disk_of", lambda path: "254:0")
    return tmp_path


def files(folders):
    """Name to text of all files in a group's folders."""
    return {file.name: file.read_text() for folder in folders for file in folder.iterdir()}


def test_version_1_gets_a_folder_for_each_controller_that_is_needed(version1):
    with group(Limits(memory=96 * MIB, read_bps=100_000_000, read_iops=500), version1) as made:
        assert made.version == 1
        assert [folder.parent.name for folder in made.folders] == ["memory", "blkio"]
        assert files(made.folders) == {
            "memory.limit_in_bytes": str(96 * MIB),
            "blkio.throttle.read_bps_device": "254:0 100000000",
            "blkio.throttle.read_iops_device": "254:0 500",
        }
    assert not any(folder.exists() for folder in made.folders)
    with group(Limits(memory=MIB), version1) as made:
        assert [folder.parent.name for folder in made.folders] == ["memory"]


def test_version_2_gets_one_folder_and_the_controllers_enabled(version2):
    with group(Limits(memory=96 * MIB, read_bps=100_000_000, read_iops=500), version2) as made:
        assert made.version == 2
        assert len(made.folders) == 1
        assert (version2 / "cgroup.subtree_control").read_text() == "+memory +io"
        assert files(made.folders) == {"memory.max": str(96 * MIB), "io.max": "254:0 rbps=100000000 riops=500"}


def test_version_2_without_the_controllers_leaves_them_to_version_1(version1):
    (version1 / "unified").mkdir()
    (version1 / "unified" / "cgroup.controllers").write_text("hugetlb\n")
    with group(Limits(memory=MIB), version1) as made:
        assert made.version == 1


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_group_is_removed_however_its_use_ends(version1, ending):
    with pytest.raises(ending), group(Limits(memory=MIB, read_iops=5), version1) as made:
        raise ending
    assert not any(folder.exists() for folder in made.folders)


def test_a_group_whose_disk_cannot_be_throttled_is_removed_and_says_why(version1, monkeypatch):
    def none(path):
        raise UsageError("lies on no disk")

    monkeypatch.setattr(cgroups, "disk_of", none)
    limits = Limits(memory=MIB, read_bps=5)
    with pytest.raises(UsageError, match="lies on no disk"), group(limits, version1):
        pass
    assert refusal(limits, version1) == "lies on no disk"
    assert not list(version1.glob("*/moebench-*"))


def test_the_processes_left_inside_are_ended(version1, monkeypatch):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    emptied = Path.rmdir

    def busy(folder):
        if sleeper.poll() is None:
            raise OSError(16, "Device or resource busy")
        emptied(folder)

    with group(Limits(memory=MIB), version1) as made:
        (made.folders[0] / "cgroup.procs").write_text(f"{sleeper.pid}\n")
        monkeypatch.setattr(Path, "rmdir", busy)
    assert sleeper.wait(10) == -9
    assert not made.folders[0].exists()


def test_what_a_killed_maker_left_is_removed_by_the_next(version1):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = version1 / "memory" / f"{cgroups.PREFIX}{dead.pid}"
    other = version1 / "memory" / f"{cgroups.PREFIX}{os.getppid()}"
    for folder in (left, other):
        folder.mkdir()
    with group(Limits(memory=MIB), version1):
        assert not left.exists()
        assert other.exists()


def test_where_there_are_no_controllers_one_line_says_so(tmp_path):
    assert "no controller memory" in refusal(Limits(memory=MIB), tmp_path)


def test_limits_without_a_limit_are_refused():
    with pytest.raises(UsageError, match="give one"):
        Limits()
    with pytest.raises(UsageError, match="at least 1"):
        Limits(memory=0)


def test_a_partition_is_throttled_as_its_disk(tmp_path):
    number = os.stat(tmp_path).st_dev
    disk = tmp_path / "devices" / "vda"
    (disk / "vda1").mkdir(parents=True)
    (disk / "dev").write_text("254:0\n")
    (disk / "vda1" / "partition").write_text("1\n")
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk / "vda1")
    assert disk_of(tmp_path, tmp_path) == "254:0"
    with pytest.raises(UsageError, match="no disk of its own"):
        disk_of(tmp_path, disk)


def test_the_command_enters_the_group_and_becomes_what_is_run(version1):
    with group(Limits(memory=MIB), version1) as made:
        done = subprocess.run(made.command(["/bin/sh", "-c", "echo $$"]), capture_output=True, text=True, check=True)
        assert files(made.folders)["cgroup.procs"] == done.stdout


def test_a_command_in_a_real_group_has_its_limit():
    if reason := refusal(Limits(memory=64 * MIB)):
        pytest.skip(reason)
    script = str(Path(cgroups.__file__))
    run = [sys.executable, script, "memory=64MiB", "--", sys.executable, "-c"]
    assert subprocess.run([*run, "bytearray(256 << 20)"], check=False).returncode == 137
    assert subprocess.run([*run, "raise SystemExit(3)"], check=False).returncode == 3
    assert subprocess.run([sys.executable, script, "colour=red", "--", "true"], check=False).returncode == 2
