"""``moebench doctor``: what this machine can measure, what is missing, and which system to start with for a model."""

from __future__ import annotations

import errno
import fcntl
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
from moebench.commands.advice import advise, find_geometry
from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.machine import detect
from moebench.plugins import Registry, load_plugins
from moebench.progress import progress_bar
from moebench.store import uring


@dataclass(frozen=True)
class DoctorOptions:
    """Which folder's disk to look at, and which model to give advice for."""

    path: str = option(".", "folder whose file system packs and results would use")
    model: str = option("", "a model to give advice for: tinymoe, a geometry, or a folder with config.json")
    hw: str = option("auto", "machine to give advice for; auto takes the profile of this one")

    def __post_init__(self) -> None:
        if self.hw != "auto" and not self.model:
            raise UsageError("doctor: hw= chooses the machine that advice is for; it needs model=")


@dataclass(frozen=True)
class Finding:
    """One capability: what was found, and what cannot be done without it."""

    name: str
    ok: bool
    found: str
    without: str


def main(words: Sequence[str]) -> int:
    """Print every finding, then one JSON document; always 0: a missing capability is no failure.

    ``doctor io`` is another question.
    """
    if words and words[0] == "io":
        from moebench.commands import doctor_io

        return doctor_io.main(words[1:])
    options = parse(words, DoctorOptions, "doctor")
    if options is None:
        return 0
    folder = Path(options.path)
    if not folder.is_dir():
        raise UsageError(f"doctor: path={options.path} is not a folder")
    registry = load_plugins()
    geometry = find_geometry(options.model, registry) if options.model else None
    profile = _machine(options.hw, registry) if geometry else None
    found = examine(writable_folder(folder, "path"), registry)
    for item in found:
        print(f"{'ok ' if item.ok else '-  '} {item.name:<16} {item.found}")
        if not item.ok:
            print(f"    {'':<16} {item.without}")
    document: dict[str, object] = {"findings": [asdict(item) for item in found]}
    if geometry and profile is None:
        print(f"no advice for {geometry.name}: no profile matches this machine; run 'moebench calibrate', or say hw=")
    elif geometry and profile:
        with progress_bar() as bar:
            task = bar.add_task("short replays", total=None)
            lines, rows = advise(
                geometry, options.model, profile, registry, lambda name: bar.update(task, description=name)
            )
        print("\n" + "\n".join(lines))
        document["advice"] = lines
        document["decode_tok_s"] = {row.system: row.metrics["decode_tok_s"].value for row in rows}
    print(json.dumps(document, separators=(",", ":")))
    return 0


def _machine(name: str, registry: Registry) -> hardware.HardwareProfile | None:
    """The profile that advice is for: the named one, else that of this machine; None where there is none."""
    if name != "auto":
        return hardware.load(registry.hardware_path(name))
    names = _matching(registry)
    return hardware.load(registry.hardware_path("host" if "host" in names else names[0])) if names else None


def examine(folder: Path, registry: Registry) -> list[Finding]:
    """Every capability, in the order of the table."""
    machine = detect()
    return [
        Finding("machine", True, f"{machine.cpu}, {machine.gpu or 'no NVIDIA card'}, {machine.ram_gib:.1f} GiB", ""),
        _profile(registry),
        _backend("torch", "no live runs: only geometries can be replayed"),
        _backend("transformers", "no live runs: only geometries can be replayed"),
        _mlx(),
        _cuda(),
        _capability(),
        _direct(folder),
        _io_uring(),
        _page_cache(),
        _drop_caches(),
        _memory_limit(),
    ]


def _matching(registry: Registry) -> list[str]:
    """Profiles that are this machine."""
    machine = detect()
    fits = []
    for name, path in registry.hardware.items():
        try:
            if hardware.load(path).matches(machine):
                fits.append(name)
        except hardware.HardwareError as error:
            print(f"moebench: warning: {error}", file=sys.stderr)
    return fits


def _profile(registry: Registry) -> Finding:
    fits = _matching(registry)
    return Finding(
        "hw", bool(fits), ", ".join(fits) or "no profile matches", "run 'moebench calibrate' to make hw=host"
    )


def _backend(name: str, without: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, "not installed", without)
    return Finding(name, True, importlib.metadata.version(name), without)


def _mlx() -> Finding:
    without = "backend=mlx is refused: pip install 'moebench[mlx]'"
    missing = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("mlx", False, f"{missing[0].replace('_', '-')} is not installed", without)
    import mlx.core as mx

    device = mx.default_device().type.name
    found = f"{importlib.metadata.version('mlx')} on {device}, mlx-lm {importlib.metadata.version('mlx-lm')}"
    return Finding("mlx", True, found + (", for correctness and not for timing" if device == "cpu" else ""), without)


def _cuda() -> Finding:
    without = "device=cuda is refused: torch computes on the processor (docs/cuda.md)"
    if importlib.util.find_spec("torch") is None:
        return Finding("cuda", False, "torch is not installed", without)
    from moebench.backends import cuda_state

    reason = cuda_state.refusal()
    return Finding("cuda", reason is None, reason or cuda_state.describe(), without)


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
    if hasattr(fcntl, "F_NOCACHE"):
        return Finding("F_NOCACHE", True, "engine=direct keeps what it reads out of the page cache", without)
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
