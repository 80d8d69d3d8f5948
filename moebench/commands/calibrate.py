"""``moebench calibrate``: measure this machine's storage, memory and compute into the profile ``hw=host``."""

from __future__ import annotations

import datetime
import json
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from moebench import hardware, probes
from moebench.commands.places import writable_file, writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.machine import detect
from moebench.plugins import home
from moebench.probes import Samples
from moebench.progress import progress_bar
from moebench.units import GIB, KIB

SIZES_KIB = (4, 16, 64, 256, 1024, 4096)
DEPTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class CalibrateOptions:
    """How long to measure and where."""

    seconds: float = option(40.0, "time for random reads; everything else takes about 20 s more")
    dir: str = option(".", "folder on the drive to measure; a temporary file is written there")
    file_gib: float = option(1.0, "size of that file")
    out: str = option("", "profile to write; empty for hardware/host.yaml in moebench's configuration folder")

    def __post_init__(self) -> None:
        if not 1 <= self.seconds <= 600 or not 0.05 <= self.file_gib <= 64:
            raise UsageError("calibrate: seconds must be 1 to 600 and file_gib 0.05 to 64")
        if not Path(self.dir).is_dir():
            raise UsageError(f"calibrate: dir={self.dir} is not a folder")


def main(words: Sequence[str]) -> int:
    """Measure, check the profile as any other, write it whole; the last line is one JSON document."""
    options = parse(words, CalibrateOptions, "calibrate")
    if options is None:
        return 0
    if options.out:
        out = writable_file(options.out)
    else:
        out = writable_folder(home() / "hardware", "moebench's configuration folder") / "host.yaml"
    with progress_bar() as bar:
        task = bar.add_task("calibrating", total=3 * len(SIZES_KIB) * len(DEPTHS) + 8)
        data = measure(options, lambda: bar.advance(task))
    profile = hardware.from_dict(data, str(out))
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.write_text(yaml.safe_dump(data, sort_keys=False, width=10_000))
    partial.replace(out)
    for name, quantity in profile.quantities.items():
        print(f"{name:<26} {quantity.value:10.4g} {quantity.unit:<8} {quantity.kind}: {quantity.text}")
    print(f"{'random reads, best':<26} {max(map(max, profile.read_curve.rows)):10.4g} GB/s")
    print(json.dumps({"profile": str(out), "hw": profile.id}, separators=(",", ":")))
    return 0


def measure(options: CalibrateOptions, tick: Callable[[], None]) -> dict[str, Any]:
    """The profile of this machine as plain data; about ``options.seconds`` plus 20."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()

    def taken(samples: Samples, unit: str, method: str) -> dict[str, Any]:
        tick()
        return number(samples.median, unit, f"{method} ({samples.spread()})")

    def number(value: float, unit: str, method: str, kind: str = "measured") -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "unit": unit, "source": f"{kind}: {method}, {date}"}

    machine, memory = detect(), psutil.virtual_memory()
    nbytes = int(options.file_gib * GIB) // (4 * KIB) * (4 * KIB)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".moebench-") as folder:
        file = Path(folder) / "reads"
        storage = {
            "write_gb_s": taken(probes.write_file(file, nbytes), "GB/s", "sequential writes, synced each 128 MiB")
        }
        handle = probes.open_direct(file)
        try:
            each = options.seconds / (len(SIZES_KIB) * len(DEPTHS))
            points = [(size * KIB, depth) for size in SIZES_KIB for depth in DEPTHS]
            grid = probes.grid(handle, nbytes, points, each, tick)
        finally:
            os.close(handle)
        fault = taken(probes.page_faults(file), "us", "single major faults in a mapping, the read of the page included")
        ahead = number(probes.readahead_kib(file), "KiB", "setting of the drive")
    storage |= {
        "page_fault_us": fault,
        "page_kib": number(mmap.PAGESIZE / KIB, "KiB", "page size"),
        "readahead_kib": ahead,
    }
    spread = max((max(s.values) - min(s.values)) / s.median for s in grid.values())
    stream, products = probes.int4_product(rows=1)[1], probes.int4_product(rows=32)[0]
    copy, handed = probes.memory_copy(), probes.hand_over()
    dispatch = probes.small_operation().median
    arithmetic = taken(products, "TFLOP/s", "int4 products of 32 rows with 2048 x 768")
    return {
        "id": "host",
        "title": f"this machine: {machine.cpu}, {machine.ram_gib:.1f} GiB",
        "match": {"cpu": f"^{re.escape(machine.cpu)}$", "ram_gib": [machine.ram_gib - 0.5, machine.ram_gib + 0.5]},
        "model": "",
        "engine": "direct",
        "stack": "moebench",
        "unified": True,
        "memory": {
            "ram_gib": number(memory.total / GIB, "GiB", "physical memory"),
            "reserve_gib": number((memory.total - memory.available) / GIB, "GiB", "memory in use by others"),
        },
        "storage": storage,
        "bandwidth": {
            "dram_gb_s": taken(copy, "GB/s", "copies of 256 MiB, bytes read plus written"),
            "device_gb_s": taken(stream, "GB/s", "stored bytes of int4 weights that one-row products go through"),
        },
        "compute": {
            "bf16_tflops": taken(probes.bf16_product(), "TFLOP/s", "products of 512 rows with 2048 x 2048"),
            "int4_tflops": arithmetic,
            "cpu_tflops": arithmetic,  # the processor is the device here
            "rans_gb_s": taken(
                probes.rans_decoding(), "GB/s", "decoded bytes of int4 experts, one thread on each core"
            ),
        },
        "read_curve": {
            "unit": "GB/s",
            "source": f"measured: aligned random direct reads, one thread per read in flight, median of 3 passes, "
            f"largest spread {spread:.0%} of the median, {date}",
            "sizes_kib": list(SIZES_KIB),
            "depths": list(DEPTHS),
            "rows": [[float(f"{grid[size * KIB, depth].median:.4g}") for depth in DEPTHS] for size in SIZES_KIB],
        },
        "stacks": {
            "moebench": {
                "per_load_ms": taken(handed, "ms", "work handed to a thread and its result taken back"),
                "host_sync_us": number(0, "us", "the processor computes, so nothing is read back"),
                "layer_floor_us": number(60 * dispatch, "us", f"60 tensor operations at {dispatch:.2f} us", "estimate"),
            }
        },
    }
