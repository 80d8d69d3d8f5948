"""Collects routings step by step and turns them into a trace; knows no model and no hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moebench.step import VERIFY, Routing, Step
from moebench.trace.format import Trace, TraceError


class Recorder:
    """Appends one forward pass at a time; rows are joined and grouped by sequence once, in ``trace``.

    Padding rows are left out. Steps of several sequences interleave freely. Verify steps are refused: their rows may be
    rejected later, so a trace of them would hold tokens that were never emitted.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[np.ndarray]] = {}

    def add_step(
        self, step: Step, routings: Sequence[Routing], channels: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Record the routings of all MoE layers (in layer order) and any channels [N, ...] of one pass."""
        if step.phase == VERIFY:
            raise TraceError(f"step {step.index}: a verify step cannot be recorded; record without speculation")
        if not routings:
            raise TraceError(f"step {step.index}: no layer was routed")
        valid = step.valid
        rows = {
            "phase": np.full(int(valid.sum()), step.phase, np.int8),
            "sequence": step.sequence[valid].astype(np.int32),
            "position": step.position[valid].astype(np.int32),
            "experts": np.stack([routing.experts[valid] for routing in routings], axis=1).astype(np.int16),
        }
        if all(routing.weights is not None for routing in routings):
            rows["weights"] = np.stack([_numpy(routing.weights)[valid] for routing in routings], axis=1)
        rows.update({f"channel.{name}": array[valid] for name, array in (channels or {}).items()})
        if self._columns and rows.keys() != self._columns.keys():
            raise TraceError(f"step {step.index}: recorded {sorted(rows)}, earlier steps {sorted(self._columns)}")
        for name, array in rows.items():
            self._columns.setdefault(name, []).append(array)

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """Everything recorded so far as one trace; ``top_k`` is filled in from the rows."""
        if not self._columns:
            raise TraceError("nothing was recorded")
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        order = np.argsort(columns["sequence"], kind="stable")
        columns = {name: np.ascontiguousarray(array[order]) for name, array in columns.items()}
        channels = {name[8:]: columns.pop(name) for name in list(columns) if name.startswith("channel.")}
        return Trace(**columns, channels=channels, metadata={**metadata, "top_k": columns["experts"].shape[2]})


def _numpy(weights: Any) -> np.ndarray:
    """Router weights as float16; a live run hands over the backend's own tensor, which numpy cannot read as bf16."""
    if hasattr(weights, "detach"):
        weights = weights.detach().float().cpu().numpy()
    return np.asarray(weights, dtype=np.float16)
