"""Drafts: guessed tokens as a chain or a tree, how often such guesses hold, and guesses looked up in the text itself.

Knows ids, parents and probabilities; knows no model, no cache and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ROOT = -1  # the parent of a node that follows the last accepted token
UNKNOWN = -1  # the token of a node in replay, where there is no text
NGRAM = 4  # longest run of tokens that a look-up matches


@dataclass(frozen=True, eq=False)
class Draft:
    """Nodes of a tree of guesses, parents before children.

    ``tokens`` int64 [n]; ``parents`` int32 [n], -1 where a node follows the last accepted token; ``probability``
    float32 [n] is the draft's own for that token, given the path to it.
    """

    tokens: np.ndarray
    parents: np.ndarray
    probability: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int64), ("parents", np.int32), ("probability", np.float32)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        n = len(self.tokens)
        if not self.tokens.shape == self.parents.shape == self.probability.shape == (n,):
            raise ValueError("draft: tokens, parents and probability must be one-dimensional and of one length")
        if n and not ((self.parents >= ROOT) & (self.parents < np.arange(n))).all():
            raise ValueError("draft: a node's parent is -1 or an earlier node")
        if n and not ((self.probability >= 0) & (self.probability <= 1)).all():
            raise ValueError("draft: probabilities lie between 0 and 1")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depth(self) -> np.ndarray:
        """int32 [n]: how many tokens after the last accepted one each node stands; 1 for the first."""
        depth = np.ones(len(self), np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                depth[node] = depth[parent] + 1
        return depth

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return bool((self.parents == np.arange(len(self)) - 1).all())

    @cached_property
    def levels(self) -> int:
        """Depth of the deepest node; 0 without nodes."""
        return int(self.depth.max(initial=0))

    def ancestors(self) -> np.ndarray:
        """bool [n, n]: node j lies on the path to node i, which ends with i itself."""
        found = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents.tolist()):
            if parent != ROOT:
                found[node] |= found[parent]
        return found

    def keep(self, mask: np.ndarray) -> Draft:
        """The nodes that ``mask`` (bool [n]) keeps; a node without its parent is a ``ValueError``."""
        mask = np.asarray(mask)
        if mask.dtype != bool or mask.shape != (len(self),):
            raise ValueError(f"a mask over {len(self)} nodes is bool [{len(self)}], got {mask.dtype} {mask.shape}")
        if mask.all():
            return self
        orphans = mask & (self.parents != ROOT) & ~mask[self.parents]
        if orphans.any():
            raise ValueError(f"node {int(orphans.argmax())} is kept without its parent")
        renumbered = np.append(np.cumsum(mask) - 1, ROOT)  # the last entry is where -1 leads
        return Draft(self.tokens[mask], renumbered[self.parents[mask]], self.probability[mask])


def chain(tokens: Sequence[int] | np.ndarray, probability: Sequence[float] | np.ndarray | None = None) -> Draft:
    """A draft in which each token follows the one before it; certain of itself unless told."""
    n = len(tokens)
    return Draft(np.asarray(tokens), np.arange(n) - 1, np.ones(n) if probability is None else np.asarray(probability))


NOTHING = chain([])


@dataclass(frozen=True)
class Acceptance:
    """How deep drafts hold, for replays: ``by_depth[d]`` is the share of rounds whose first d + 1 levels are right.

    ``branching`` is how many children each node has. ``by_rank[r]`` is the share of right levels that the draft's r-th
    guess got right; by default each guess does so half as often as the one before. ``source`` says who counted.
    """

    by_depth: tuple[float, ...]
    branching: int
    source: str
    by_rank: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        shares = np.asarray(self.by_depth, float)
        if not len(shares) or not ((shares >= 0) & (shares <= 1)).all() or (np.diff(shares) > 0).any():
            raise ValueError(f"acceptance by depth must fall within 0 and 1, got {self.by_depth}")
        if self.branching < 1:
            raise ValueError(f"acceptance: branching must be at least 1, got {self.branching}")
        ranks = self.by_rank or tuple(0.5**r for r in range(self.branching))
        if len(ranks) != self.branching or min(ranks) < 0 or sum(ranks) <= 0:
            raise ValueError(f"acceptance by rank needs {self.branching} shares, got {self.by_rank}")
        object.__setattr__(self, "by_rank", tuple(r / sum(ranks) for r in ranks))

    def assumption(self) -> str:
        """The line that a row prints."""
        shares = ", ".join(f"{share:.2f}" for share in self.by_depth)
        ranks = "" if self.branching == 1 else f", by rank {', '.join(f'{share:.2f}' for share in self.by_rank)}"
        text = f"assumed: acceptance {shares} by depth{ranks} ({self.source}); "
        return text + "rejected drafts route like neighbouring tokens"


def lookup(tokens: np.ndarray, depth: int, branching: int = 1) -> Draft:
    """Guesses from the text so far (prompt lookup): what followed the longest run of tokens that ends it, of up to 4.

    ``tokens`` int64 [T]. Each node gets up to ``branching`` continuations, those seen latest first; a probability is
    the share of the earlier places, among those that agree so far, that went on so. Empty where nothing recurs.
    """
    nodes: list[tuple[int, int, float]] = []  # token, parent, probability
    level = [(ROOT, _places(tokens))]
    for _ in range(depth):
        following = []
        for parent, reached in level:
            starts = reached[reached < len(tokens)]
            seen = tokens[starts]
            for token in list(dict.fromkeys(seen[::-1].tolist()))[:branching]:
                agree = starts[seen == token]
                following.append((len(nodes), agree + 1))
                nodes.append((token, parent, len(agree) / len(starts)))
        level = following
    return Draft(*map(np.array, zip(*nodes, strict=True))) if nodes else NOTHING


def _places(tokens: np.ndarray) -> np.ndarray:
    """Where the text goes on after earlier occurrences of its longest recurring end, ascending int64."""
    for n in range(min(NGRAM, len(tokens) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens, n)[:-1]
        if len(found := np.flatnonzero((windows == tokens[-n:]).all(1))):
            return found + n
    return np.zeros(0, np.int64)
