"""Where a replay's drafts come from: the trace's own channels, or a surrogate with stated acceptance.

Channels ``drafts.<part>`` stand where a round began and are empty elsewhere; M nodes at most: ``parents`` int16 [T, M]
(-1 follows the row, -2 no node), ``accepted`` bool [T, M], ``probability`` float32 [T, M], ``experts`` int16
[T, M, L, k] and, if the trace has weights, ``weights`` float16 [T, M, L, k]. Knows rows of routing; knows no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moebench.draft import NOTHING, ROOT, UNKNOWN, Acceptance, Draft
from moebench.errors import UsageError
from moebench.step import ABSENT
from moebench.trace.format import Trace, TraceError

ABSENT_NODE = -2
NEAR = 16  # a wrong guess routes like a token at most so many rows from its place
PARTS = {"parents": np.int16, "accepted": np.bool_, "probability": np.float32, "experts": np.int16}


@dataclass(frozen=True, eq=False)
class Drafted:
    """A draft at one place of a trace: which row of the source's routing each node has, and which guesses are right."""

    draft: Draft
    rows: np.ndarray  # int64 [n]
    right: np.ndarray  # bool [n], one path

    def keep(self, mask: np.ndarray) -> Drafted:
        """The nodes that ``mask`` (bool [n]) keeps."""
        return Drafted(self.draft.keep(mask), self.rows[mask], self.right[mask])


class Surrogate:
    """Full trees whose first levels are right as often as ``acceptance`` says.

    Luck belongs to the place in the trace, so that systems which verify more or less of a tree meet the same. A wrong
    guess has the routing of another token of the sequence near its place. A node's probability is the share of rounds,
    among those in which its parent is right, that it is right.
    """

    def __init__(self, trace: Trace, acceptance: Acceptance, seed: int) -> None:
        self.experts, self.weights, self.seed = trace.experts, trace.weights, seed
        self.depth_shares, self.rank_ends = np.array(acceptance.by_depth), np.cumsum(acceptance.by_rank)
        parents: list[int] = []
        probability: list[float] = []
        level, before = [ROOT], 1.0
        for share in acceptance.by_depth:
            first = len(parents)
            parents += np.repeat(level, acceptance.branching).tolist()
            given = share / before if before else 0.0
            probability += [given * part for part in acceptance.by_rank] * len(level)
            level, before = list(range(first, len(parents))), share
        self.tree = Draft(np.full(len(parents), UNKNOWN), np.array(parents), np.array(probability))
        self.first_child = np.searchsorted(
            self.tree.parents, np.arange(ROOT, len(parents))
        )  # of the root, then of each
        starts = trace.sequence_starts
        ends = np.append(starts[1:], trace.tokens)
        self._spans = starts, ends

    def at(self, row: int) -> Drafted:
        """The draft that follows trace row ``row``."""
        tree, rng = self.tree, np.random.default_rng((self.seed, row))
        levels = int((self.depth_shares > rng.random()).sum())
        ranks = np.minimum(np.searchsorted(self.rank_ends, rng.random(len(self.depth_shares))), len(self.rank_ends) - 1)
        right, node = np.zeros(len(tree), bool), ROOT
        for rank in ranks[:levels]:
            node = self.first_child[1 + node] + rank
            right[node] = True
        starts, ends = self._spans
        span = int(np.searchsorted(starts, row, side="right")) - 1
        first, last = starts[span], ends[span] - 1
        place = np.minimum(row + tree.depth, last)
        low, high = np.maximum(first, place - NEAR), np.minimum(last, place + NEAR)
        other = low + (rng.random(len(tree)) * (high - low)).astype(np.int64)
        other += other >= place
        return Drafted(tree, np.where(right, place, np.minimum(other, last)), right)


class Recorded:
    """The drafts that a system made when the trace was recorded.

    Within a round, where the replay goes on from an accepted node, the draft is what was drafted below that node. A
    wrong guess has the routing that it had.
    """

    def __init__(self, trace: Trace) -> None:
        parts = {}
        for name, dtype in (PARTS | ({} if trace.weights is None else {"weights": np.float16})).items():
            array = trace.channels.get(f"drafts.{name}")
            if array is None or array.dtype != dtype or array.ndim != (4 if name in ("experts", "weights") else 2):
                raise TraceError(
                    f"drafts.{name}: missing or not {np.dtype(dtype)}; record the trace anew with its system"
                )
            parts[name] = array
        self.parents, self.accepted, self.probability = parts["parents"], parts["accepted"], parts["probability"]
        rows = trace.tokens * self.parents.shape[1]
        self.tokens = trace.tokens
        self.experts = np.concatenate([trace.experts, parts["experts"].reshape(rows, *trace.experts.shape[1:])])
        self.weights = None
        if trace.weights is not None:
            weights = parts["weights"].reshape(rows, *trace.experts.shape[1:])
            self.weights = np.concatenate([trace.weights, weights])
        began = (self.parents != ABSENT_NODE).any(1)
        self.began = np.maximum.accumulate(np.where(began, np.arange(trace.tokens), -1))

    def at(self, row: int) -> Drafted:
        """The draft that follows trace row ``row``."""
        start = int(self.began[row])
        n = 0 if start < 0 else int((self.parents[start] != ABSENT_NODE).sum())
        accepted = self.accepted[start, :n]
        if row - start > accepted.sum():
            return NO_DRAFT
        draft = Draft(np.full(n, UNKNOWN), self.parents[start, :n], self.probability[start, :n])
        wrong = self.tokens + start * self.parents.shape[1] + np.arange(n)
        rows = np.where(accepted, start + draft.depth, wrong)
        if row == start:
            return Drafted(draft, rows, accepted)
        node = int(np.flatnonzero(accepted & (draft.depth == row - start))[0])
        below = draft.ancestors()[:, node]
        below[node] = False
        parents = np.where(draft.parents == node, ROOT, (np.cumsum(below) - 1)[draft.parents])[below]
        part = Draft(draft.tokens[below], parents, draft.probability[below])
        return Drafted(part, rows[below], accepted[below])


NO_DRAFT = Drafted(NOTHING, np.zeros(0, np.int64), np.zeros(0, bool))


def has_drafts(trace: Trace) -> bool:
    """Whether the trace was recorded with a system that drafts."""
    return any(name.startswith("drafts.") for name in trace.channels)


def draft_source(trace: Trace, acceptance: Acceptance | None, seed: int) -> Surrogate | Recorded:
    """The trace's own drafts, else the surrogate; with neither a ``UsageError``."""
    if has_drafts(trace):
        return Recorded(trace)
    if acceptance is None:
        raise UsageError("this system drafts: a replay needs its acceptance, or a trace recorded with drafts")
    return Surrogate(trace, acceptance, seed)


def channels(rounds: list[tuple[int, Draft, dict[str, np.ndarray]]], tokens: int) -> dict[str, np.ndarray]:
    """The channels of recorded ``rounds`` in a trace of so many tokens: (row, draft, its parts but the draft's own)."""
    nodes = max((len(draft) for _, draft, _ in rounds), default=0)
    if not nodes:
        return {}
    found: dict[str, np.ndarray] = {}
    for row, draft, parts in rounds:
        own = {"parents": draft.parents.astype(np.int16), "probability": draft.probability}
        for name, array in (own | parts).items():
            empty = {"parents": ABSENT_NODE, "experts": ABSENT}.get(name, 0)
            channel = found.setdefault(f"drafts.{name}", np.full((tokens, nodes, *array.shape[1:]), empty, array.dtype))
            channel[row, : len(array)] = array
    return found
