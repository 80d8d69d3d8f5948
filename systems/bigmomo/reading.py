"""How the reads of a whole window go to storage: sorted by place, neighbours and what lies near in one request.

Knows places and the read curve; knows no system, no file and no clock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

DEPTHS = 32  # requests in flight beyond which a drive gains nothing more
NEVER = -1  # the gap of one that joins nothing


def request_ends(places: np.ndarray, gap: int, most: int) -> np.ndarray:
    """bool [n - 1]: a request ends between two of the ascending ``places`` (int64 [n]).

    One request reads across at most ``gap`` experts that nobody wants, and ``most`` experts in all, those included:
    a longer run is cut into pieces of that length from its start.
    """
    if gap == NEVER:
        return np.ones(max(0, len(places) - 1), bool)
    ends = np.diff(places) > gap + 1
    begins = np.where(np.append(True, ends), np.arange(len(places)), 0)
    piece = (places - places[np.maximum.accumulate(begins)]) // most
    return ends | (np.diff(piece) != 0)


def spans(places: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Experts that each request reads, the unwanted ones included, int64 [requests]."""
    return places[np.append(ends, True)] - places[np.append(True, ends)] + 1


class Reader:
    """Plans the reads of one wave. ``gap`` is how many unwanted experts a request may read along, ``NEVER`` for one
    request each, or None for what is quickest by ``request_s(count, depth)``: seconds of one request of ``count``
    experts with ``depth`` in flight. ``most`` experts make one request.
    """

    def __init__(self, gap: int | None, most: int, request_s: Callable[[int, int], float] | None = None) -> None:
        self.gap, self.most = gap, most
        if gap is None:
            depths = range(1, DEPTHS + 1)
            self.seconds = np.array([[request_s(count, depth) for depth in depths] for count in range(1, most + 1)])

    def plan(self, keys: np.ndarray, places: np.ndarray) -> tuple[list[tuple[int, ...]], int]:
        """Keys of each request in order of place, and how many experts are read along that nobody wants."""
        order = np.argsort(places, kind="stable")
        keys, places = keys[order], places[order]
        ends = request_ends(places, self.best_gap(places) if self.gap is None else self.gap, self.most)
        between = int(spans(places, ends).sum()) - len(keys)
        return [tuple(run.tolist()) for run in np.split(keys, np.flatnonzero(ends) + 1)], between

    def best_gap(self, places: np.ndarray) -> int:
        """The gap, or ``NEVER``, with which these reads (ascending places) are over first; of equals the one that reads
        no more than is wanted, and that in the fewest requests.

        Reading along g experts pays where they take less than the request that is saved: T(a + g + b) < T(a) + T(b),
        each T at the depth that the requests of this window make: with few others in flight one long request may be
        slower than two. Only gaps that occur are tried.
        """
        found = np.unique(np.diff(places)) - 1
        tried = [0, NEVER, *(g for g in found.tolist() if 0 < g <= self.most - 2)]
        times = [self.total_s(spans(places, request_ends(places, gap, self.most))) for gap in tried]
        return tried[int(np.argmin(times))]

    def total_s(self, sizes: np.ndarray) -> float:
        """Seconds until storage has served requests of ``sizes`` (int64, in experts) that are issued together: the sum
        of their service at that depth, and no less than the longest takes alone.
        """
        depth = min(DEPTHS, len(sizes)) - 1
        return max(float(self.seconds[sizes - 1, depth].sum()), float(self.seconds[sizes - 1, 0].max()))
