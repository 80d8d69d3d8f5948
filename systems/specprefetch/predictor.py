"""What the next layers will ask for: computed by adapters or replayed routers on a live run, read from a channel of the
trace in replay, or taken from the token before, or from the future.

One interface: after a layer was routed, a score per valid row and expert for each later layer it predicts; 0 says that
the expert is not expected. Knows rows and layers; knows no residency and no time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moebench.backends.base import Ops
from moebench.routing import softmax
from moebench.step import ABSENT, Routing, Step
from moebench.systems.specprefetch.artefact import Artefact
from moebench.trace.format import Trace

Scores = dict[int, np.ndarray]  # lag -> float [valid rows, experts]


class Predictor(ABC):
    """Contract: ``see`` once a layer of any pass was routed, then ``scores`` for passes that are not a prompt's."""

    def reset(self) -> None:  # noqa: B027 - most remember nothing
        """New requests: nothing was seen."""

    def see(self, step: Step, layer: int, native: Routing) -> None:  # noqa: B027
        """What the router of ``layer`` chose in this pass."""

    @abstractmethod
    def scores(self, step: Step, layer: int, hidden: Any) -> Scores:
        """Scores by lag, for the layers after ``layer``; ``hidden`` [N, D] is what its router saw (None in replay)."""


class Nothing(Predictor):
    """Predicts nothing."""

    def scores(self, step: Step, layer: int, hidden: Any) -> Scores:
        """No lag."""
        return {}


class Computed(Predictor):
    """p = softmax(B A x + W x): ``adapter`` and ``gate`` say which of the two terms there are."""

    def __init__(self, artefact: Artefact, ops: Ops, horizon: int, adapter: bool, gate: bool) -> None:
        shape = artefact.shape
        self.ops, self.adapter, self.gate = ops, adapter, gate
        self.lags = [range(1, min(horizon, shape.layers - 1 - layer) + 1) for layer in range(shape.layers)]

        def stacked(matrix: Any) -> list[Any]:
            found = [[ops.tensor(matrix(layer, lag)) for lag in lags] for layer, lags in enumerate(self.lags)]
            return [ops.stack(matrices) if matrices else None for matrices in found]

        if adapter:
            self.a = stacked(lambda layer, lag: artefact.adapters[shape.name(layer, lag)][0])
            self.b = stacked(lambda layer, lag: artefact.adapters[shape.name(layer, lag)][1])
        if gate:
            self.w = stacked(lambda layer, lag: artefact.gates[layer + lag])

    def scores(self, step: Step, layer: int, hidden: Any) -> Scores:
        """Probabilities by lag; products of all lags side by side."""
        lags = self.lags[layer]
        if not lags:
            return {}
        return dict(zip(lags, softmax(self.logits(layer, hidden, np.flatnonzero(step.valid))), strict=True))

    def logits(self, layer: int, hidden: Any, rows: np.ndarray) -> np.ndarray:
        """fp32 [lags, rows, experts] from these rows (int64) of ``hidden``."""
        ops = self.ops
        x = ops.rows(hidden, rows)
        x = ops.stack([x] * len(self.lags[layer]))
        parts = []
        if self.gate:
            parts.append(ops.linear(x, self.w[layer]))
        if self.adapter:
            parts.append(ops.linear(ops.linear(x, self.a[layer]), self.b[layer]))
        return ops.numpy(parts[0] + parts[1] if len(parts) > 1 else parts[0])


class Recorded(Predictor):
    """Read from channels of a trace, lag -> int [T, L, w], whose row (token, layer) holds what was said of that layer
    ``lag`` layers before, best first. Only the order is kept: the score of rank i is 1 / (1 + i).
    """

    def __init__(self, trace: Trace, channels: Mapping[int, np.ndarray]) -> None:
        self.channels, self.layers, self.experts = channels, trace.layers, trace.expert_count
        starts = trace.sequence_starts.tolist()
        self.spans = {int(trace.sequence[a]): (a, b) for a, b in zip(starts, [*starts[1:], trace.tokens], strict=True)}
        self.position = trace.position
        self._rows: tuple[Step | None, np.ndarray] = (None, np.empty(0, np.int64))

    def scores(self, step: Step, layer: int, hidden: Any) -> Scores:
        """The channels' rows of this pass."""
        if self._rows[0] is not step:
            self._rows = (step, self._find(step))
        found = {}
        for lag, channel in self.channels.items():
            if layer + lag < self.layers:
                ids = channel[self._rows[1], layer + lag]
                scores = np.zeros((len(ids), self.experts + 1))  # absent lands in the last column
                scores[np.arange(len(ids))[:, None], ids] = 1.0 / (1.0 + np.arange(ids.shape[1]))
                found[lag] = scores[:, :-1]
        return found

    def _find(self, step: Step) -> np.ndarray:
        rows = []
        for sequence, position in zip(
            step.sequence[step.valid].tolist(), step.position[step.valid].tolist(), strict=True
        ):
            start, end = self.spans[sequence]
            rows.append(start + int(np.searchsorted(self.position[start:end], position)))
        return np.array(rows, np.int64)


class Previous(Predictor):
    """What each sequence's previous token asked of the layer ahead, in its router's order."""

    def __init__(self, layers: int, experts: int, horizon: int) -> None:
        self.layers, self.experts, self.horizon = layers, experts, horizon
        self.reset()

    def reset(self) -> None:
        """No token was seen."""
        self.last: list[dict[int, np.ndarray]] = [{} for _ in range(self.layers)]

    def see(self, step: Step, layer: int, native: Routing) -> None:
        """Keep the last valid row of each sequence."""
        rows = np.flatnonzero(step.valid)
        self.last[layer] |= dict(zip(step.sequence[rows].tolist(), native.experts[rows], strict=True))

    def scores(self, step: Step, layer: int, hidden: Any) -> Scores:
        """1 / (1 + rank) for each expert of the token before; those layers have not yet seen this one."""
        found = {}
        sequences = step.sequence[step.valid].tolist()
        for lag in range(1, min(self.horizon, self.layers - 1 - layer) + 1):
            last = self.last[layer + lag]
            found[lag] = scores = np.zeros((len(sequences), self.experts + 1))
            for row, sequence in enumerate(sequences):
                ids = last.get(sequence, [ABSENT])
                scores[row, ids] = 1.0 / (1.0 + np.arange(len(ids)))
            found[lag] = scores[:, :-1]
        return found


class Foreseen(Predictor):
    """The demands to come, as (layer, keys) in the order of the loop: all of a demand is equally sure."""

    def __init__(self, future: Sequence[tuple[int, Sequence[int]]], experts: int, horizon: int) -> None:
        self.future, self.experts, self.horizon, self.seen = future, experts, horizon, 0

    def see(self, step: Step, layer: int, native: Routing) -> None:
        """One more demand has come."""
        self.seen += 1

    def scores(self, step: Step, layer: int, hidden: Any) -> Scores:
        """1 for each expert that is demanded ``lag`` layers on in this pass, as one row."""
        found = {}
        for lag in range(1, self.horizon + 1):
            at = self.seen + lag - 1
            if at < len(self.future) and self.future[at][0] == layer + lag:
                found[lag] = np.zeros((1, self.experts))
                found[lag][0, np.asarray(self.future[at][1], np.int64) - (layer + lag) * self.experts] = 1.0
        return found
