"""The order of experts in an ``ordered`` pack, from what a trace shows to be used most."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moebench.errors import UsageError
from moebench.store.layout import ExpertSource
from moebench.trace.format import load


def read_order(path: str | Path, source: ExpertSource) -> np.ndarray:
    """Expert keys by disk position: layer after layer, in each the most used first, ties by number."""
    trace = load(path)
    if (trace.layers, trace.expert_count) != (source.layers, source.experts):
        raise UsageError(
            f"trace={path} has {trace.layers} layers of {trace.expert_count} experts,"
            f" the model {source.layers} of {source.experts}"
        )
    keys = [
        layer * source.experts + np.argsort(-np.bincount(used[used >= 0], minlength=source.experts), kind="stable")
        for layer, used in ((layer, trace.experts[:, layer].ravel()) for layer in range(trace.layers))
    ]
    return np.concatenate(keys)
