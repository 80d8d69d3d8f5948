"""Statistics of a routing trace, by the definitions that published numbers use; knows no caches and no bytes.

Everything is taken within sequences: the last token of one and the first of the next are not neighbours. Hit rates by
policy and budget are in ``moebench.residency.replay.hit_rates``. ``docs/traces.md`` defines each figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from moebench.step import ABSENT, DECODE
from moebench.trace.counting import HORIZON, compiled
from moebench.trace.format import Trace

CHUNK = 4096
LAGS = (1, 2, 4, 8, 16, 32, 63)
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16)
SHARES = (0.0625, 0.125, 0.25, 0.5)  # of a layer's experts, the busiest
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LONGEST = 4096  # tokens between two uses that are told apart
TESTED = 8192  # tokens that a prediction is tested on, at most


def statistics(trace: Trace) -> dict[str, Any]:
    """All statistics as a JSON-able dict; a value that the trace is too short for is None."""
    shared, chosen, distances = recurrences(trace, LAGS)
    by_layer = [_ratios(*both) for both in zip(shared, chosen, strict=True)]
    return {
        "tokens": trace.tokens,
        "sequences": len(trace.sequence_starts),
        "gaps": list(trace.metadata.get("gaps", [])),
        "overlap": {str(lag): _mean(found) for lag, found in zip(LAGS, by_layer, strict=True)},
        "overlap_chance": trace.top_k / trace.expert_count,
        "overlap_by_layer": by_layer[0],
        "popularity": popularity(trace),
        "popularity_in_sequence": popularity(trace, within_sequence=True),
        "unique_experts": {str(window): unique_experts(trace, window) for window in WINDOWS},
        "unique_experts_in_batch": {str(batch): unique_in_batch(trace, batch) for batch in BATCHES},
        "reuse_distance": reuse_distance(trace, distances),
        "next_token": next_token(trace),
        "next_layer": next_layer(trace),
        **{
            name: prediction(trace, channel)
            for name, channel in trace.channels.items()
            if name.startswith("predicted.")
        },
    }


def overlap_by_layer(trace: Trace, lag: int) -> list[float | None]:
    """Per layer: share of a token's experts that the token ``lag`` (1 to 63) before it, in its sequence, chose too."""
    shared, chosen, _ = recurrences(trace, (lag,))
    return _ratios(shared[0], chosen[0])


def overlap(trace: Trace, lag: int) -> float | None:
    """Mean of ``overlap_by_layer`` over layers."""
    return _mean(overlap_by_layer(trace, lag))


def recurrences(trace: Trace, lags: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per lag and layer the choices that recur and those that could, int64 [lags, L] each; and uses by distance.

    The last, int64 [LONGEST + 1], counts uses by the tokens since the expert's use before, in one sequence.
    """
    if not all(1 <= lag < HORIZON for lag in lags):
        raise ValueError(f"lags are 1 to {HORIZON - 1} tokens, got {', '.join(map(str, lags))}")
    distances = np.zeros(LONGEST + 1, np.int64)
    asked = np.array(lags, np.int64)
    counted = compiled()["recurrences"](trace.experts, trace.sequence, trace.expert_count, asked, distances)
    return *counted, distances


def _ratios(shared: np.ndarray, chosen: np.ndarray) -> list[float | None]:
    return [int(s) / int(c) if c else None for s, c in zip(shared, chosen, strict=True)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
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


def _uses(trace: Trace, within_sequence: bool) -> list[np.ndarray]:
    """Uses of each expert, most used first, int64 [L, E]: of the whole trace, or of each sequence."""
    bounds = [*trace.sequence_starts.tolist(), trace.tokens] if within_sequence else [0, trace.tokens]
    size = trace.layers * trace.expert_count
    flat = trace.experts + np.arange(trace.layers, dtype=np.int64)[:, None] * trace.expert_count
    found = []
    for low, high in pairwise(bounds):
        counts = np.bincount(flat[low:high][trace.experts[low:high] != ABSENT], minlength=size)
        found.append(np.sort(counts.reshape(trace.layers, -1), axis=1)[:, ::-1])
    return found


def top_share(trace: Trace, share: float = 0.25, within_sequence: bool = False) -> float | None:
    """Selections that go to the busiest ``share`` of a layer's experts, busiest in the trace or in each sequence."""
    return _top(_uses(trace, within_sequence), share)


def _top(uses: list[np.ndarray], share: float) -> float | None:
    top = max(1, round(share * uses[0].shape[1]))
    total = sum(int(counts.sum()) for counts in uses)
    return sum(int(counts[:, :top].sum()) for counts in uses) / total if total else None


def popularity(trace: Trace, within_sequence: bool = False) -> dict[str, Any]:
    """How unevenly a layer's experts are used, in the whole trace or in one sequence (mean weighted by selections).

    ``top`` shares of the busiest, Gini coefficient (0: all alike), and the Zipf exponent: minus the slope of log uses
    over log rank, by least squares over experts that were used, mean over layers.
    """
    uses = _uses(trace, within_sequence)
    if not sum(int(counts.sum()) for counts in uses):
        return {"top": dict.fromkeys(map(str, SHARES)), "gini": None, "zipf": None, "unused": None}
    weights = [int(counts.sum()) for counts in uses]
    means = {
        name: float(np.average([law(counts) for counts in uses], weights=weights))
        for name, law in (("gini", _gini), ("zipf", _zipf), ("unused", lambda counts: float((counts == 0).mean())))
    }
    return {"top": {str(share): _top(uses, share) for share in SHARES}, **means}


def _gini(counts: np.ndarray) -> float:
    """Mean over layers of the Gini coefficient of uses, descending [L, E]; layers without uses are left out."""
    used = counts[counts.sum(axis=1) > 0]
    size = used.shape[1]
    below = (used * np.arange(size, 0, -1)).sum(axis=1) / used.sum(axis=1)  # each use weighs its ascending rank
    return float(((2 * below - size - 1) / size).mean())


def _zipf(counts: np.ndarray) -> float:
    """Mean over layers of the Zipf exponent of uses, descending [L, E]."""
    slopes = []
    for row in counts:
        used = np.log(row[row > 0])
        if len(used) > 1:
            rank = np.log(np.arange(1, len(used) + 1))
            rank -= rank.mean()
            slopes.append(-float((rank * used).sum() / (rank * rank).sum()))
    return sum(slopes) / len(slopes) if slopes else 0.0


def unique_experts(trace: Trace, window: int) -> float | None:
    """Mean number of distinct experts that one layer uses in ``window`` consecutive tokens of a sequence."""
    bounds = [*trace.sequence_starts.tolist(), trace.tokens]
    starts = [np.arange(low, high - window + 1, window) for low, high in pairwise(bounds)]
    rows = np.concatenate([np.empty(0, np.int64), *starts])[:, None] + np.arange(window)
    return _mean_distinct(trace, rows)


def unique_in_batch(trace: Trace, batch: int) -> float | None:
    """Mean number of distinct experts that one layer uses in a step of ``batch`` sequences that decode side by side.

    Sequences that share a batch lie far apart in the trace. They start together and stop with the shortest.
    """
    starts = trace.sequence_starts
    ends = np.append(starts[1:], trace.tokens)
    decode = np.flatnonzero(trace.phase == DECODE)
    first, end = np.searchsorted(decode, starts), np.searchsorted(decode, ends)
    first, end = first[end > first], end[end > first]
    groups = len(first) // batch
    rows = [np.empty((0, batch), np.int64)]
    for group in range(groups):
        members = np.arange(batch) * groups + group
        steps = np.arange(int((end - first)[members].min()))
        rows.append(decode[first[members][None, :] + steps[:, None]])
    return _mean_distinct(trace, np.concatenate(rows))


def _mean_distinct(trace: Trace, rows: np.ndarray) -> float | None:
    if not len(rows):
        return None
    return compiled()["distinct"](trace.experts, rows, trace.expert_count) / (len(rows) * trace.layers)


def reuse_distance(trace: Trace, distances: np.ndarray) -> dict[str, Any]:
    """Tokens between two uses of one expert in a sequence, of ``distances`` as ``recurrences`` counts them.

    Quantiles are of uses that came back.
    ``within`` is the share of all uses that come back within so many tokens; the rest come later, or never.
    """
    total, uses = int(distances.sum()), int((trace.experts != ABSENT).sum())
    if not total:
        return {"p50": None, "p90": None, "p99": None, "within": dict.fromkeys(map(str, DISTANCES))}
    reached = np.cumsum(distances)
    quantiles = {f"p{q}": int(np.searchsorted(reached, total * q / 100)) for q in (50, 90, 99)}
    return {**quantiles, "within": {str(d): int(reached[d]) / uses for d in DISTANCES}}


def next_layer(trace: Trace) -> dict[str, float | None]:
    """Recall of layer l+1's experts from layer l's, by counts of the trace's first half, tested on its second.

    ``conditional`` ranks by summed counts of (expert at l, expert at l+1) pairs, ``frequency`` by counts at l+1 alone.
    """
    rows = np.arange(trace.tokens)
    return _foretold(trace, rows, trace.layers - 1, lambda at: (trace.experts[:, at], trace.experts[:, at + 1]))


def next_token(trace: Trace) -> dict[str, float | None]:
    """Recall of a token's experts from those of the token before it in the same layer; ranks as ``next_layer`` does.

    ``repeat`` says that the same experts come again: it is the overlap at lag 1 over all selections.
    """
    rows = np.flatnonzero(trace.sequence[1:] == trace.sequence[:-1]) + 1
    found = _foretold(trace, rows, trace.layers, lambda at: (trace.experts[rows - 1, at], trace.experts[rows, at]))
    shared, chosen, _ = recurrences(trace, (1,))
    return {**found, "repeat": int(shared.sum()) / int(chosen.sum()) if chosen.any() else None}


def _foretold(
    trace: Trace, rows: np.ndarray, layers: int, pair: Callable[[int], tuple[np.ndarray, np.ndarray]]
) -> dict[str, float | None]:
    """Recall by two counts of the first half of ``rows``, on at most ``TESTED`` rows spread over the second."""
    half = trace.tokens // 2
    places = np.arange(len(rows))
    learn, test = places[rows < half], places[rows >= half]
    test = test[:: max(1, -(-len(test) // TESTED))]
    found = np.zeros(3, np.int64)
    if len(learn) and len(test):
        for layer in range(layers):
            before, after = map(np.ascontiguousarray, pair(layer))
            found += compiled()["foretold"](before, after, learn, test, trace.expert_count)
    conditional, frequency, total = found.tolist()
    return {"conditional": conditional / total if total else None, "frequency": frequency / total if total else None}
