"""What one forward pass is made of: steps, routings and the record a step leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PREFILL, DECODE, VERIFY = 0, 1, 2
PHASES = ("prefill", "decode", "verify")
ABSENT = -1


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass over a window of tokens of one or several sequences.

    Rows are flattened as the model flattens them: row ``i`` belongs to sequence ``sequence[i]`` at ``position[i]``;
    where ``valid[i]`` is false the row is padding and demands nothing. ``emits`` is the number of output tokens this
    pass yields.
    """

    index: int
    phase: int
    sequence: np.ndarray  # int32 [N]
    position: np.ndarray  # int32 [N]
    valid: np.ndarray  # bool [N]
    emits: int = 0

    def __post_init__(self) -> None:
        if not self.sequence.shape == self.position.shape == self.valid.shape or self.sequence.ndim != 1:
            raise ValueError("step: sequence, position and valid must be one-dimensional and of one length")

    @property
    def rows(self) -> int:
        """Rows of the pass, padding included."""
        return len(self.valid)


@dataclass(frozen=True, eq=False)
class Routing:
    """Experts chosen for each row of one layer, in router order.

    ``experts`` is int [N, k] with -1 for absent; ``weights`` has the same shape and is a numpy array, or the backend's
    own tensor on a live run (the core passes it on untouched). ``ahead``: decided before the layer's input was known,
    so that no router's choice has to be read back from the device.
    """

    experts: np.ndarray
    weights: Any
    ahead: bool = False

    def demand(self, valid: np.ndarray) -> list[int]:
        """Distinct experts that the valid rows need, ascending."""
        if len(valid) == 1:
            chosen = set(self.experts[0].tolist()) if valid[0] else set()
        else:
            chosen = set(self.experts[valid].ravel().tolist())
        chosen.discard(ABSENT)
        return sorted(chosen)
