"""What a result says of where it ran: versions, processor, page cache; no user names and no serial numbers."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import moebench
from moebench import hardware
from moebench.harness.plan import Cell
from moebench.store.pages import drop_page_cache

PACKAGES = ("numpy", "torch", "transformers", "safetensors", "pluggy", "hydra-core", "xxhash")


@functools.cache
def describe() -> dict[str, Any]:
    """Versions and machine."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    machine = hardware.detect()
    return {
        "moebench": moebench.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": machine.cpu,
        "gpu": machine.gpu,
        "ram_gib": machine.ram_gib,
        "packages": versions,
    }


def _commit() -> str | None:
    """The commit of the source tree, if moebench runs from one."""
    root = Path(moebench.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def page_cache_state(cell: Cell, pack: Any) -> str:
    """Set the page cache before a run where that matters, and say in words how it stands."""
    if cell.clock == "virtual":
        return "modeled: empty at start" if cell.engine != "direct" else "modeled: bypassed by engine direct"
    if cell.engine == "direct":
        return "bypassed by engine direct"
    dropped, reason = drop_page_cache(pack.file_path)
    return "cold: pages of the pack dropped before the run" if dropped else f"unknown: {reason}"


def transferred(cell: Cell) -> list[str]:
    """Software-stack constants that were taken on another machine than the one modeled."""
    if cell.clock == "wall":
        return []
    found = cell.profile.constants().transferred
    return [f"transferred: {name} of stack {cell.profile.stack} was taken on {machine}" for name, machine in found.items()]
