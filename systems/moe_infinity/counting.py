"""From routing to activation matrices. Knows traces; knows no run."""

from __future__ import annotations

import numpy as np

from moebench.step import ABSENT
from moebench.trace.format import Trace


def count(trace: Trace) -> np.ndarray:
    """The activation matrix of each sequence of a trace, uint16 [N, L, E], prompt and answer together."""
    starts = trace.sequence_starts
    out = np.zeros((len(starts), trace.layers, trace.expert_count), np.int64)
    owner = np.searchsorted(starts, np.arange(trace.tokens), side="right") - 1
    token, layer, slot = np.nonzero(trace.experts != ABSENT)
    np.add.at(out, (owner[token], layer, trace.experts[token, layer, slot]), 1)
    return np.minimum(out, np.iinfo(np.uint16).max).astype(np.uint16)
