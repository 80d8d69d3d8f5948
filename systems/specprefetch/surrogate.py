"""What a predictor would have said, made up for a trace that has no channel of it. Knows routings; knows no time.

The law. Of a token's K experts at a layer, the K/2, K and K+2 best predicted hold the stated shares: each place up to
K/2, from there to K, and the two after, is right with the probability that gives the stated recall on average. Right
places take the token's experts in the router's order (what it weighs most is found first), wrong ones what the same
layer used at other decoded tokens of the same sequence, drawn uniformly, never one of the token's own. So a wrong
prediction is as popular as any. Two layers ahead, recall is ``LAG_2`` of that for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moebench.errors import UsageError
from moebench.step import ABSENT, DECODE
from moebench.trace.draws import Draws
from moebench.trace.format import Trace

LAG_2 = 61.5 / 67.2  # trained predictors, one and two layers ahead: 67.2 and 61.5 % (DimitriChrysafis/moe-prefetch)
DONORS = 4  # other tokens that a row's wrong places may come from
UNIT = 1 << 16
MORE = 2  # places beyond K


def chances(k: int, recall: Sequence[float]) -> tuple[float, float, float]:
    """Probability that a place is right: up to K/2, from there to K, and in the two after while experts are left.

    ``recall`` is recall at K/2, K and K+2; the last solves E[hits] = 2 q P(left >= 1) - q^2 P(left = 1).
    """
    half = k // 2
    first = min(1.0, 2 * recall[0]) if half else 0.0
    second = min(1.0, max(0.0, (recall[1] * k - first * half) / (k - half)))
    hits = np.array([1.0])
    for p, places in ((first, half), (second, k - half)):
        for _ in range(places):
            hits = np.convolve(hits, [1 - p, p])
    left, one = 1 - hits[k], hits[k - 1]
    wanted = max(0.0, (recall[2] - recall[1]) * k)
    inside = left * left - one * wanted
    third = (left - math.sqrt(max(0.0, inside))) / one if one > 1e-12 else wanted / max(2 * left, 1e-12)
    return first, second, min(1.0, third)


def predicted(trace: Trace, recall: Sequence[float], seed: int) -> np.ndarray:
    """Predicted experts int16 [T, L, K+2], best first, of decoded tokens; else -1. The same on every machine."""
    k, experts = trace.top_k, trace.expert_count
    width = k + MORE
    if 2 * k + MORE > experts:
        raise UsageError(
            f"specprefetch: {k} of {experts} experts leave too few wrong ones for a surrogate's predictions"
        )
    if not 0 <= recall[0] <= recall[1] <= recall[2] <= 1:
        raise UsageError(f"specprefetch: recall {tuple(recall)} at K/2, K, K+2 must ascend within 0..1")
    rows = np.flatnonzero(trace.phase == DECODE)
    out = np.full((trace.tokens, trace.layers, width), ABSENT, np.int16)
    by_place = np.repeat(chances(k, recall), (k // 2, k - k // 2, MORE))
    draw, at = Draws(seed), np.arange(len(rows))
    others = _others(trace.sequence[rows], draw)
    for layer in range(trace.layers):
        own = trace.experts[rows, layer].astype(np.int64)
        right = draw.u16((len(rows), width)) < by_place * UNIT
        for place in range(k, width):  # no more right ones than there are
            right[:, place] &= right[:, :place].sum(1) < k
        rank = (experts + draw.permutations(len(rows), experts)).astype(np.int64)
        rank = np.concatenate([rank, np.zeros((len(rows), 1), np.int64)], axis=1)  # absent lands in the last column
        for i, donor in reversed(list(enumerate(others))):
            for place in reversed(range(k)):
                rank[at, own[donor, place]] = i * k + place
        rank[at[:, None], own] = 1 << 30
        wrong = rank[:, :experts].argsort(axis=1, kind="stable")[:, :width]
        hit, miss = right.cumsum(1) - 1, (~right).cumsum(1) - 1
        chosen = np.where(right, np.take_along_axis(own, hit.clip(0), 1), np.take_along_axis(wrong, miss.clip(0), 1))
        out[rows, layer] = chosen
    return out


def _others(sequence: np.ndarray, draw: Draws) -> list[np.ndarray]:
    """For each decoded row, ``DONORS`` other rows of its sequence (itself where it is alone)."""
    _, first, group, counts = np.unique(sequence, return_index=True, return_inverse=True, return_counts=True)
    first, count = first[group], counts[group]
    nth = np.arange(len(sequence)) - first
    return [first + (nth + 1 + draw.below(np.maximum(count - 1, 1), len(nth))) % count for _ in range(DONORS)]
