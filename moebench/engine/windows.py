"""Steps over a trace: prompts in chunks, then one token at a time, or in rounds for a system that drafts.

Knows rows of a trace; serves no experts and moves no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from moebench.engine.speculate import verified
from moebench.step import DECODE, PREFILL, VERIFY, Step
from moebench.trace.drafts import Drafted, Recorded, Surrogate
from moebench.trace.format import Trace

Passes = Iterator[tuple[Step, np.ndarray, np.ndarray | None]]


def groups(trace: Trace, batch: int) -> Iterator[list[np.ndarray]]:
    """The rows of each sequence, int64, ``batch`` sequences at a time."""
    starts = trace.sequence_starts
    ends = np.append(starts[1:], trace.tokens)
    spans = [np.arange(a, b) for a, b in zip(starts, ends, strict=True)]
    for first in range(0, len(spans), batch):
        yield spans[first : first + batch]


def prompts(trace: Trace, spans: list[np.ndarray], chunk: int) -> Iterator[tuple[np.ndarray, int]]:
    """Rows of each pass over the prompts, and how many of the prompts it ends."""
    rows = [span[trace.phase[span] == PREFILL] for span in spans]
    for at in range(0, max(map(len, rows)), chunk):
        yield np.concatenate([p[at : at + chunk] for p in rows]), sum(at < len(p) <= at + chunk for p in rows)


def replay_steps(trace: Trace, batch: int, chunk: int) -> Passes:
    """Steps of a trace: ``batch`` sequences at a time, prompts in chunks, then one token each; with row numbers.

    Yields (step, trace rows int [N], the numbers of all its sequences where a new group of requests begins, else None).
    """
    index = 0
    for spans in groups(trace, batch):
        new: np.ndarray | None = trace.sequence[[span[0] for span in spans]]
        for rows, done in prompts(trace, spans, chunk):
            yield _step(trace, index, PREFILL, rows, done), rows, new
            index, new = index + 1, None
        decodes = [span[trace.phase[span] != PREFILL] for span in spans]
        for at in range(max(map(len, decodes))):
            rows = np.array([d[at] for d in decodes if at < len(d)])
            yield _step(trace, index, DECODE, rows, len(rows)), rows, new
            index, new = index + 1, None


def round_steps(
    trace: Trace, batch: int, chunk: int, source: Surrogate | Recorded, prune: Callable | None, view: object
) -> Iterator[tuple[Step, np.ndarray, np.ndarray | None, np.ndarray | None]]:
    """As ``replay_steps``, but each sequence goes on by what is right of the draft that ``source`` has at its place.

    Row numbers are those of the source's routing. The fourth item says which rows of a pass that verifies stand.
    """
    index = 0
    for spans in groups(trace, batch):
        new: np.ndarray | None = trace.sequence[[span[0] for span in spans]]
        for rows, done in prompts(trace, spans, chunk):
            yield _step(trace, index, PREFILL, rows, done), rows, new, None
            index, new = index + 1, None
        todo = {int(d[0]): int(d[-1]) for span in spans if len(d := span[trace.phase[span] != PREFILL])}
        while todo:  # row that each sequence has come to -> its last row
            drafted = [_verified(source.at(row), last - row, prune, view) for row, last in todo.items()]
            places = np.repeat(list(todo), [1 + len(found.rows) for found in drafted])
            rows = np.concatenate([np.append(row, found.rows) for row, found in zip(todo, drafted, strict=True)])
            stand = np.concatenate([np.append(True, found.right) for found in drafted])
            if len(rows) == len(todo):
                yield _step(trace, index, DECODE, rows, len(rows)), rows, new, None
            else:
                depth = np.concatenate([np.append(0, found.draft.depth) for found in drafted])
                drafts = tuple(found.draft for found in drafted)
                sequence, position = trace.sequence[places], trace.position[places] + depth.astype(np.int32)
                step = Step(index, VERIFY, sequence, position, np.ones(len(rows), bool), drafts=drafts)
                yield step, rows, new, stand
            index, new = index + 1, None
            moved = {
                row + 1 + int(found.right.sum()): last for (row, last), found in zip(todo.items(), drafted, strict=True)
            }
            todo = {row: last for row, last in moved.items() if row <= last}


def _verified(found: Drafted, levels: int, prune: Callable | None, view: object) -> Drafted:
    return found.keep(verified(found.draft, levels, prune, view))


def _step(trace: Trace, index: int, phase: int, rows: np.ndarray, emits: int) -> Step:
    return Step(index, phase, trace.sequence[rows], trace.position[rows], np.ones(len(rows), bool), emits)
