"""What heads would have chosen, made up for a trace that has no channel of it. Knows routings; knows no heads, no time.

The law. Each of a token's own first ``top_k`` experts of a layer (the trace's router order) is kept with probability
``overlap``: predicted and router's top four share 2.2 to 2.6 of four (Edge0's own notes; arXiv 2609.18063), so 2.4 / 4
= 0.6 is used. Every other place goes to an expert that the same layer used at another decoded token of the same
sequence: token and place among its first ``top_k`` are drawn uniformly, and drawn again if the expert is one of the
token's own or was chosen already; after ``TRIES`` draws it is the lowest unused expert. So popularity and topics stay
the trace's own, and nothing is added to what neighbouring tokens share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moebench.errors import UsageError
from moebench.step import ABSENT, DECODE
from moebench.trace.draws import Draws
from moebench.trace.format import Trace

TRIES = 8
UNIT = 1 << 16  # resolution of ``overlap``
OPEN = -2  # a place that is still to be filled


def predicted(trace: Trace, top_k: int, consumers: Sequence[int], overlap: float, seed: int) -> np.ndarray:
    """Predicted experts int16 [T, L, top_k] of decoded tokens at ``consumers``, the same on every machine; else -1.

    A place that the trace itself leaves absent stays so.
    """
    layers = _checked(trace, top_k, consumers, overlap)
    rows = np.flatnonzero(trace.phase == DECODE)
    own = trace.experts[rows[:, None], layers, :top_k]  # [D, C, k]
    draw = Draws(seed)
    kept = draw.u16(own.shape) < overlap * UNIT
    chosen = np.where(kept | (own == ABSENT), own, np.int16(OPEN)).reshape(-1, top_k)
    _fill(chosen, own, trace.sequence[rows], draw)
    _fill_lowest(chosen, own.reshape(-1, top_k), trace.expert_count)
    out = np.full((trace.tokens, trace.layers, top_k), ABSENT, np.int16)
    out[rows[:, None], layers] = chosen.reshape(own.shape)
    return out


def _checked(trace: Trace, top_k: int, consumers: Sequence[int], overlap: float) -> np.ndarray:
    """The consumer layers as int64 [C]; what cannot be drawn is one clear line."""
    if not 0 <= overlap <= 1:
        raise UsageError(f"edge0: overlap must lie in 0..1, got {overlap}")
    most = min(trace.top_k, trace.expert_count // 2)  # as many others must be left to draw from
    if not 1 <= top_k <= most:
        raise UsageError(
            f"edge0: top_k={top_k} cannot be predicted for a trace of {trace.top_k} of {trace.expert_count} experts a"
            f" token; valid: 1..{most}"
        )
    layers = np.asarray(consumers, np.int64)
    if not ((layers >= 0) & (layers < trace.layers)).all():
        raise UsageError(
            f"edge0: consumers {tuple(consumers)} are not within 0..{trace.layers - 1}, the trace's layers"
        )
    return layers


def _fill(chosen: np.ndarray, own: np.ndarray, sequence: np.ndarray, draw: Draws) -> None:
    """Fill open places of ``chosen`` [D * C, k] from ``own`` [D, C, k] at other tokens of the same sequence [D]."""
    tokens, layers, k = own.shape
    _, first, group, counts = np.unique(sequence, return_index=True, return_inverse=True, return_counts=True)
    first, count = first[group], counts[group]
    nth = np.arange(tokens) - first
    for place in range(k):  # one at a time, so that no two places choose alike
        for _ in range(TRIES):
            at = np.flatnonzero(chosen[:, place] == OPEN)
            token, layer = at // layers, at % layers
            step = 1 + draw.below(np.maximum(count[token] - 1, 1), len(at))  # an only token meets itself
            other = first[token] + (nth[token] + step) % count[token]
            found = own[other, layer, draw.below(k, len(at))]
            used = np.concatenate([own[token, layer], chosen[at]], axis=1)
            failed = (found[:, None] == used).any(axis=1) | (found == ABSENT)
            chosen[at, place] = np.where(failed, np.int16(OPEN), found)


def _fill_lowest(chosen: np.ndarray, own: np.ndarray, experts: int) -> None:
    """Fill what is still open with the lowest experts that a row neither has of its own nor chose."""
    for place in range(chosen.shape[1]):
        at = np.flatnonzero(chosen[:, place] == OPEN)
        used = np.zeros((len(at), experts + 2), bool)  # absent and open land in the last two columns
        used[np.arange(len(at))[:, None], np.concatenate([own[at], chosen[at]], axis=1)] = True
        chosen[at, place] = used[:, :experts].argmin(axis=1)
