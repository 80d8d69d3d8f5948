"""One plane of byte symbols in rANS: its own table, lanes as its size allows, and bare bytes where coding does not pay.

Knows planes and their records; not which tensor they come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moebench.store import rans_kernels as kernels
from moebench.store.rans_kernels import TOTAL, WIDTH

WORD_ALIGNMENT = 4  # of a plane's body
LEAST_SAVING = 1 / 128  # below it a plane is kept raw: decoding would cost more time than its bytes
STATE_SHARE = 1 / 1024  # lanes per coded byte: states of four bytes then are 0.4 % of what is stored
FEW, LEAST_LANES = 4096, 2 * WIDTH  # planes of that many symbols have lanes for two vectors, however few bytes remain
ROWS = 8192  # symbols of one lane at most, so that a decoder of all lanes at once has few steps


@dataclass(frozen=True, eq=False)
class Plane:
    """A plane as it is stored: ``lanes`` 0 is raw bytes in ``body``."""

    count: int
    lanes: int
    symbols: int
    words: int
    body: np.ndarray  # uint8: states, frequencies, words, symbols; or the bytes themselves


def choose_lanes(count: int, coded_bytes: float) -> int:
    """How many lanes a plane of ``count`` symbols gets whose words take ``coded_bytes``."""
    lanes = int(coded_bytes * STATE_SHARE) // WIDTH * WIDTH
    return min(count, max(lanes, LEAST_LANES if count >= FEW else 1, -(-count // ROWS)))


def encode_plane(data: np.ndarray, lanes: int | None = None) -> Plane:
    """``data`` (uint8 [count]) coded, or raw where that is no longer; ``lanes`` None chooses them by size."""
    raw = Plane(data.size, 0, 0, 0, data)
    if data.size == 0:
        return raw
    counts = kernels.count(data)
    frequencies = kernels.normalise(counts)
    present = np.flatnonzero(counts)
    coded_bytes = float(counts[present] @ np.log2(TOTAL / frequencies[present])) / 8
    lanes = choose_lanes(data.size, coded_bytes) if lanes is None else min(lanes, data.size)
    limit = data.size * (1 - LEAST_SAVING)
    if coded_bytes + 4 * lanes + 3 * present.size > limit:
        return raw
    states, words = kernels.encode(data, frequencies, lanes)
    parts = (states, frequencies[present].astype(np.uint16), words, present.astype(np.uint8))
    body = np.concatenate([part.view(np.uint8) for part in parts])
    return Plane(data.size, lanes, present.size, words.size, body) if body.size <= limit else raw


def entropy_bytes(data: np.ndarray) -> float:
    """Order-0 entropy of ``data`` (uint8), in bytes: what no code that looks at single symbols goes below."""
    counts = np.bincount(data, minlength=256)
    counts = counts[counts > 0]
    return float(counts @ np.log2(data.size / counts)) / 8
