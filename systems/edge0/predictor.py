"""What will be executed at the next step: computed by the heads on a live run, read from the trace in replay.

One interface for both. A prediction goes through the model's routing law once; its ids are staged and executed, its
weights are used as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from moebench.backends.base import Ops
from moebench.routing import RoutingLaw
from moebench.step import ABSENT, DECODE, PREFILL, Routing, Step
from moebench.systems.edge0.heads import PARTS, Plan
from moebench.trace.format import Trace


class Predictor(ABC):
    """Contract: ``observe`` after an owner layer was routed, ``evaluate`` when its head may run, ``routing`` at the
    next step. What was predicted for a step is gone after it.
    """

    @abstractmethod
    def reset(self, sequences: np.ndarray) -> None:
        """New requests, by their numbers: nothing was seen."""

    @abstractmethod
    def begin(self, step: Step) -> None:
        """A step starts: what was predicted for it is in force."""

    @abstractmethod
    def observe(self, layer: int, step: Step, hidden: Any, executed: np.ndarray) -> None:
        """Owner ``layer`` executes experts int [N, k] on rows ``hidden``."""

    @abstractmethod
    def evaluate(self, layers: list[int], step: Step) -> dict[int, np.ndarray]:
        """Run the heads of these owners; per consumer layer the ids int [B, k] that the next step will execute.

        Owners that have nothing to predict from are left out.
        """

    @abstractmethod
    def routing(self, layer: int, step: Step) -> Routing | None:
        """What a consumer layer executes in this step, rows as the step's; None if nothing was predicted."""


class Heads(Predictor):
    """Prediction by the trained heads. ``bias`` by consumer layer is what the law adds for selection, where it does."""

    def __init__(
        self,
        plan: Plan,
        heads: Mapping[int, Mapping[str, np.ndarray]],
        experts: int,
        law: RoutingLaw,
        ops: Ops,
        first_token: str,
        bias: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        self.plan, self.experts, self.law, self.ops, self.first_token = plan, experts, law, ops, first_token
        self.bias = bias or {}
        self.index = {owner: i for i, owner in enumerate(plan.owners)}
        self.weights = {part: ops.stack([ops.tensor(heads[owner][part]) for owner in plan.owners]) for part in PARTS}
        self.reset(np.zeros(0, np.int64))

    def reset(self, sequences: np.ndarray) -> None:
        """Forget features, what was executed, and predictions."""
        self._hidden: dict[int, Any] = {}
        self._now: dict[int, np.ndarray] = {}  # executed [B, E] at the last token seen
        self._then: dict[int, np.ndarray] = {}  # and at the one before
        self._coming: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._current: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def begin(self, step: Step) -> None:
        """Predictions for this step come into force; features of the step before are spent."""
        self._current, self._coming, self._hidden = self._coming, {}, {}
        self._batch = step.rows if step.phase == DECODE else len(np.unique(step.sequence))

    def observe(self, layer: int, step: Step, hidden: Any, executed: np.ndarray) -> None:
        """Keep the last row of each sequence: its hidden state, and the experts of it and of the token before.

        With first_token=gate a prompt leaves nothing behind.
        """
        if step.phase == PREFILL and self.first_token == "gate":
            return
        batch = self._batch
        ids = executed.reshape(batch, -1, executed.shape[-1])
        width = ids.shape[1]
        last = self._many_hot(ids[:, -1])
        before = self._many_hot(ids[:, -2]) if width > 1 else self._now.get(layer, np.zeros_like(last))
        self._then[layer], self._now[layer] = before, last
        self._hidden[layer] = self.ops.rows(hidden, np.arange(batch) * width + width - 1)

    def _many_hot(self, ids: np.ndarray) -> np.ndarray:
        hot = np.zeros((len(ids), self.experts), np.float32)
        row, slot = np.nonzero(ids != ABSENT)
        hot[row, ids[row, slot]] = 1.0
        return hot

    def evaluate(self, layers: list[int], step: Step) -> dict[int, np.ndarray]:
        """All heads of ``layers`` in three products side by side."""
        layers = [layer for layer in layers if layer in self._hidden]
        if not layers or (step.phase == PREFILL and not step.emits):
            return {}
        logits = self.logits(layers)
        alive = step.valid.reshape(self._batch, -1)[:, -1]
        chosen = {}
        for layer, own in zip(layers, logits, strict=True):
            routing = self.law.apply(own, self.plan.top_k, self.bias.get(layer + 1))
            self._coming[layer + 1] = (routing.experts, routing.weights)
            chosen[layer + 1] = routing.experts[alive]
        return chosen

    def logits(self, layers: list[int]) -> np.ndarray:
        """fp32 [heads, B, E] of these owners' heads from what they observed last."""
        ops, at = self.ops, [self.index[layer] for layer in layers]
        f = ops.stack(
            [ops.concat([self._hidden[n], ops.tensor(self._now[n]), ops.tensor(self._then[n])]) for n in layers]
        )
        span = slice(at[0], at[-1] + 1)  # one head, or all: a view either way
        one, two, direct = (w[span] for w in self.weights.values())
        return ops.numpy(ops.linear(f, direct) + ops.linear(ops.gelu(ops.linear(f, one)), two))

    def routing(self, layer: int, step: Step) -> Routing | None:
        """The prediction in force; rows of a decode step are its sequences in order."""
        if step.phase != DECODE or layer not in self._current:
            return None
        ids, weights = self._current[layer]
        if len(ids) != step.rows:
            return None
        return Routing(ids, weights, ahead=True)


class Recorded(Predictor):
    """Prediction from a channel int [T, L, k] of a trace: the row of a token holds what was executed there, -1 where
    nothing was predicted. With first_token=gate the first decoded token is never predicted.
    """

    def __init__(self, trace: Trace, channel: np.ndarray, first_token: str) -> None:
        self.trace, self.channel, self.first_token = trace, channel, first_token
        starts = trace.sequence_starts.tolist()
        ends = [*starts[1:], trace.tokens]
        self._span = {int(trace.sequence[a]): (a, b) for a, b in zip(starts, ends, strict=True)}
        self.reset(np.zeros(0, np.int64))

    def reset(self, sequences: np.ndarray) -> None:
        """Which prompts are still to be read; a trace needs no other memory but which layers were asked."""
        phase = self.trace.phase
        self._unread = {int(s) for s in sequences if phase[self._span[int(s)][0]] == PREFILL}
        self._firsts: list[int] = []  # rows of first tokens whose prompts have been read
        self._batch = len(sequences)
        self._evaluated: set[int] = set()
        self._current: set[int] = set()

    def begin(self, step: Step) -> None:
        """What was evaluated is in force; find this step's rows, and those of the next tokens.

        Prompts of one batch may end at different passes: none of their first tokens is predicted before all have.
        """
        self._current, self._evaluated = self._evaluated, set()
        trace, rows, after = self.trace, [], []
        for sequence, position in zip(step.sequence.tolist(), step.position.tolist(), strict=True):
            start, end = self._span[sequence]
            row = start + int(np.searchsorted(trace.position[start:end], position))
            rows.append(row)
            if row + 1 == end or trace.phase[row + 1] == DECODE:
                self._unread.discard(sequence)
                after += [row + 1] * (row + 1 < end)
        self._rows, self._after = np.array(rows), np.array(after, np.int64)
        if step.phase != DECODE:
            self._firsts += after
            whole = self.first_token == "heads" and not self._unread and len(self._firsts) == self._batch
            self._after = np.array(self._firsts if whole else [], np.int64)

    def observe(self, layer: int, step: Step, hidden: Any, executed: np.ndarray) -> None:
        """The channel has it."""

    def evaluate(self, layers: list[int], step: Step) -> dict[int, np.ndarray]:
        """The next tokens' rows of the channel, where all of them were predicted."""
        chosen = {}
        for layer in layers:
            ids = self.channel[self._after, layer + 1]
            if len(ids) and (ids != ABSENT).any(1).all():
                chosen[layer + 1] = ids.astype(np.int64)
                self._evaluated.add(layer + 1)
        return chosen

    def routing(self, layer: int, step: Step) -> Routing | None:
        """The channel's rows of this step."""
        if step.phase != DECODE or layer not in self._current:
            return None
        return Routing(self.channel[self._rows, layer].astype(np.int64), None, ahead=True)
