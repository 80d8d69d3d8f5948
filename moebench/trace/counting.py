"""Passes over a trace that count, compiled: recurrence, distinct experts, and what one choice says about the next.

Knows arrays of expert ids (-1 is absent); knows no definitions of statistics, those are in ``moebench.trace.stats``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from moebench.jit import compile_all

HORIZON = 64  # bits of a history: lags below it can be asked for


def recurrences(experts, sequence, count, lags, distances):
    """Per lag and layer the choices that recur at it and those that could: int64 [lags, L] each.

    Of int16 [T, L, k] and rows' sequences. Bit d of an expert's history says whether it was used d tokens ago.
    ``distances`` int64 [D] gets how often an expert came back after d tokens of a sequence, the last entry the rest.
    """
    layers = experts.shape[1]
    history, last = np.zeros((layers, count), np.uint64), np.full((layers, count), -1)
    shared, chosen = np.zeros((len(lags), layers), np.int64), np.zeros((len(lags), layers), np.int64)
    start = 0
    for token in range(len(experts)):
        if token and sequence[token] != sequence[token - 1]:
            start = token
        for layer in range(layers):
            for slot in range(experts.shape[2]):
                expert = experts[token, layer, slot]
                if expert < 0:
                    continue
                past, age = np.uint64(0), token - last[layer, expert]
                if last[layer, expert] >= start:
                    distances[min(age, len(distances) - 1)] += 1
                    if age < HORIZON:
                        past = history[layer, expert] << np.uint64(age)
                for i in range(len(lags)):
                    if token - start >= lags[i]:
                        chosen[i, layer] += 1
                        shared[i, layer] += (past >> np.uint64(lags[i])) & np.uint64(1)
                history[layer, expert] = past | np.uint64(1)
                last[layer, expert] = token
    return shared, chosen


def distinct(experts, groups, count):
    """Experts that the rows of each group choose in each layer, added up; ``groups`` int64 [G, rows]."""
    seen = np.full((experts.shape[1], count), -1)
    total = 0
    for group in range(len(groups)):
        for row in groups[group]:
            for layer in range(experts.shape[1]):
                for slot in range(experts.shape[2]):
                    expert = experts[row, layer, slot]
                    if expert >= 0 and seen[layer, expert] != group:
                        seen[layer, expert] = group
                        total += 1
    return total


def foretold(before, after, learn, test, count):
    """How many of ``after``'s choices in the rows ``test`` are among the k likeliest, by two counts of rows ``learn``.

    By summed counts of pairs (expert of ``before`` int16 [N, k], expert of ``after``), and by ``after``'s own counts
    alone; and how many choices there were. Of equals the lower id comes first.
    """
    pairs, alone = np.zeros((count, count), np.int64), np.zeros(count, np.int64)
    k = after.shape[1]
    for row in learn:
        for target in after[row]:
            if target >= 0:
                alone[target] += 1
                for origin in before[row]:
                    if origin >= 0:
                        pairs[origin, target] += 1
    usual = np.argsort(-alone, kind="mergesort")[:k]
    found = np.zeros(3, np.int64)
    for row in test:
        scores = np.zeros(count, np.int64)
        for origin in before[row]:
            if origin >= 0:
                scores += pairs[origin]
        for rank in range(k):
            best = scores.argmax()
            scores[best] = -1
            for target in after[row]:
                found[0] += target == best
                found[1] += target == usual[rank]
        found[2] += (after[row] >= 0).sum()
    return found


@cache
def compiled() -> dict[str, Callable[..., Any]]:
    """The passes in machine code."""
    return compile_all((recurrences, distinct, foretold))
