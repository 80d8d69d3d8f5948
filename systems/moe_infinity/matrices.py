"""Expert activation matrices: how many of a sequence's tokens each expert of each layer took, and a bounded collection
of those of finished requests. Knows counts and cosines; knows no caches, no time and no trace files.
"""

from __future__ import annotations

import numpy as np

from moebench.step import ABSENT, Step


class Activity:
    """The matrices [B, L, E] of the sequences that run now, and ``ratio`` float64 [L, E], what they use on the whole.

    A sequence's ratio of an expert is its share of the tokens that the layer routed; over a batch ratios are added,
    which makes them the expected number of sequences that use the expert.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self.reset(np.arange(1))

    def reset(self, sequences: np.ndarray) -> None:
        """New requests, numbered ``sequences`` in ascending order."""
        self.sequences = np.asarray(sequences)
        self.counts = np.zeros((len(self.sequences), self.layers, self.experts))
        self.ratio = np.zeros((self.layers, self.experts))

    def observe(self, step: Step, layer: int, chosen: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Count the experts [N, k] that the valid rows of a pass chose; what was new: (sequence, ids, counts)."""
        if step.rows == 1 and len(self.sequences) == 1:
            ids = chosen[0][chosen[0] != ABSENT] if step.valid[0] else chosen[0, :0]
            seen = [(0, ids, np.ones(len(ids)))]
        else:
            number = np.searchsorted(self.sequences, step.sequence)
            seen = []
            for b in np.unique(number[step.valid]).tolist():
                own = chosen[step.valid & (number == b)]
                ids, counts = np.unique(own[own != ABSENT], return_counts=True)
                seen.append((b, ids, counts.astype(np.float64)))
        for b, ids, counts in seen:
            self.counts[b, layer, ids] += counts
        own = self.counts[:, layer]
        self.ratio[layer] = (own / np.maximum(own.sum(1, keepdims=True), 1.0)).sum(0)
        return seen


class Collection:
    """At most ``capacity`` matrices of finished requests, rows scaled to unit length.

    ``unit`` is float32 [L, E, capacity]: one expert's column over all entries lies together, so that matching streams
    only the experts that a token took. ``matches`` counts how often each entry was the nearest.
    """

    def __init__(self, start: np.ndarray, layers: int, experts: int, capacity: int, persistent: int = 0) -> None:
        self.capacity, self.persistent, self.size = capacity, persistent, 0
        self.unit = np.zeros((layers, experts, capacity), np.float32)
        self.matches = np.zeros(capacity, np.int64)
        for matrix in start[:capacity]:
            self._put(self.size, matrix)
            self.size += 1

    def _put(self, at: int, matrix: np.ndarray) -> None:
        length = np.sqrt((matrix.astype(np.float64) ** 2).sum(1, keepdims=True))
        self.unit[:, :, at] = matrix / np.where(length > 0, length, 1.0)
        self.matches[at] = 0

    def add(self, matrix: np.ndarray, update: str) -> int:
        """Keep one finished request's matrix [L, E] and return its place: a free one, else that of the entry it is
        nearest to (``nearest``, the paper's) or of the least matched one behind the persistent ones (its code's).
        """
        if self.size < self.capacity:
            at = self.size
            self.size += 1
        elif update == "nearest":
            at = int(self.similarity(matrix).argmax())
        else:
            at = self.persistent + int(self.matches[self.persistent :].argmin())
        self._put(at, matrix)
        return at

    def similarity(self, matrix: np.ndarray) -> np.ndarray:
        """Mean over layers of the cosine between rows, float64 [size]; a row without counts is similar to nothing."""
        length = np.sqrt((matrix.astype(np.float64) ** 2).sum(1))
        total = np.zeros(self.size)
        for layer in np.flatnonzero(length).tolist():
            ids = np.flatnonzero(matrix[layer])
            dot = (matrix[layer, ids][:, None] * self.unit[layer, ids, : self.size]).sum(0)
            total += dot / length[layer]
        return total / len(matrix)

    def ratio(self, at: int) -> np.ndarray:
        """The share of a request's tokens that each expert took, float64 [L, E]."""
        rows = self.unit[:, :, at].astype(np.float64)
        total = rows.sum(1, keepdims=True)
        return rows / np.where(total > 0, total, 1.0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.unit.nbytes
