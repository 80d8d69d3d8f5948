"""Collects routings step by step and turns them into a trace; knows no model and no hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moebench.draft import Draft
from moebench.step import DECODE, VERIFY, Routing, Step
from moebench.trace import drafts
from moebench.trace.format import Trace, TraceError


class Recorder:
    """Appends one forward pass at a time; rows are joined and grouped by sequence once, in ``trace``.

    Padding rows are left out. Steps of several sequences interleave freely. Of a step that verified the accepted rows
    are kept, as decode: the trace is that of plain decoding; what was drafted stands beside it in channels.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[np.ndarray]] = {}
        self._rows = 0
        self._rounds: list[tuple[int, Draft, dict[str, np.ndarray]]] = []

    def add_step(
        self, step: Step, routings: Sequence[Routing], channels: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Record the routings of all MoE layers (in layer order) and any channels [N, ...] of one pass."""
        if not routings:
            raise TraceError(f"step {step.index}: no layer was routed")
        if step.phase == VERIFY and step.accepted is None:
            raise TraceError(f"step {step.index}: a verify step is recorded once it is known which rows stand")
        valid = step.valid if step.accepted is None else step.accepted
        phase = DECODE if step.phase == VERIFY else step.phase
        rows = {
            "phase": np.full(int(valid.sum()), phase, np.int8),
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
        if step.drafts:
            self._add_rounds(step, routings, valid)
        self._rows += len(rows["phase"])

    def _add_rounds(self, step: Step, routings: Sequence[Routing], stand: np.ndarray) -> None:
        """Keep the drafts of a step that verified, with the routing of every node, right or wrong."""
        before = self._rows + np.cumsum(stand) - 1
        for draft, nodes in zip(step.drafts, step.node_rows(), strict=True):
            if len(draft):
                experts = np.stack([routing.experts[nodes] for routing in routings], axis=1).astype(np.int16)
                parts = {"accepted": stand[nodes], "experts": experts}
                if all(routing.weights is not None for routing in routings):
                    parts["weights"] = np.stack([_numpy(routing.weights)[nodes] for routing in routings], axis=1)
                self._rounds.append((int(before[nodes[0] - 1]), draft, parts))

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """Everything recorded so far as one trace; ``top_k`` is filled in from the rows."""
        if not self._columns:
            raise TraceError("nothing was recorded")
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        order = np.argsort(columns["sequence"], kind="stable")
        columns = {name: np.ascontiguousarray(array[order]) for name, array in columns.items()}
        channels = {name[8:]: columns.pop(name) for name in list(columns) if name.startswith("channel.")}
        place = np.argsort(order)
        rounds = [(int(place[row]), draft, parts) for row, draft, parts in self._rounds]
        channels |= drafts.channels(rounds, len(order))
        return Trace(**columns, channels=channels, metadata={**metadata, "top_k": columns["experts"].shape[2]})


def _numpy(weights: Any) -> np.ndarray:
    """Router weights as float16; a live run hands over the backend's own tensor, which numpy cannot read as bf16."""
    if hasattr(weights, "detach"):
        weights = weights.detach().float().cpu().numpy()
    return np.asarray(weights, dtype=np.float16)
