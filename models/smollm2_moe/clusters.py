"""Which neurons of a feed-forward layer every token shares, and which form an expert because they fire together.

Knows activation profiles; knows no model. numpy only.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 12  # of k-means; the partition hardly changes after a few
AXES = 48  # principal components in which profiles are compared


def shared_neurons(energy: np.ndarray, count: int) -> np.ndarray:
    """The ``count`` neurons with the largest mean squared contribution (fp [F]), ascending int64."""
    return np.sort(np.argsort(-energy, kind="stable")[:count])


def profiles(contribution: np.ndarray) -> np.ndarray:
    """fp32 [F, AXES] from contributions |a| [N, F]: each neuron's course over tokens, centred, of length 1, in the
    directions in which they differ most.
    """
    course = contribution - contribution.mean(0)
    course = course / (np.linalg.norm(course, axis=0) + 1e-9)
    values, vectors = np.linalg.eigh(course.T @ course)
    axes = min(AXES, len(values))
    return (vectors[:, -axes:] * np.sqrt(np.maximum(values[-axes:], 0))).astype(np.float32)


def balanced(points: np.ndarray, groups: int, seed: int) -> np.ndarray:
    """Groups of equal size: int64 [groups, F / groups] of row numbers of ``points`` fp32 [F, d], each row in one group.

    k-means whose assignment fills groups in the order of regret: who loses most by its second choice goes first.
    ``ValueError`` where rows do not divide.
    """
    rows = len(points)
    if rows % groups:
        raise ValueError(f"{rows} neurons do not form {groups} groups of equal size")
    rng = np.random.default_rng(seed)
    centres = points[_spread(points, groups, rng)]
    for _ in range(ROUNDS):
        chosen = _assign(((points[:, None] - centres[None]) ** 2).sum(-1), rows // groups)
        fresh = np.stack([points[chosen == g].mean(0) for g in range(groups)])
        if np.allclose(fresh, centres):
            break
        centres = fresh
    return np.stack([np.flatnonzero(chosen == g) for g in range(groups)])


def _spread(points: np.ndarray, groups: int, rng: np.random.Generator) -> list[int]:
    """Rows far from each other, drawn by squared distance (k-means++, Arthur and Vassilvitskii 2007)."""
    chosen = [int(rng.integers(len(points)))]
    nearest = ((points - points[chosen[0]]) ** 2).sum(-1)
    while len(chosen) < groups:
        total = nearest.sum()
        share = nearest / total if total > 0 else np.full(len(points), 1 / len(points))
        chosen.append(int(rng.choice(len(points), p=share)))
        nearest = np.minimum(nearest, ((points - points[chosen[-1]]) ** 2).sum(-1))
    return chosen


def _assign(distance: np.ndarray, size: int) -> np.ndarray:
    """Group int64 [F] of each row by distances fp [F, G], at most ``size`` rows in each."""
    free = np.full(distance.shape[1], size)
    group = np.full(len(distance), -1)
    left = np.arange(len(distance))
    while len(left):
        open_ = np.flatnonzero(free)
        away = distance[np.ix_(left, open_)]
        best = away.argmin(1)
        regret = np.inf if len(open_) == 1 else np.partition(away, 1, axis=1)[:, 1] - away.min(1)
        order = np.argsort(-np.broadcast_to(regret, len(left)), kind="stable")
        for row in order:  # until a group is full: then regrets are no longer those of the groups that are open
            to = open_[best[row]]
            group[left[row]] = to
            free[to] -= 1
            if not free[to]:
                break
        left = left[group[left] < 0]
    return group


def borrowed(contribution: np.ndarray, members: np.ndarray, chosen: np.ndarray, count: int) -> np.ndarray:
    """For each expert the ``count`` neurons of other experts that are missed most while it runs: int64 [E, count].

    ``contribution`` squared [N, F]; ``members`` int64 [E, n]; ``chosen`` bool [N, E]. A neuron is missed at a token
    whose own expert does not run there; one that no expert owns has to contribute zero.
    """
    owner = np.zeros(contribution.shape[1], np.int64)
    owner[members.ravel()] = np.repeat(np.arange(len(members)), members.shape[1])
    missed = contribution * ~chosen[:, owner]
    felt = chosen.T.astype(np.float32) @ missed  # [E, F]
    return np.argsort(-felt, axis=1, kind="stable")[:, :count]
