"""What of a verification window is worth its movement: which nodes to verify, and which experts they can do without.

Pure arithmetic on drafts and routings (BigMoMo, arXiv 2609.14643, section 4.2). Knows no model, no file and no clock.
A node's value is V_d = p_hat[depth(d)] * product of the draft's probabilities on its path; the last accepted token, the
root of the tree, has value 1. Dropping nodes never changes an answer, dropping experts does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moebench.draft import ROOT, Draft
from moebench.step import ABSENT


class Pruned(NamedTuple):
    """A routing without the experts that were not worth moving."""

    experts: np.ndarray  # int64 [N, k], -1 where one was dropped
    weights: np.ndarray  # float32 [N, k], 0 there
    dropped: np.ndarray  # int64, in the order in which they went
    impact: float  # of all that was dropped, as a share of the window's total


def node_values(draft: Draft, accepted_by_depth: Sequence[float]) -> np.ndarray:
    """V of each node, float64 [n] within 0..1, never larger than its parent's; ``accepted_by_depth[d]`` is the share of
    rounds whose first d + 1 levels are right.
    """
    path = draft.probability.astype(np.float64)
    for node, parent in enumerate(draft.parents.tolist()):
        if parent != ROOT:
            path[node] *= path[parent]
    return np.asarray(accepted_by_depth, np.float64)[draft.depth - 1] * path


def kept_nodes(values: np.ndarray, rho: float) -> np.ndarray:
    """bool [n]: the smallest set of highest values whose sum is at least ``rho`` of the total; 1 keeps all.

    Ancestors of what is kept are kept: a parent is worth no less than its child and comes before it.
    """
    if rho >= 1:
        return np.ones(len(values), bool)
    order = np.argsort(-values, kind="stable")
    sums = np.cumsum(values[order])
    count = int(np.searchsorted(sums, rho * sums[-1])) + 1 if len(sums) and sums[-1] > 0 else 0
    kept = np.zeros(len(values), bool)
    kept[order[:count]] = True
    return kept


def impacts(slot: np.ndarray, alive: np.ndarray, apart: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Routing impact of dropping each expert now, float64 [count]; infinite where a row would lose its last one.

    I_e = sum over rows d routed to e of V_d * min over j of T_d without e of |s_de - s_dj|. ``slot`` int [N, k] says
    which expert each choice is, ``alive`` bool [N, k] which choices are left, ``apart`` [N, k, k] how far scores lie.
    """
    nearest = np.where(alive[:, None, :], apart, np.inf).min(2)
    each = np.where(np.isinf(nearest), np.inf, values[:, None] * np.where(np.isinf(nearest), 0, nearest))
    return np.bincount(slot[alive], each[alive], count)


def pruned_experts(
    experts: np.ndarray, scores: np.ndarray, values: np.ndarray, cost_s: np.ndarray, tau: float
) -> Pruned:
    """Drop experts by the least impact per second of movement, P_e = dI_e / C_e, while what was lost stays within
    ``tau`` of the window's total impact.

    ``experts`` int [N, k] distinct in each row, ``scores`` the router's weights [N, k], ``values`` [N]; ``cost_s`` is
    the movement of each distinct expert in ascending order, 0 where it is resident: such a one is kept. The impact of
    each is taken anew after every drop. A dropped weight goes to the row's remaining expert of the nearest score, so
    that every row keeps one and its sum.
    """
    distinct, slot = np.unique(experts, return_inverse=True)
    slot = slot.reshape(experts.shape)
    apart = np.abs(scores[:, :, None] - scores[:, None, :]).astype(np.float64)
    apart[:, np.arange(experts.shape[1]), np.arange(experts.shape[1])] = np.inf
    alive, left = np.ones(experts.shape, bool), cost_s > 0
    weights = scores.astype(np.float32)
    impact = impacts(slot, alive, apart, values, len(distinct))
    total, spent, dropped = float(impact[np.isfinite(impact)].sum()), 0.0, []
    while (may := left & np.isfinite(impact)).any():
        worth = np.full(len(distinct), np.inf)
        worth[may] = impact[may] / cost_s[may]
        least = int(worth.argmin())
        if spent + impact[least] > tau * total:
            break
        spent += float(impact[least])
        rows, places = np.nonzero(alive & (slot == least))
        alive[rows, places] = left[least] = False
        heirs = np.where(alive[rows], apart[rows, places], np.inf).argmin(1)
        weights[rows, heirs] += weights[rows, places]
        weights[rows, places] = 0
        dropped.append(least)
        impact = impacts(slot, alive, apart, values, len(distinct))
    ids = np.where(alive, experts, ABSENT)
    return Pruned(ids, weights, distinct[dropped].astype(np.int64), spent / total if total else 0.0)
