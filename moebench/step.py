"""What one forward pass is made of: steps, routings and the record a step leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.draft import Draft

PREFILL, DECODE, VERIFY = 0, 1, 2
PHASES = ("prefill", "decode", "verify")
ABSENT = -1


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass over a window of tokens of one or several sequences.

    Rows are flattened as the model flattens them: row ``i`` belongs to sequence ``sequence[i]`` at ``position[i]``;
    where ``valid[i]`` is false the row is padding and demands nothing. ``emits`` is the number of output tokens this
    pass yields.

    A pass that verifies has the ``drafts`` of its sequences, in their order: a sequence's rows are its last accepted
    token, then the nodes of its draft, then padding. Only when it ends is it known which rows are ``accepted`` (bool
    [N]: one for each token emitted) and what it emits.
    """

    index: int
    phase: int
    sequence: np.ndarray  # int32 [N]
    position: np.ndarray  # int32 [N]
    valid: np.ndarray  # bool [N]
    emits: int = 0
    drafts: tuple[Draft, ...] = ()
    accepted: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.sequence.shape == self.position.shape == self.valid.shape or self.sequence.ndim != 1:
            raise ValueError("step: sequence, position and valid must be one-dimensional and of one length")

    @property
    def rows(self) -> int:
        """Rows of the pass, padding included."""
        return len(self.valid)

    def node_rows(self) -> list[np.ndarray]:
        """By sequence, in the order of ``drafts``: the rows of its draft's nodes, int64 [n]."""
        starts = np.flatnonzero(np.diff(self.sequence, prepend=self.sequence[0] - 1))
        return [start + 1 + np.arange(len(draft)) for start, draft in zip(starts, self.drafts, strict=True)]

    def settle(self, accepted: np.ndarray) -> None:
        """Say which rows of a pass that verified stand, before the pass ends; nothing else of a step ever changes."""
        object.__setattr__(self, "accepted", accepted)
        object.__setattr__(self, "emits", int(accepted.sum()))


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
