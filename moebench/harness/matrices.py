"""A model whose unit of caching is one matrix of an expert: three units an expert, side by side on storage.

For replays that ask what keeping parts of experts is worth. Knows geometries and traces; no cache and no clock.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.trace.format import Trace


def by_matrix(geometry: Geometry, trace: Trace, layout: str, codec: str) -> tuple[Geometry, Trace]:
    """Geometry and trace of single matrices: expert e becomes units 3e (gate), 3e+1 (up) and 3e+2 (down).

    Raises ``UsageError`` where units are not equal ranges of whole experts on storage.
    """
    if (layout, codec) != ("packed", "none") or geometry.quant not in ("int4", "none"):
        raise UsageError(
            "slots of single matrices need experts stored whole in equal thirds: layout=packed, codec=none, and "
            "quant=int4 or none"
        )
    each = geometry.matrices
    units = trace.experts[..., None] * each + np.arange(each)
    units = np.where(trace.experts[..., None] < 0, -1, units).reshape(*trace.experts.shape[:2], -1)
    known = trace.metadata | {"experts": trace.expert_count * each, "top_k": trace.top_k * each}
    weights = None if trace.weights is None else np.repeat(trace.weights, each, axis=2)
    many = replace(
        geometry, name=f"{geometry.name}-matrices", experts=geometry.experts * each, top_k=geometry.top_k * each,
        matrices=1,
    )  # fmt: skip
    return many, replace(trace, experts=units.astype(np.int16), weights=weights, channels={}, metadata=known)
