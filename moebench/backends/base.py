"""The contract of a backend: it computes a model's forward pass and asks the loop for experts layer by layer.

Backends know tensors and no disk; the core above them imports neither torch nor mlx.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from moebench.step import Routing, Step


class ExpertServer(Protocol):
    """What the loop offers to a backend while a forward pass runs (see ``engine.acquire``)."""

    def serve(self, layer: int, hidden: Any, native: Routing) -> tuple[Routing, Iterable[tuple[int, np.ndarray]]]:
        """Decide the routing of one MoE layer and yield its experts.

        Returns the routing to execute and an iterator of (expert id, bytes); each expert that a valid row needs comes
        exactly once, in any order. The bytes (uint8, the pack's tensor layout) are valid until the next item is asked
        for.
        """


class Backend(ABC):
    """One loaded model. Expert parameters are never allocated; only the dense weights are.

    Contract: outputs do not depend on the order in which the server yields experts. ``forward`` runs one step and
    returns logits as float32 numpy [B, V] of each sequence's last valid row (or [N, V] with ``all_rows``).
    """

    @abstractmethod
    def forward(self, step: Step, tokens: np.ndarray, server: ExpertServer, all_rows: bool = False) -> np.ndarray:
        """Run one step. ``tokens`` is int64 [B, W], left-padded; rows flatten to ``step``'s rows."""

    @abstractmethod
    def reset(self, batch: int) -> None:
        """Forget all sequences and start an empty KV cache for ``batch`` sequences."""

    @abstractmethod
    def probe_row_invariance(self) -> dict[str, Any]:
        """Run every kernel in use over one row and over many; report which are bit-identical and the largest
        difference.
        """

    @property
    @abstractmethod
    def dense_bytes(self) -> int:
        """Bytes of the dense weights held."""

    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of the KV cache held now."""
