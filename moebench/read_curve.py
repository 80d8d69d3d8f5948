"""Random-read throughput of a drive over request size and queue depth, and how it is read between the points.

Knows nothing of who declared the numbers beyond the source that stands with them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from moebench.spread import Spread

Table = Spread[tuple[tuple[float, ...], ...]]


@dataclass(frozen=True)
class Points:
    """A measured or declared curve: ``rows[i][j]`` at ``xs[i]``, ``ys[j]``, its source, how it scattered."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...]
    kind: str
    text: str
    spread: Table | None = None
    date: str = ""

    def describe(self) -> str:
        """The source, with the largest spread of the points and the day where they were measured, for people."""
        text = f"{self.kind}: {self.text}"
        if self.spread is not None:
            tables = (self.rows, self.spread.low, self.spread.high)
            points = [point for rows in zip(*tables, strict=True) for point in zip(*rows, strict=True)]
            widest = max((high - low) / value for value, low, high in points)
            text += f", largest spread {widest:.0%} of the value, n {self.spread.n}"
        return text + (f", {self.date}" if self.date else "")


class ReadCurve(Points):
    """Random-read throughput: GB/s for requests of ``xs`` KiB with ``ys`` in flight."""

    def gb_s(self, nbytes: float, depth: float) -> float:
        """Throughput in GB/s at a request size and a queue depth: log-log between points, clamped outside them.

        Never falls with depth: a deeper queue can always be used as a shallower one. Ten digits, so that the last one
        of a machine's logarithm, which differs between processors, cannot reach a replay.
        """
        low, high, share = bracket(self.xs, nbytes / 1024)
        near, far, part = bracket(self.ys, depth)
        best = [[max(row[: j + 1]) for j in (near, far)] for row in (self.rows[low], self.rows[high])]
        ends = [math.log(a) * (1 - part) + math.log(b) * part for a, b in best]
        return float(f"{math.exp(ends[0] * (1 - share) + ends[1] * share):.10g}")


def bracket(axis: tuple[float, ...], x: float) -> tuple[int, int, float]:
    """Indices around ``x`` and how far along, logarithmically, it lies between them."""
    if x <= axis[0]:
        return 0, 0, 0.0
    if x >= axis[-1]:
        return len(axis) - 1, len(axis) - 1, 0.0
    high = bisect_right(axis, x)
    return high - 1, high, math.log(x / axis[high - 1]) / math.log(axis[high] / axis[high - 1])
