"""Profiles of this machine held to less: the same file with the declared numbers changed, and nothing else.

Knows a profile's form; holds the machine to nothing (``scripts/throttled.sh`` does).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import yaml

from moebench.errors import UsageError
from moebench.hardware import from_dict
from moebench.units import GB, GIB
from moebench.yamlfile import read_yaml


def derive(source: Path, folder: Path, read_mb_s: float, ram_gib: float) -> str:
    """Write the profile ``source`` with reads limited to ``read_mb_s`` (0: as it is) and with ``ram_gib`` of memory (0:
    as it is) into ``folder``; returns its name.

    A process in a memory group has it to itself: what others hold of the machine's memory does not count there, and
    what is reserved is what Python and its libraries take.
    """
    data: dict[str, Any] = read_yaml(source)
    name = data["id"]
    if read_mb_s:
        data["storage"]["limit_gb_s"] = _set(read_mb_s * 1e6 / GB, "GB/s", f"reads limited to {read_mb_s:g} MB/s")
        name += f"-{read_mb_s:g}mb_s"
    if ram_gib:
        if ram_gib >= data["memory"]["ram_gib"]["value"]:
            raise UsageError(f"ram_gib={ram_gib:g} is not less than what {data['title']} has")
        data["memory"]["ram_gib"] = _set(ram_gib, "GiB", f"a memory group of {ram_gib:g} GiB")
        used = round(psutil.Process().memory_info().rss / GIB, 3)
        data["memory"]["reserve_gib"] = _set(used, "GiB", "what Python and its libraries take", "measured")
        name += f"-{ram_gib:g}gib"
    data |= {"id": name, "title": f"{data['title']}, held to less"}
    path = folder / f"{name}.yaml"
    from_dict(data, str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(yaml.safe_dump(data, sort_keys=False, width=10_000, default_flow_style=None))
    partial.replace(path)
    return name


def _set(value: float, unit: str, text: str, kind: str = "datasheet") -> dict[str, Any]:
    return {"value": value, "unit": unit, "source": f"{kind}: {text}"}
