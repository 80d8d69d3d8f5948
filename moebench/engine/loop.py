"""The two drivers of the one loop: live, where a model computes, and replay, where a trace stands in for it.

Both run steps through ``Experts``; nothing else repeats the order begin, layers, end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moebench.backends.base import Backend
from moebench.draft import Acceptance, Draft
from moebench.engine.acquire import Experts
from moebench.engine.speculate import Rounds
from moebench.engine.windows import replay_steps, round_steps
from moebench.errors import UsageError
from moebench.step import DECODE, PREFILL, Routing, Step
from moebench.trace.drafts import Recorded, Surrogate, draft_source
from moebench.trace.format import Trace

Sampler = Callable[[np.ndarray], np.ndarray]
Stop = Collection[int] | Callable[[Sequence[int]], bool]


def greedy(logits: np.ndarray) -> np.ndarray:
    """The likeliest token of each sequence; logits are float32 [B, V], ids int64 [B]."""
    return logits.argmax(-1)


def seeded_sampler(seed: int, temperature: float = 1.0) -> Sampler:
    """A sampler whose draws depend on the seed and the call count only (Gumbel trick on logits / temperature)."""
    rng = np.random.default_rng(seed)

    def sample(logits: np.ndarray) -> np.ndarray:
        return (logits / temperature + rng.gumbel(size=logits.shape)).argmax(-1)

    return sample


def ended(tokens: Sequence[int], stop: Stop) -> bool:
    """Whether the ids that a sequence emitted so far are its end."""
    return stop(tokens) if callable(stop) else tokens[-1] in stop


@dataclass
class Generation:
    """A batch of finished requests: token ids per sequence, and the logits of each emitted token where asked for."""

    tokens: list[list[int]]
    logits: list[np.ndarray] = field(default_factory=list)


class Loop:
    """Runs requests on one backend. ``experts`` is None for a backend that holds all its experts itself."""

    def __init__(self, backend: Backend, experts: Experts | None, chunk: int = 32) -> None:
        self.backend, self.experts, self.chunk, self.steps = backend, experts, chunk, 0

    def step(
        self, phase: int, position: np.ndarray, valid: np.ndarray, emits: int, drafts: tuple[Draft, ...] = ()
    ) -> Step:
        """The next step, over ``position`` and ``valid`` [B, W], flattened row by row as a model flattens them."""
        sequence = np.repeat(np.arange(len(position), dtype=np.int32), position.shape[1])
        self.steps += 1
        return Step(self.steps - 1, phase, sequence, position.astype(np.int32).ravel(), valid.ravel(), emits, drafts)

    def forward(
        self,
        phase: int,
        tokens: np.ndarray,
        position: np.ndarray,
        valid: np.ndarray,
        emits: int,
        all_rows: bool = False,
    ) -> np.ndarray:
        """One pass over ``tokens`` [B, W]; returns logits [B, V] of the last column, or [B * W, V] of ``all_rows``."""
        step = self.step(phase, position, valid, emits)
        if self.experts is None:
            return self.backend.forward(step, tokens, None, all_rows)
        self.experts.begin(step)
        logits = self.backend.forward(step, tokens, self.experts, all_rows)
        self.experts.end()
        return logits

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        stop: Stop = (),
        sampler: Sampler = greedy,
        forced: Sequence[Sequence[int]] | None = None,
        keep_logits: bool = False,
    ) -> Generation:
        """Answer a batch of prompts with up to ``new_tokens`` tokens each, ending a sequence at a token in ``stop``,
        or where ``stop`` says of the ids emitted so far that they are an end.

        ``forced`` feeds given continuations instead of the sampled ones, so that arms see one token sequence. A system
        that drafts decodes in rounds, to the same tokens.
        """
        rounds = self.experts is not None and self.experts.hooks.draft is not None
        if rounds and sampler is not greedy:
            raise UsageError("a system that drafts decodes greedily: sampled answers would depend on what it drafts")
        logits, length = self._prefill(prompts)
        if rounds:
            return Generation(
                *Rounds(self, prompts, new_tokens, partial(ended, stop=stop), forced, keep_logits).run(logits)
            )
        batch = len(prompts)
        out = Generation([[] for _ in range(batch)])
        alive = np.ones(batch, bool)
        for i in range(new_tokens):
            chosen = sampler(logits)
            if keep_logits:
                out.logits.append(logits)
            if forced is not None:
                chosen = np.array([f[i] if i < len(f) else 0 for f in forced])
                alive &= np.array([i < len(f) for f in forced])
            for b in np.flatnonzero(alive):
                out.tokens[b].append(int(chosen[b]))
                alive[b] = not ended(out.tokens[b], stop)
            if not alive.any() or i + 1 == new_tokens:
                break
            logits = self.forward(DECODE, chosen[:, None], length[:, None], alive[:, None], int(alive.sum()))
            length += 1
        return out

    def score(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], decoded: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Logits before every token of given continuations, none of them empty: (sequence int [n], index in its
        continuation int [n], fp32 [n, V]), a pass at a time.

        Continuations run in passes of ``chunk`` tokens, as a prompt does; ``decoded`` feeds them to the decoding loop
        instead, as if the system had written them.
        """
        if decoded:
            out = self.generate(prompts, max(map(len, continuations)), forced=continuations, keep_logits=True)
            for i, logits in enumerate(out.logits):
                sequence = np.flatnonzero([i < len(given) for given in continuations])
                yield sequence, np.full(len(sequence), i), logits[sequence]
            return
        logits, length = self._prefill(prompts)
        batch, width = len(prompts), max(map(len, continuations)) - 1
        yield np.arange(batch), np.zeros(batch, int), logits
        tokens, valid = np.zeros((batch, width), np.int64), np.zeros((batch, width), bool)
        for i, given in enumerate(continuations):
            tokens[i, : len(given) - 1], valid[i, : len(given) - 1] = given[:-1], True
        position = length[:, None] + np.arange(width)
        for at in range(0, width, self.chunk):
            cut = slice(at, at + self.chunk)
            logits = self.forward(PREFILL, tokens[:, cut], position[:, cut], valid[:, cut], 0, all_rows=True)
            sequence, column = np.nonzero(valid[:, cut])
            yield sequence, at + column + 1, logits[valid[:, cut].ravel()]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Start a batch: logits [B, V] after its prompts, and their lengths [B]."""
        batch, width = len(prompts), max(map(len, prompts))
        tokens, valid = np.zeros((batch, width), np.int64), np.zeros((batch, width), bool)
        for i, prompt in enumerate(prompts):
            tokens[i, width - len(prompt) :], valid[i, width - len(prompt) :] = prompt, True
        position = np.maximum(valid.cumsum(1) - 1, 0)
        self.backend.reset(batch)
        if self.experts is not None:
            self.experts.begin_request(np.arange(batch))
        for at in range(0, width, self.chunk):
            cut = slice(at, at + self.chunk)
            last = at + self.chunk >= width
            logits = self.forward(PREFILL, tokens[:, cut], position[:, cut], valid[:, cut], batch * last)
        return logits, valid.sum(1)


def replay(
    trace: Trace,
    experts: Experts,
    batch: int = 1,
    chunk: int = 32,
    acceptance: Acceptance | None = None,
    seed: int = 0,
) -> None:
    """Run a whole trace through the loop: native routing from the trace, experts acquired but not computed on.

    A system that drafts goes on in rounds: by the trace's own drafts or, without them, by ``acceptance``, drawn by
    ``seed``.
    """
    hooks, layers = experts.hooks, range(experts.geometry.layers)
    if hooks.draft is None:
        source: Trace | Surrogate | Recorded = trace
        steps = ((*found, None) for found in replay_steps(trace, batch, chunk))
    else:
        source = draft_source(trace, acceptance, seed)
        steps = round_steps(trace, batch, chunk, source, hooks.prune, experts.view)
    for step, rows, new, stand in steps:
        if new is not None:
            experts.begin_request(new)
        ids = source.experts[rows]
        weights = None if source.weights is None else source.weights[rows]
        experts.begin(step)
        for layer in layers:
            native = Routing(ids[:, layer], None if weights is None else weights[:, layer])
            for _ in experts.serve(layer, None, native)[1]:
                pass
        if stand is not None:
            step.settle(stand)
        experts.end()
    experts.drain()
