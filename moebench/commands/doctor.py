"""``moebench doctor``: what this machine can measure, what is missing, and what that costs."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moebench import hardware
from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.machine import detect
from moebench.plugins import load_plugins
from moebench.store import uring


@dataclass(frozen=True)
class DoctorOptions:
    """Which folder's disk to look at."""

    path: str = option(".", "folder whose file system packs and results would use")


@dataclass(frozen=True)
class Finding:
    """One capability: what was found, and what cannot be done without it."""

    name: str
    ok: bool
    found: str
    without: str


def main(words: Sequence[str]) -> int:
    """Print every finding, then one JSON document; always 0: a missing capability is no failure."""
    options = parse(words, DoctorOptions, "doctor")
    if options is None:
        return 0
    folder = Path(options.path)
    if not folder.is_dir():
        raise UsageError(f"doctor: path={options.path} is not a folder")
    found = examine(writable_folder(folder, "path"))
    for item in found:
        print(f"{'ok ' if item.ok else '-  '} {item.name:<16} {item.found}")
        if not item.ok:
            print(f"    {'':<16} {item.without}")
    print(json.dumps({"findings": [asdict(item) for item in found]}, separators=(",", ":")))
    return 0


def examine(folder: Path) -> list[Finding]:
    """Every capability, in the order of the table."""
    machine = detect()
    return [
        Finding("machine", True, f"{machine.cpu}, {machine.gpu or 'no NVIDIA card'}, {machine.ram_gib:.1f} GiB", ""),
        _profile(),
        _backend("torch", "no live runs: only geometries can be replayed"),
        _backend("transformers", "no live runs: only geometries can be replayed"),
        _backend("mlx", "packs in the mlx byte layout cannot be computed"),
        _capability(),
        _direct(folder),
        _io_uring(),
        _page_cache(),
        _drop_caches(),
        _memory_limit(),
    ]


def _profile() -> Finding:
    registry = load_plugins()
    machine = detect()
    fits = []
    for name, path in registry.hardware.items():
        try:
            if hardware.load(path).matches(machine) or name == "host":
                fits.append(name)
        except hardware.HardwareError as error:
            print(f"moebench: warning: {error}", file=sys.stderr)
    return Finding(
        "hw", bool(fits), ", ".join(fits) or "no profile matches", "run 'moebench calibrate' to make hw=host"
    )


def _backend(name: str, without: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, "not installed", without)
    return Finding(name, True, importlib.metadata.version(name), without)


def _capability() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("cpu kernels", False, "torch is not installed", "int4 and bf16 kernels cannot be timed")
    import torch

    name = torch.backends.cpu.get_cpu_capability()
    return Finding(
        "cpu kernels", name != "DEFAULT", name, "reference kernels: compute times say nothing about this processor"
    )


def _direct(folder: Path) -> Finding:
    without = "engine=direct is refused here; engine=pread reads through the page cache, so cold reads need it dropped"
    if not hasattr(os, "O_DIRECT"):
        return Finding("O_DIRECT", False, f"{platform.system()} has none", without)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            return Finding(
                "O_DIRECT", False, f"refused by the file system ({errno.errorcode[error.errno or 0]})", without
            )
    return Finding("O_DIRECT", True, "accepted by this file system", without)


def _io_uring() -> Finding:
    why = uring.refusal()
    without = "engine=uring is refused here; engine=direct reads the same bytes with threads"
    return Finding("io_uring", why is None, why or "offered by this kernel", without)


def _page_cache() -> Finding:
    ok = hasattr(os, "posix_fadvise")
    return Finding("fadvise", ok, "posix_fadvise" if ok else "none", "one file's pages cannot be dropped between runs")


def _drop_caches() -> Finding:
    ok = os.access("/proc/sys/vm/drop_caches", os.W_OK)
    without = "the page cache as a whole cannot be dropped; results say so in their protocol"
    return Finding("drop_caches", ok, "writable" if ok else "not writable", without)


def _memory_limit() -> Finding:
    roots: list[tuple[str, Path, Callable[[Path], bool]]] = [
        ("cgroup v2", Path("/sys/fs/cgroup"), lambda p: _word("memory", p / "cgroup.controllers")),
        ("cgroup v1", Path("/sys/fs/cgroup/memory"), lambda p: (p / "memory.limit_in_bytes").exists()),
    ]
    usable = [name for name, root, has in roots if has(root) and os.access(root, os.W_OK)]
    without = "memory pressure and page-cache size cannot be enforced: mmap runs have all of RAM as their cache"
    return Finding("memory limit", bool(usable), ", ".join(usable) or "no writable memory cgroup", without)


def _word(word: str, path: Path) -> bool:
    return path.exists() and word in path.read_text().split()
