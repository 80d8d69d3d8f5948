"""Routers of random models whose routing is known: how often each expert of a layer is among the chosen.

A normalised hidden state x of width H has length sqrt(H), so a row of length s gives it a score that is close to
normal, of deviation s. An expert is chosen where its score exceeds a threshold, which one row alone hardly moves: with
s = 1 / Phi^-1(1 - p) and the threshold at 1 it is chosen with probability p. Knows numpy alone.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from moebench.errors import UsageError

MOST = 0.4  # a score that is symmetric about 0 exceeds a threshold above 0 less than half of the time


def shares(experts: int, top_k: int, law: str) -> np.ndarray:
    """Probability that an expert is among the chosen, by rank [experts]; they add up to ``top_k``.

    ``zipf``: falls as 1 / rank, and is cut at MOST.
    """
    if law == "uniform":
        return np.full(experts, top_k / experts)
    if top_k >= MOST * experts:
        raise UsageError(f"router=zipf needs more than {top_k / MOST:g} experts to choose {top_k} of, got {experts}")
    falling, low, high = 1 / np.arange(1, experts + 1), 0.0, float(experts)
    while high - low > 1e-12 * high:
        factor = (low + high) / 2
        low, high = (factor, high) if np.minimum(MOST, factor * falling).sum() < top_k else (low, factor)
    return np.minimum(MOST, high * falling)


def by_rank(experts: int, seed: int, layer: int) -> np.ndarray:
    """Experts of one layer, most used first: each layer has its own."""
    return np.random.default_rng([seed, layer]).permutation(experts)


def router_rows(share_by_rank: np.ndarray, hidden: int, seed: int, layer: int) -> np.ndarray:
    """Weights fp32 [experts, hidden] of the router of one layer."""
    lengths = [1 / NormalDist().inv_cdf(1 - min(share, MOST)) for share in share_by_rank]
    rows = np.random.default_rng([seed, layer, 1]).standard_normal((len(lengths), hidden), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[by_rank(len(lengths), seed, layer)] *= np.array(lengths, np.float32)[:, None]
    return rows


def chosen_by_token(tokens: int, top_k: int, experts: int, seed: int) -> np.ndarray:
    """Experts of each token id for layers that choose by it, int64 [tokens, top_k], different ones in a row."""
    rng = np.random.default_rng(seed)
    first, step = rng.integers(experts, size=(tokens, 1)), rng.integers(1, max(2, experts // top_k), size=(tokens, 1))
    return (first + step * np.arange(top_k)) % experts
