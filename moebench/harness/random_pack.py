"""Packs of random experts in a model's geometry: real reads of real sizes without the model ("fio for experts")."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.harness.assets import open_kept
from moebench.plugins import home
from moebench.store.layout import QuantSpec
from moebench.store.lock import alone
from moebench.store.pack import MANIFEST
from moebench.units import GIB

RESERVE_BYTES = 2 * GIB  # disk space left free beside a random pack


def random_pack(geometry: Geometry, layout: str, codec: str, progress: Callable[[str], None]) -> Any:
    """Open or write the random pack of a geometry; refuses, with the sizes, what the disk cannot hold."""
    if layout == "ordered":
        raise UsageError("layout=ordered has no meaning for random experts; a measured replay takes the other layouts")
    folder = home() / "packs"
    folder.mkdir(parents=True, exist_ok=True)
    sizes = (
        f"{geometry.layers}x{geometry.experts}x{geometry.intermediate}x{geometry.hidden}"  # a geometry may be edited
    )
    out = folder / f"random-{geometry.name}-{sizes}-{geometry.quant}-{geometry.group}-{layout}-{codec}"
    if (out / MANIFEST).is_file():  # also where nothing may be written
        return open_kept(out)
    with alone(out.with_name(f"{out.name}.lock")):  # of processes that want it at once one makes it
        return open_kept(out) if (out / MANIFEST).is_file() else _written(geometry, out, layout, codec, progress)


def _written(geometry: Geometry, out: Path, layout: str, codec: str, progress: Callable[[str], None]) -> Any:
    folder = out.parent
    need, free = geometry.keys * geometry.slot_bytes, shutil.disk_usage(folder).free
    if need + RESERVE_BYTES > free:
        raise UsageError(
            f"a measured replay of {geometry.name} writes {need / GIB:.1f} GiB of random experts to {folder}, "
            f"which has {free / GIB:.1f} GiB free; choose a smaller model or set MOEBENCH_HOME to a larger disk"
        )
    from moebench.store.writer import write_random_pack

    progress(f"writing {need / GIB:.1f} GiB of random experts once")
    return write_random_pack(
        out,
        geometry.layers,
        geometry.experts,
        geometry.hidden,
        geometry.intermediate,
        QuantSpec(geometry.quant, geometry.group),
        layout=layout,
        codec=codec,
        matrices=geometry.matrices,
    )
