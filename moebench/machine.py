"""What this machine says of itself: processor, card, memory and versions; no names, no serial numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("moebench", "torch", "transformers", "mlx", "mlx-lm", "numpy", "safetensors")


@dataclass(frozen=True)
class Machine:
    """What this machine says of itself; no names and no serial numbers."""

    cpu: str
    gpu: str
    ram_gib: float


def detect() -> Machine:
    """This machine's processor, NVIDIA card if any, and memory in GiB."""
    return Machine(cpu=_cpu_name(), gpu=_gpu_name(), ram_gib=round(psutil.virtual_memory().total / 1024**3, 2))


def environment() -> dict[str, Any]:
    """The environment block of a result: versions, platform and processor, and the source commit where there is one."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "packages": versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "isa": _isa(),
        "gpu": _gpu_name() or None,
        "ram_gib": detect().ram_gib,
        "commit": _commit(),
    }


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> str | None:
    """The git commit of the source tree that this package runs from, with ``+`` when files differ from it."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return None
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return head.stdout.strip() + ("+" if dirty else "")


def _cpu_name() -> str:
    """The processor's marketing name, from the kernel where it says."""
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        query = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return platform.processor() or platform.machine()


def _isa() -> str:
    """The widest vector instructions that kernels choose between, else the architecture: marketing names hide them."""
    path = Path("/proc/cpuinfo")
    words = set(path.read_text().split()) if path.exists() else set()
    return next((name for name in ("avx512f", "avx2") if name in words), platform.machine())


def _gpu_name() -> str:
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in info.read_text().splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return ""
