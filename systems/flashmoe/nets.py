"""The eviction nets as numpy arrays: how they are laid out and what they say.

Every weight is a whole multiple of 2**-12 and every activation is rounded to one, so that all sums are exact in
float64: a score is the same on every machine, for one candidate or for many, in any order. Knows no expert's history
and no training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moebench.errors import UsageError

KINDS = ("joint", "shared")
GRID = 1 << 12
LARGEST = 32767 / GRID  # weights are stored as int16 multiples of 1 / GRID
LOWEST = -60.0  # SiLU is 0 below, to more digits than are kept


def widths(kind: str, experts: int, hidden: int) -> tuple[tuple[int, int], ...]:
    """(in, out) of the three matrices: 2E-h-h-E for ``joint``, 2-h-h-1 for ``shared``."""
    first, last = (2 * experts, experts) if kind == "joint" else (2, 1)
    return (first, hidden), (hidden, hidden), (hidden, last)


def parameters(kind: str, experts: int, hidden: int) -> int:
    """Numbers in one layer's net, biases included."""
    return sum(i * o + o for i, o in widths(kind, experts, hidden))


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)) in float64, to the next multiple of 1 / GRID."""
    return np.rint(x * GRID / (1.0 + np.exp(-np.maximum(x, LOWEST)))) / GRID


@dataclass(frozen=True, eq=False)
class Nets:
    """One net per layer, all in one int16 array [layers, parameters]: three times a matrix [in, out] and its bias.

    ``joint`` sees recency and frequency of all experts of its layer at once and scores all of them; ``shared`` sees and
    scores one expert at a time, every expert of the layer by the same numbers.
    """

    kind: str
    experts: int
    hidden: int
    weights: np.ndarray

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"eviction net {self.kind!r} is not one of {', '.join(KINDS)}")
        wanted = parameters(self.kind, self.experts, self.hidden)
        shape, dtype = self.weights.shape, self.weights.dtype
        if self.weights.ndim != 2 or shape[1] != wanted or dtype != np.int16:
            raise UsageError(
                f"{self.kind} nets are {dtype} {shape}, expected int16 (layers, {wanted}):"
                f" {self.experts} experts, hidden size {self.hidden}"
            )

    @property
    def layers(self) -> int:
        """Layers that have a net."""
        return len(self.weights)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's net as stored."""
        return self.weights[0].nbytes

    @cached_property
    def _parts(self) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """Per layer three (matrix, bias), float64 views of one array."""
        flat, parts = self.weights.astype(np.float64) / GRID, []
        for row in flat:
            at, layer = 0, []
            for i, o in widths(self.kind, self.experts, self.hidden):
                layer.append((row[at : at + i * o].reshape(i, o), row[at + i * o : at + i * o + o]))
                at += i * o + o
            parts.append(layer)
        return parts

    def scores(self, layer: int, recency: np.ndarray, frequency: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Predicted next-use distance (float64 [n], 1 = the horizon or later) of ``experts`` of a layer.

        ``recency`` and ``frequency`` are those of all experts, float64 [E].
        """
        joint = self.kind == "joint"
        if joint:
            x = np.concatenate((recency, frequency))
        else:
            x = np.empty((len(experts), 2))
            x[:, 0], x[:, 1] = recency[experts], frequency[experts]
        (w1, b1), (w2, b2), (w3, b3) = self._parts[layer]
        out = silu(silu(np.rint(x * GRID) / GRID @ w1 + b1) @ w2 + b2) @ w3 + b3
        return out[experts] if joint else out[:, 0]
