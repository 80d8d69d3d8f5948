"""What the nets learn from: features and Belady's next-use distances of every expert after every step of a trace.

Replay is event-atomic: what one layer demands in one step is used at once. Knows demands; knows no cache, no net and no
tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moebench.residency.replay import events
from moebench.trace.format import Trace


@dataclass(frozen=True, eq=False)
class Samples:
    """Float32 [S, L, E] each: the state after each of S steps, and the target; ``held_out`` bool [S] ends training."""

    recency: np.ndarray
    frequency: np.ndarray
    target: np.ndarray
    held_out: np.ndarray


def demands(trace: Trace, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [S, L, E]: which experts each step uses, and int [S]: the request of each step, counted from 0.

    Steps in which a layer was not recorded are left out.
    """
    todo = events(trace, chunk)
    steps = np.array(todo.step)
    used = np.zeros((int(steps.max(initial=-1)) + 1, trace.layers, trace.expert_count), bool)
    request = np.zeros(len(used), np.int64)
    request[steps] = todo.request
    lengths = [len(keys) for keys in todo.keys]
    flat = np.concatenate([np.empty(0, np.int64), *todo.keys])
    used.reshape(len(used), -1)[np.repeat(steps, lengths), flat] = True
    whole = used.any(axis=2).all(axis=1)
    return used[whole], request[whole]


def features(used: np.ndarray, request: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Recency 1 / r and frequency c / max c of one layer after each step, float32 [S, E]; counts start anew with a
    request.
    """
    step = np.arange(len(used))[:, None]
    last = np.maximum.accumulate(np.where(used, step, -1), axis=0)
    recency = np.where(last >= 0, 1.0 / (step - last + 1), 0.0).astype(np.float32)
    count = used.cumsum(axis=0, dtype=np.int32)
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    before = np.concatenate([np.zeros((1, used.shape[1]), np.int32), count])[starts]
    count -= np.repeat(before, np.diff(starts, append=len(used)), axis=0)
    most = np.maximum(1, count.max(axis=1, keepdims=True))
    return recency, (count / most).astype(np.float32)


def next_use(used: np.ndarray, horizon: int) -> np.ndarray:
    """Steps from each step of a layer to the next one that uses an expert, int [S, E]; later, or never, is ``horizon``.

    One backward pass: what is used in this step has distance 1 from the step before.
    """
    distance = np.empty(used.shape, np.int32)
    ahead = np.full(used.shape[1], horizon, np.int32)
    for step in range(len(used) - 1, -1, -1):
        distance[step] = ahead
        ahead = np.where(used[step], 1, np.minimum(ahead + 1, horizon))
    return distance


def held_out_rows(trace: Trace, share: float) -> slice:
    """Rows of the last ``share`` of a trace's requests or, if it has one request, of its tokens."""
    starts = trace.sequence_starts
    if len(starts) > 1:
        return slice(int(starts[-max(1, round(share * len(starts)))]), trace.tokens)
    return slice(trace.tokens - round(share * trace.tokens), trace.tokens)


def samples(trace: Trace, chunk: int, horizon: int, held_out: float) -> Samples:
    """All of a trace; the steps of ``held_out_rows`` are held out.

    The target is (d - 1) / (horizon - 1), d clipped at the horizon (CECAR's reading of FlashMoE's labels).
    """
    used, request = demands(trace, chunk)
    if len(starts := trace.sequence_starts) > 1:
        out = request >= np.searchsorted(starts, held_out_rows(trace, held_out).start)
    else:
        out = np.arange(len(used)) >= len(used) - round(held_out * len(used))
    recency, frequency, target = (np.empty(used.shape, np.float32) for _ in range(3))
    for layer in range(trace.layers):
        recency[:, layer], frequency[:, layer] = features(used[:, layer], request)
        target[:, layer] = (next_use(used[:, layer], horizon) - 1) / (horizon - 1)
    return Samples(recency, frequency, target, out)
