"""Which finished request the running ones resemble: cosines kept up to date as layers route, never computed anew.

Knows matrices; knows no caches and no time.
"""

from __future__ import annotations

import numpy as np

from moebench.systems.moe_infinity.matrices import Collection

FLOAT = 4


class Matcher:
    """Nearest entry of a collection for each running sequence, by the mean of row cosines over some of the layers.

    ``observed`` compares the layers up to and with the current one, of which this token is known (the paper's idea).
    ``masked`` compares the layers behind the current one, of which only earlier tokens are known: its code blanks the
    rows that it has just seen. Before anything was seen there all entries tie and the first is taken.
    """

    def __init__(self, collection: Collection, rows: str) -> None:
        self.collection, self.rows = collection, rows
        self.reset(1)

    def reset(self, batch: int) -> None:
        """New sequences: nothing was seen of them."""
        layers, _, capacity = self.collection.unit.shape
        self.dots = np.zeros((batch, layers, capacity))
        self.squares = np.zeros((batch, layers))
        self.begin_step()

    def begin_step(self) -> None:
        """A pass starts with its first layer."""
        self.sum = np.zeros((len(self.dots), self.dots.shape[2]))
        if self.rows == "masked":
            behind = (self.dots / self._length(self.squares)[:, :, None])[:, ::-1].cumsum(1)[:, ::-1]
            self.behind = np.concatenate([behind, np.zeros_like(behind[:, :1])], axis=1)

    @staticmethod
    def _length(squares: np.ndarray) -> np.ndarray:
        return np.sqrt(np.where(squares > 0, squares, 1.0))

    def observe(self, layer: int, seen: list[tuple[int, np.ndarray, np.ndarray]], matrices: np.ndarray) -> int:
        """Take note of what ``layer`` routed, with ``matrices`` [B, L, E] after it; returns the bytes streamed."""
        streamed = 0
        for b, ids, counts in seen:
            columns = self.collection.unit[layer, ids]
            self.dots[b, layer] += (counts[:, None] * columns).sum(0)
            own = matrices[b, layer, ids]
            self.squares[b, layer] += (own**2 - (own - counts) ** 2).sum()
            streamed += columns.nbytes + 2 * FLOAT * self.collection.capacity
        self.sum += self.dots[:, layer] / self._length(self.squares[:, layer])[:, None]
        return streamed

    def nearest(self, layer: int) -> np.ndarray:
        """The entry each sequence resembles most once ``layer`` has routed, int64 [B]; ties go to the first."""
        total = self.sum if self.rows == "observed" else self.behind[:, layer + 1]
        chosen = total[:, : self.collection.size].argmax(1)
        self.collection.matches[chosen] += 1
        return chosen
