"""Which experts are read ahead, and how many: scores of a batch, what is already there, and what the window holds.

Knows arrays of scores and keys; knows no predictor and no transfers under way.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def of_batch(rows: np.ndarray, how: str, k: int) -> np.ndarray:
    """One score per expert from scores [rows, experts]: their sum over rows (``mass``: s_e = sum of pi_hat,
    SpecPrefetch, arXiv 2607.24787, method), or in how many rows it is among the best ``k`` (``votes``).
    """
    if how == "mass":
        return rows.sum(0)
    best = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    voted = np.zeros_like(rows)
    np.put_along_axis(voted, best, 1.0, axis=1)
    return (voted * (rows > 0)).sum(0)


def reversed_scores(scores: np.ndarray) -> np.ndarray:
    """The least expected first: what a predictor that is always wrong would say."""
    return 1.0 + scores.max() - scores


def ranking(scores: np.ndarray) -> np.ndarray:
    """Rank of each expert, best 0, ties to the lower id; those that are not expected (score 0) come after all."""
    rank = np.empty(len(scores), np.int64)
    rank[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    return np.where(scores > 0, rank, len(scores))


def fitting(layer: int, lag: int, keys: np.ndarray, view: Any) -> int:
    """M_max = floor(window / transfer time of one expert); 0 while either is not known yet.

    The window lasts from the routing of ``layer`` to that of ``layer + lag``, both measured as running means.
    """
    transfer = float(view.cost(keys).max(initial=0.0))
    return int(sum(view.window(at) for at in range(layer, layer + lag)) / transfer) if transfer > 0 else 0


def chosen(scores: np.ndarray, base: int, most: int, there: np.ndarray, skip: bool) -> np.ndarray:
    """Keys to ask for, best first: the best ``most`` expected of those that are not ``there`` (bool per expert).

    Without ``skip`` those that are there count among the ``most``, and are not asked for either.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > 0]
    if skip:
        return base + order[~there[order]][:most]
    order = order[:most]
    return base + order[~there[order]]
