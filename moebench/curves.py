"""Curves of a machine beside its one read curve: what reads, copies, kernels and layers take over two axes.

Knows names, units and axes of curves, and how one is read between its points; knows not who measured it.
"""

from __future__ import annotations

import math
from itertools import accumulate

from moebench.read_curve import Points, bracket

RATE, TIME = "GB/s", "us"
# name -> (unit, axes, meaning). Neither rate nor time falls along the second axis: what is queued deeper can be queued
# less deep, what is done for more rows can be done for fewer.
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
    "first_layers": (TIME, "sequences", "row_counts", "as layers, in the pass that begins so many sequences"),
}


class TimeCurve(Points):
    """Seconds, of rows in microseconds."""

    def seconds(self, x: float, y: float) -> float:
        """Log-log between the points, along the line through the last two beyond them, clamped before the first; within
        the first axis never less for more along the second.
        """
        found = _along(self.xs, [_along(self.ys, list(accumulate(row, max)), y) for row in self.rows], x)
        return float(f"{found:.10g}") * 1e-6


def _along(axis: tuple[float, ...], values: list[float], at: float) -> float:
    """The value at one place of an axis."""
    if at > axis[-1] and len(axis) > 1:
        slope = (values[-1] - values[-2]) / (axis[-1] - axis[-2])
        return values[-1] + max(0.0, slope) * (at - axis[-1])
    low, high, share = bracket(axis, at)
    return math.exp(math.log(values[low]) * (1 - share) + math.log(values[high]) * share)
