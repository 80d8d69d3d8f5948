"""The part of a profile that a drive has: which reads, faults and writes are measured, and in which sizes.

Knows the form of a profile; how a thing is measured stands in the other modules.
"""

from __future__ import annotations

import mmap
from typing import Any

from moebench.probes import faults
from moebench.probes.file import ProbeFile
from moebench.probes.reads import Reader, grid
from moebench.probes.record import Record
from moebench.probes.samples import Samples
from moebench.units import KIB, PAGE

SIZES = tuple(kib * KIB for kib in (4, 16, 64, 256, 1024, 4096, 16384))  # of experts
DEPTHS = (1, 2, 4, 8, 16)
FEW_SIZES, FEW_DEPTHS = tuple(kib * KIB for kib in (16, 64, 1024, 4096)), (1, 4, 8)
STRETCHES, THREADS = tuple(kib * KIB for kib in (4, 64, 1024, 4096)), (1, 2, 4)


def written(file: ProbeFile, record: Record) -> dict[str, Any]:
    """Write the file; how fast. A drive that has just taken much in reads slower for a while."""
    found: dict[str, Any] = {}
    with record.part("storage.write_gb_s", 0.0, needed=True):
        found["write_gb_s"] = record.number(file.write(), "GB/s", "sequential writes, synced each 128 MiB")
    return found


def storage(file: ProbeFile, record: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    """The other numbers of the drive, and its read curve."""
    found: dict[str, Any] = {}
    direct, method = Reader(file, "direct"), "random experts by engine {}, hashed; a demand of so many at a time"
    with record.part("read_curve", 0.13, needed=True) as seconds:
        points = grid(_points(SIZES, DEPTHS, file), direct.cold, seconds)
        reads = record.table(points, method.format("direct"), ("sizes_kib", "depths"), "GB/s", KIB)
    few = _points(FEW_SIZES, FEW_DEPTHS, file)
    for name, engine, state in (
        ("reads.uring", "uring", "cold"),
        ("reads.pread", "pread", "cold"),
        ("reads.mmap", "mmap", "cold"),
        ("cached.pread", "pread", "warm"),
        ("cached.mmap", "mmap", "warm"),
        ("ahead", "direct", "ahead"),
        ("sequential", "direct", "sequential"),
    ):
        with record.part(name, 0.02) as seconds:
            text = method.format(engine)
            text += {"cold": "", "warm": ", all cached", "ahead": ", as prefetches", "sequential": ", in order"}[state]
            work = getattr(Reader(file, engine), state)
            record.curve(name, grid(few, work, seconds), text, KIB)
    with record.part("storage.page_fault_us", 0.005):
        single = faults.single(file, min(400, file.nbytes // (4 * PAGE)))
        found["page_fault_us"] = record.number(single, "us", "single major faults of a mapping, their page read")
    if "page_fault_us" not in found:
        size, _ = least = min(points)
        page = Samples(tuple(size / rate / 1e3 for rate in points[least].values))
        text = f"a direct read of {size // KIB} KiB, as no page could be dropped from the page cache"
        found["page_fault_us"] = record.number(page, "us", text, "estimate")
    for name, advice in (("faults", mmap.MADV_RANDOM), ("faults_ahead", mmap.MADV_NORMAL)):
        with record.part(name, 0.015) as seconds:
            work = faults.Stretches(file, advice).touch
            text = "stretches of a cold mapping copied out, one a thread"
            record.curve(name, grid(_points(STRETCHES, THREADS, file), work, seconds), text, KIB)
    found["page_kib"] = record.fact(mmap.PAGESIZE / KIB, "KiB", "page size")
    found["readahead_kib"] = record.fact(faults.readahead_kib(file.path), "KiB", "setting of the drive")
    return found, reads


def _points(sizes: tuple[int, ...], counts: tuple[int, ...], file: ProbeFile) -> list[tuple[int, int]]:
    """All of both axes, but for sizes of which the file holds too few."""
    return [(size, count) for size in sizes for count in counts if size * max(counts) <= file.nbytes]
