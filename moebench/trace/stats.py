"""Statistics of a routing trace, by the definitions that published numbers use; knows no caches and no bytes.

Everything is taken within sequences: the last token of one and the first of the next are not neighbours. Hit rates by
policy and budget are in ``moebench.residency.replay.hit_rates``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from moebench.step import ABSENT
from moebench.trace.format import Trace

CHUNK = 4096


def statistics(trace: Trace) -> dict[str, Any]:
    """All statistics as a JSON-able dict; a value that the trace is too short for is None."""
    return {
        "tokens": trace.tokens,
        "sequences": len(trace.sequence_starts),
        "overlap": {str(lag): overlap(trace, lag) for lag in (1, 2, 4, 8)},
        "overlap_chance": trace.top_k / trace.expert_count,
        "overlap_by_layer": overlap_by_layer(trace, 1),
        "top_quarter_share": {"global": top_share(trace), "sequence": top_share(trace, within_sequence=True)},
        "unique_experts": {str(window): unique_experts(trace, window) for window in (1, 8, 32, 128)},
        "reuse_distance": reuse_distance(trace),
        "next_layer": next_layer(trace),
        **{
            name: prediction(trace, channel)
            for name, channel in trace.channels.items()
            if name.startswith("predicted.")
        },
    }


def overlap_by_layer(trace: Trace, lag: int) -> list[float | None]:
    """Per layer: share of a token's experts that the token ``lag`` before it, in the same sequence, chose too."""
    shared = np.zeros(trace.layers, np.int64)
    chosen = np.zeros(trace.layers, np.int64)
    pairs = np.flatnonzero(trace.sequence[lag:] == trace.sequence[: max(0, trace.tokens - lag)]) + lag
    for start in range(0, len(pairs), CHUNK):
        rows = pairs[start : start + CHUNK]
        now, before = trace.experts[rows], trace.experts[rows - lag]
        present = now != ABSENT
        shared += ((now[..., :, None] == before[..., None, :]).any(axis=-1) & present).sum(axis=(0, 2))
        chosen += present.sum(axis=(0, 2))
    return [int(s) / int(c) if c else None for s, c in zip(shared, chosen, strict=True)]


def overlap(trace: Trace, lag: int) -> float | None:
    """Mean of ``overlap_by_layer`` over layers."""
    known = [value for value in overlap_by_layer(trace, lag) if value is not None]
    return sum(known) / len(known) if known else None


def prediction(trace: Trace, channel: np.ndarray) -> dict[str, float | None]:
    """Of predicted experts [T, L, k]: share of (token, layer) pairs that have any, and how often the router agrees."""
    return {
        "rows": float((channel != ABSENT).any(axis=2).mean()) if trace.tokens else None,
        "overlap": agreement(trace.experts, channel),
    }


def agreement(experts: np.ndarray, said: np.ndarray) -> float | None:
    """Share of the experts ``said`` [T, L, k] that stand among the first k of ``experts`` [T, L, ...] there."""
    right = count = 0
    for start in range(0, len(said), CHUNK):
        some, own = said[start : start + CHUNK], experts[start : start + CHUNK, :, : said.shape[2]]
        present = some != ABSENT
        right += int(((some[..., :, None] == own[..., None, :]).any(axis=-1) & present).sum())
        count += int(present.sum())
    return right / count if count else None


def top_share(trace: Trace, share: float = 0.25, within_sequence: bool = False) -> float | None:
    """Selections that go to the busiest ``share`` of a layer's experts, busiest in the trace or in each sequence."""
    bounds = [*trace.sequence_starts.tolist(), trace.tokens] if within_sequence else [0, trace.tokens]
    size = trace.layers * trace.expert_count
    top = max(1, round(share * trace.expert_count))
    flat = trace.experts + np.arange(trace.layers, dtype=np.int64)[:, None] * trace.expert_count
    busiest = total = 0
    for low, high in pairwise(bounds):
        chosen = flat[low:high][trace.experts[low:high] != ABSENT]
        counts = np.sort(np.bincount(chosen, minlength=size).reshape(trace.layers, -1), axis=1)
        busiest += int(counts[:, -top:].sum())
        total += len(chosen)
    return busiest / total if total else None


def unique_experts(trace: Trace, window: int) -> float | None:
    """Mean number of distinct experts that one layer uses in ``window`` consecutive tokens of a sequence."""
    bounds = [*trace.sequence_starts.tolist(), trace.tokens]
    starts = [s for low, high in pairwise(bounds) for s in range(low, high - window + 1, window)]
    if not starts:
        return None
    distinct = 0
    for start in starts:
        ids = np.sort(trace.experts[start : start + window].swapaxes(0, 1).reshape(trace.layers, -1), axis=1)
        distinct += int((np.diff(ids, axis=1, prepend=ABSENT) != 0).sum())
    return distinct / (len(starts) * trace.layers)


def reuse_distance(trace: Trace) -> dict[str, float | None]:
    """Tokens between two uses of one expert in one sequence: quantiles, and the share of uses that recur within 8."""
    token, layer, _ = np.nonzero(trace.experts != ABSENT)
    group = trace.sequence[token].astype(np.int64) * trace.layers + layer
    key = group * trace.expert_count + trace.experts[trace.experts != ABSENT]
    order = np.argsort(key, kind="stable")
    again = np.diff(key[order]) == 0
    distance = np.diff(token[order])[again]
    if not len(distance):
        return {"p50": None, "p90": None, "p99": None, "within_8": None}
    quantiles = {f"p{q}": float(np.percentile(distance, q, method="inverted_cdf")) for q in (50, 90, 99)}
    return {**quantiles, "within_8": float((distance <= 8).sum() / len(key))}


def next_layer(trace: Trace) -> dict[str, float | None]:
    """Recall of layer l+1's experts from layer l's, by counts of the trace's first half, tested on its second.

    ``conditional`` ranks by summed counts of (expert at l, expert at l+1) pairs, ``frequency`` by counts at l+1 alone.
    """
    half = trace.tokens // 2
    if half < 1 or trace.layers < 2:
        return {"conditional": None, "frequency": None}
    hits = {"conditional": 0, "frequency": 0}
    total = 0
    before = _one_hot(trace, 0)
    for layer in range(1, trace.layers):
        after = _one_hot(trace, layer)
        pairs = before[:half].T @ after[:half]
        scores = {"conditional": before[half:] @ pairs, "frequency": after[:half].sum(axis=0)[None, :]}
        for name, score in scores.items():
            best = np.argsort(-score, axis=1, kind="stable")[:, : trace.top_k]
            best = np.broadcast_to(best, (trace.tokens - half, trace.top_k))
            hits[name] += int(np.take_along_axis(after[half:], best, axis=1).sum())
        total += int(after[half:].sum())
        before = after
    return {name: count / total if total else None for name, count in hits.items()}


def _one_hot(trace: Trace, layer: int) -> np.ndarray:
    """float32 [T, E]: 1 where the token chose the expert."""
    hot = np.zeros((trace.tokens, trace.expert_count + 1), np.float32)
    hot[np.arange(trace.tokens)[:, None], trace.experts[:, layer]] = 1  # absent lands in the last column
    return hot[:, :-1]
