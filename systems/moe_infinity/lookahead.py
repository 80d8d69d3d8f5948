"""Which experts to read ahead, and how many: the predicted ones of later layers, no more than one layer's window moves.

Knows keys, scores and seconds; knows no matrices and no tiers.
"""

from __future__ import annotations

import numpy as np

from moebench.systems.moe_infinity.replacement import EPSILON

MOST = 64  # experts considered at one point
SHARE = 0.8  # of a window; the project's later branches


def priorities(ratio: np.ndarray, layer: int, span: int) -> np.ndarray:
    """(ratio + epsilon) * (1 - (future - now) / span) of the layers behind ``layer``, float64 [L - layer - 1, E].

    ``span`` is L in the paper and L + 1 in its code.
    """
    distance = np.arange(1, len(ratio) - layer)
    return (ratio[layer + 1 :] + EPSILON) * (1.0 - distance / span)[:, None]


def best(scores: np.ndarray, wanted: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` highest ``scores`` [n] among ``wanted`` (bool), highest first, ties by index."""
    at = np.flatnonzero(wanted)
    if len(at) > count:
        own = scores[at]
        edge = np.partition(own, -count)[-count]
        ties = np.flatnonzero(own == edge)[: count - int((own > edge).sum())]  # a partition's choice is the processor's
        at = at[np.union1d(np.flatnonzero(own > edge), ties)]
    return at[np.argsort(-scores[at], kind="stable")]


def worthwhile(chance: np.ndarray, cost: np.ndarray, issue_s: float) -> np.ndarray:
    """bool per read: the seconds it may save, times the chance of use, exceed what starting it costs the host.

    ``chance`` is expected uses by the next token, ``cost`` seconds of the read, 0 while nobody knows it: then it may
    start. An ``issue_s`` not known yet is infinite and counts as nothing.
    """
    return (cost == 0) | (chance * cost > (issue_s if np.isfinite(issue_s) else 0.0))


def admitted(cost: np.ndarray, busy: float, window: float) -> int:
    """How many of the reads, in order, may start now: those that end within ``SHARE`` of one layer's window.

    ``cost`` is seconds of each read, ``busy`` those of reads ahead under way, ``window`` the mean seconds from this
    layer's routing to the next one's. While window or costs are unknown (0) one read starts. The rule is that of the
    overlap admission in the project's later branches, with what is measured here: the window, not compute alone.
    """
    if not window or not cost.all():
        return int(busy == 0.0 and len(cost) > 0)
    return int(np.searchsorted(np.cumsum(cost), SHARE * window - busy, side="right"))
