"""Control groups for benchmarks: hold a command to an amount of memory, page cache included, and throttle its reads.

    python benchmarks/cgroups.py memory=1.5GiB -- COMMAND ...
    python benchmarks/cgroups.py read_bps=100e6 read_iops=500 path=DIR -- COMMAND ...

Linux, cgroup v1 or v2, whichever has the controllers, by a user who may write to them (root). The group is made, the
command started inside it, and the group removed with whatever is still in it: at the end, on an error, on Ctrl-C and
on SIGTERM. What a killed process left behind is removed by the next group that is made. Memory beyond the limit is
reclaimed from the page cache first; what cannot be reclaimed ends the command (exit status 137). A throttle counts the
reads of one disk, that of ``path``, in slices of 100 ms: compare means over seconds. Knows nothing of what runs inside.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebench.budget import parse_bytes
from moebench.errors import UsageError

ROOT = Path("/sys/fs/cgroup")
UNIFIED = ("", "unified")  # where version 2 is mounted: alone, or beside version 1
PREFIX = "moebench-"
PATIENCE_S = 5.0  # for processes of a group to end before it is removed


@dataclass(frozen=True)
class Limits:
    """What a group is held to; ``read_bps`` (bytes a second) and ``read_iops`` hold on the disk of ``path``."""

    memory: int | None = None
    read_bps: int | None = None
    read_iops: int | None = None
    path: Path = Path(".")

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("memory", "read_bps", "read_iops")}
        if all(value is None for value in given.values()):
            raise UsageError("a group is held to memory=SIZE, read_bps=BYTES or read_iops=NUMBER; give one of them")
        for name, value in given.items():
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")

    @property
    def throttles(self) -> bool:
        """Whether reads are held back."""
        return self.read_bps is not None or self.read_iops is not None

    @property
    def controllers(self) -> tuple[str, ...]:
        """The controllers of version 2 that are needed."""
        return ("memory",) * (self.memory is not None) + ("io",) * self.throttles


@dataclass(frozen=True)
class Group:
    """One group, which lies in one folder (version 2) or one for each controller (version 1)."""

    folders: tuple[Path, ...]
    version: int

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs ``words`` inside: a shell enters the group and becomes them."""
        enter = "".join(f"echo $$ > {shlex.quote(str(folder / 'cgroup.procs'))} && " for folder in self.folders)
        return ["/bin/sh", "-c", f'{enter}exec "$@"', "sh", *words]

    def peak_bytes(self) -> int | None:
        """Most memory that was charged so far, page cache included; None where the kernel does not say."""
        for folder in self.folders:
            for name in ("memory.peak", "memory.max_usage_in_bytes"):
                with suppress(OSError):
                    return int((folder / name).read_text())
        return None


def disk_of(path: Path, sysfs: Path = Path("/sys")) -> str:
    """``MAJOR:MINOR`` of the whole disk that holds ``path``; throttles know disks, not partitions."""
    number = os.stat(path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    entry = sysfs / "dev" / "block" / name
    if not entry.exists():
        raise UsageError(f"{path} lies on no disk of its own ({name}), so its reads cannot be throttled")
    return (entry.resolve().parent / "dev").read_text().strip() if (entry / "partition").exists() else name


@contextmanager
def group(limits: Limits, root: Path = ROOT) -> Iterator[Group]:
    """A group of these limits, removed in the end with the processes that are still in it.

    Raises ``UsageError`` of one line where this machine or this user cannot have it.
    """
    made: list[Path] = []
    try:
        version, parents = _parents(limits, root)
        name = f"{PREFIX}{os.getpid()}"
        for parent in parents.values():
            remove_dead(parent)
            folder = parent / name
            folder.mkdir()
            made.append(folder)
        at = {controller: parent / name for controller, parent in parents.items()}
        for file, value in _settings(limits, version, at):
            file.write_text(value)
    except OSError as error:
        _remove(made)
        raise UsageError(f"no control group can be made here: {error.filename}: {error.strerror}") from None
    except BaseException:
        _remove(made)
        raise
    try:
        yield Group(tuple(made), version)
    finally:
        _remove(made)


def refusal(limits: Limits, root: Path = ROOT) -> str | None:
    """Why this machine or this user cannot have such a group; None where they can."""
    try:
        with group(limits, root):
            return None
    except UsageError as error:
        return str(error)


def remove_dead(parent: Path) -> None:
    """Remove the groups under ``parent`` whose maker is gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        maker = folder.name.removeprefix(PREFIX)
        if maker.isdecimal() and not Path(f"/proc/{maker}").exists():
            _remove([folder])


def _parents(limits: Limits, root: Path) -> tuple[int, dict[str, Path]]:
    """Version, and the folder to make the group in by controller."""
    for name in UNIFIED:
        at = root / name
        with suppress(OSError):
            if set(limits.controllers) <= set((at / "cgroup.controllers").read_text().split()):
                enabled = (at / "cgroup.subtree_control").read_text().split()
                if missing := [c for c in limits.controllers if c not in enabled]:
                    (at / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in missing))
                return 2, {"unified": at}
    first = {"memory": "memory", "io": "blkio"}
    parents = {first[c]: root / first[c] for c in limits.controllers}
    for name, parent in parents.items():
        if not parent.is_dir():
            raise UsageError(f"no control group can be made here: {root} has no controller {name}")
        if not os.access(parent, os.W_OK):
            raise UsageError(f"no control group can be made here: this user may not write to {parent}")
    return 1, parents


def _settings(limits: Limits, version: int, at: Mapping[str, Path]) -> Iterator[tuple[Path, str]]:
    """Files to write and what, in order."""
    rates = {"bps": limits.read_bps, "iops": limits.read_iops}
    if version == 2:
        folder = at["unified"]
        if limits.memory is not None:
            yield folder / "memory.max", str(limits.memory)
            if (folder / "memory.swap.max").exists():
                yield folder / "memory.swap.max", "0"
        if limits.throttles:
            words = [f"r{name}={value}" for name, value in rates.items() if value is not None]
            yield folder / "io.max", f"{disk_of(limits.path)} {' '.join(words)}"
        return
    if limits.memory is not None:
        yield at["memory"] / "memory.limit_in_bytes", str(limits.memory)
        if (at["memory"] / "memory.swappiness").exists():
            yield at["memory"] / "memory.swappiness", "0"
    for name, value in rates.items():
        if value is not None:
            yield at["blkio"] / f"blkio.throttle.read_{name}_device", f"{disk_of(limits.path)} {value}"


def _remove(folders: Sequence[Path]) -> None:
    """End what is still in the groups, which is nobody else's, and remove them."""
    ended = time.monotonic() + PATIENCE_S
    for folder in folders:
        while folder.exists():
            try:
                folder.rmdir()
            except OSError as error:
                inside = folder / "cgroup.procs"
                for process in inside.read_text().split() if inside.exists() else ():
                    with suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                if time.monotonic() > ended:
                    raise UsageError(f"control group {folder} cannot be removed: {error.strerror}") from None
                time.sleep(0.02)


def _words(words: Sequence[str]) -> Limits:
    """Limits from ``key=value`` words."""
    found: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key == "memory":
            found[key] = parse_bytes(value, key)
        elif key in ("read_bps", "read_iops"):
            try:
                found[key] = int(float(value))
            except (ValueError, OverflowError):
                raise UsageError(f"{key}={value} is not a number") from None
        elif key == "path":
            found[key] = Path(value)
        else:
            raise UsageError(f"{word} is not one of memory=, read_bps=, read_iops=, path=")
    return Limits(**found)


def main(words: Sequence[str]) -> int:
    """Run the command behind ``--`` inside a group; its exit status, or 2 where there can be no group."""
    if "--" not in words or not list(words)[list(words).index("--") + 1 :]:
        print(__doc__, file=sys.stderr)
        return 2
    cut = list(words).index("--")

    def stop(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    try:
        with group(_words(words[:cut])) as inside:
            status = subprocess.run(inside.command(words[cut + 1 :]), check=False).returncode
            return 128 - status if status < 0 else status
    except UsageError as error:
        print(f"cgroups: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
