"""How a drafter remembers texts and grows trees of guesses, whatever library computes its passes.

A text that continues one of those remembered goes on from the longest common prefix of ids; others begin anew, in the
place of what was asked about longest ago. Knows ids and caches that can be cropped and multiplied; knows no tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.backends.base import Drafter
from moebench.draft import ROOT, Draft


@dataclass
class Text:
    """One text: the ids it was asked about, how many of its cached ids can stand, and the cache."""

    asked: np.ndarray
    cached: np.ndarray
    cache: Any


class TextDrafter(Drafter):
    """A drafter over passes of a dense model; never guesses an id of ``vocabulary`` or above."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.reset(1)

    @abstractmethod
    def empty(self) -> Any:
        """A cache that holds nothing."""

    @abstractmethod
    def crop(self, cache: Any, length: int) -> None:
        """Keep the first ``length`` positions."""

    @abstractmethod
    def multiply(self, cache: Any, times: int) -> None:
        """Each row of the cache ``times`` times in a row; 0: only the first row of all."""

    @abstractmethod
    def probabilities(self, cache: Any, tokens: np.ndarray) -> np.ndarray:
        """fp32 [B, vocabulary] of what follows ``tokens`` [B, W], which ``cache`` gets."""

    def reset(self, sequences: int) -> None:
        """Forget all texts; from now on remember up to ``sequences``."""
        self._limit, self._texts = sequences, []

    @property
    def vocabulary(self) -> int:
        """Ids that it may propose."""
        return self._vocabulary

    def propose(self, tokens: np.ndarray, depth: int, branching: int = 1) -> Draft:
        """A full tree of ``depth`` levels, each node's children likeliest first; one pass per level."""
        text = self._recall(tokens)
        known = _common(text.cached, tokens[:-1])
        self.crop(text.cache, known)
        probability = self.probabilities(text.cache, tokens[None, known:])
        ids, parents, shares = [], [], []
        level = [ROOT]
        for at in range(depth):
            best = np.argsort(-probability, axis=1, kind="stable")[:, :branching]
            first = len(ids)
            ids += best.ravel().tolist()
            parents += np.repeat(level, best.shape[1]).tolist()
            shares += np.take_along_axis(probability, best, 1).ravel().tolist()
            level = list(range(first, len(ids)))
            if at + 1 < depth:
                self.multiply(text.cache, best.shape[1])
                probability = self.probabilities(text.cache, best.reshape(-1, 1))
        self.multiply(text.cache, 0)
        likeliest = [ids[node] for node in _first_path(parents)]
        text.asked, text.cached = tokens.copy(), np.append(tokens, likeliest[: depth - 1]).astype(np.int64)
        return Draft(ids, parents, shares)

    def _recall(self, tokens: np.ndarray) -> Text:
        """The remembered text that ``tokens`` continue, now the latest; else a new one."""
        for text in self._texts:
            if len(text.asked) <= len(tokens) and np.array_equal(text.asked, tokens[: len(text.asked)]):
                break
        else:
            text = Text(np.zeros(0, np.int64), np.zeros(0, np.int64), self.empty())
        self._texts = [text, *(other for other in self._texts if other is not text)][: self._limit]
        return text


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """Length of the common prefix of two id arrays."""
    n = min(len(one), len(two))
    differ = np.flatnonzero(one[:n] != two[:n])
    return int(differ[0]) if len(differ) else n


def _first_path(parents: list[int]) -> list[int]:
    """Nodes on the path of the first child of each first child."""
    path = [0]
    while path[-1] in parents:
        path.append(parents.index(path[-1]))
    return path
