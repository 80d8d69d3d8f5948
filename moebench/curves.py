"""Curves of a machine beside its one read curve: what reads, copies, kernels and layers take over two axes.

Knows names, units and axes of curves, and how one is read between its points; knows not who measured it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moebench.read_curve import ReadCurve, Table, bracket, described

RATE, TIME = "GB/s", "us"
# name -> (unit, axes, meaning). A rate never falls along its second axis, a time along none: what is done for more rows
# or threads can be done for fewer.
CURVES = {
    "reads.uring": (RATE, "sizes_kib", "depths", "as read_curve, by engine uring"),
    "reads.pread": (RATE, "sizes_kib", "depths", "as read_curve, by engine pread, nothing cached"),
    "reads.mmap": (RATE, "sizes_kib", "depths", "as read_curve, by engine mmap, nothing cached, kernel reading ahead"),
    "cached.pread": (RATE, "sizes_kib", "depths", "as reads.pread, all in the page cache"),
    "cached.mmap": (RATE, "sizes_kib", "depths", "as reads.mmap, all in the page cache"),
    "ahead": (RATE, "sizes_kib", "depths", "as read_curve, with always as many reads queued as the depth says"),
    "sequential": (RATE, "sizes_kib", "depths", "as read_curve, of neighbours in their order"),
    "faults": (TIME, "kib", "threads", "every page of so many neighbouring KiB touched, MADV_RANDOM, nothing cached"),
    "faults_ahead": (TIME, "kib", "threads", "the same with the kernel's readahead"),
    "copy": (RATE, "sizes_kib", "threads", "bytes copied between two buffers, counted once"),
    "experts.none": (TIME, "sizes_kib", "row_counts", "one expert in bf16 on so many rows"),
    "experts.int8": (TIME, "sizes_kib", "row_counts", "one expert in int8 on so many rows"),
    "experts.int4": (TIME, "sizes_kib", "row_counts", "one expert in int4 on so many rows"),
    "dense": (TIME, "sizes_kib", "row_counts", "one square bf16 matrix of so many KiB on so many rows"),
    "layers": (
        TIME,
        "context",
        "row_counts",
        "a layer of the calibrated model without its experts, so many tokens cached",
    ),
}


@dataclass(frozen=True)
class TimeCurve:
    """Seconds: ``rows[i][j]`` microseconds at ``xs[i]``, ``ys[j]``."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...]
    kind: str
    text: str
    spread: Table | None = None
    date: str = ""

    def describe(self) -> str:
        """Source, and how the points scattered, for people."""
        return described(self)

    def seconds(self, x: float, y: float) -> float:
        """Log-log between the points; in proportion beyond the last of an axis, as below the first is the first."""
        beyond = max(1.0, x / self.xs[-1]) * max(1.0, y / self.ys[-1])
        low, high, share = bracket(self.xs, x)
        near, far, part = bracket(self.ys, y)
        best = [[max(max(row[: j + 1]) for row in self.rows[: i + 1]) for j in (near, far)] for i in (low, high)]
        ends = [math.log(a) * (1 - part) + math.log(b) * part for a, b in best]
        return beyond * float(f"{math.exp(ends[0] * (1 - share) + ends[1] * share):.10g}") * 1e-6


Curve = ReadCurve | TimeCurve
