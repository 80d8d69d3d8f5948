"""The contract of a backend: it computes a model's forward pass and asks the loop for experts layer by layer.

Backends know tensors and no disk; the core above them imports neither torch nor mlx.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moebench.backends.device import Device
from moebench.draft import Draft
from moebench.errors import MoebenchError
from moebench.step import Routing, Step
from moebench.store.pages import aligned_buffer


class BackendError(MoebenchError):
    """A model that cannot be served, or a server that broke its contract."""


class ExpertServer(Protocol):
    """What the loop offers to a backend while a forward pass runs (see ``engine.acquire``)."""

    def serve(self, layer: int, hidden: Any, native: Routing) -> tuple[Routing, Iterable[tuple[int, np.ndarray]]]:
        """Decide the routing of one MoE layer and yield its experts.

        Returns the routing to execute and an iterator of (expert id, bytes); each expert that a valid row needs comes
        exactly once, in any order. The bytes (uint8, the pack's tensor layout) are valid until the next item is asked
        for.
        """


@dataclass(frozen=True, eq=False)
class Adapters:
    """Low-rank adapters served unmerged: a projection W gives W x + scale * B (A x).

    ``pairs`` maps the projection's name in the model to (A [r, in], B [out, r]), fp16.
    """

    scale: float
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices as stored."""
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values())


class Ops(ABC):
    """Arithmetic on the backend's own tensors, for systems that predict from hidden states.

    Contract: every result row depends on its own row alone, bit for bit, however many rows there are. ``number_bytes``
    is what one number of a tensor takes.
    """

    number_bytes = 4

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Any:
        """The backend's tensor of a numpy array, in the precision that it predicts in."""

    @abstractmethod
    def numpy(self, tensor: Any) -> np.ndarray:
        """A tensor as float32 numpy."""

    @abstractmethod
    def rows(self, tensor: Any, index: np.ndarray) -> Any:
        """Rows ``index`` (int64) of hidden states [N, H] -> [len(index), H], in the precision that it predicts in."""

    @abstractmethod
    def concat(self, tensors: Sequence[Any]) -> Any:
        """Join tensors [..., a], [..., b] along the last axis."""

    @abstractmethod
    def stack(self, tensors: Sequence[Any]) -> Any:
        """Join tensors of one shape along a new first axis."""

    @abstractmethod
    def linear(self, x: Any, weight: Any) -> Any:
        """x [n, rows, in] and weight [n, out, in] (n products side by side) -> [n, rows, out]."""

    @abstractmethod
    def gelu(self, x: Any) -> Any:
        """Exact GELU, x * (1 + erf(x / sqrt 2)) / 2."""


class Drafter(ABC):
    """A small model that guesses what follows. It remembers the texts it was asked about, as many as run together."""

    @abstractmethod
    def propose(self, tokens: np.ndarray, depth: int, branching: int = 1) -> Draft:
        """Guess ``depth`` tokens after ``tokens`` (int64 [T]): each node gets its ``branching`` likeliest
        continuations. One pass per level.
        """

    @abstractmethod
    def reset(self, sequences: int) -> None:
        """Forget all texts; from now on remember up to ``sequences``."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Ids that it may propose: 0 to vocabulary - 1."""

    @property
    @abstractmethod
    def bytes_per_level(self) -> int:
        """Bytes of weights that one level of a draft streams from memory."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of all its weights."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes that it remembers per token of each text."""


class Backend(ABC):
    """One loaded model. Expert parameters are never allocated; only the dense weights are.

    Contract: outputs do not depend on the order in which the server yields experts. ``forward`` runs one step and
    returns logits as float32 numpy [B, V] of each sequence's last valid row (or [N, V] with ``all_rows``). In a pass
    that verifies a row attends to its own path only; ``retain`` must follow it.

    Where it computes on a ``device`` of its own memory, experts come in slots of that, and it takes ``transient_bytes``
    there for a moment beside the rows of a pass.
    """

    device: Device | None = None
    transient_bytes = 0

    @abstractmethod
    def forward(self, step: Step, tokens: np.ndarray, server: ExpertServer, all_rows: bool = False) -> np.ndarray:
        """Run one step. ``tokens`` is int64 [B, W], left-padded (windows of drafts: at the end); rows flatten to
        ``step``'s rows.
        """

    @abstractmethod
    def reset(self, batch: int) -> None:
        """Forget all sequences and start an empty KV cache for ``batch`` sequences."""

    @property
    @abstractmethod
    def trees(self) -> bool:
        """Whether drafts may branch; where layers carry recurrent or convolution state only chains can be verified."""

    @abstractmethod
    def retain(self, kept: np.ndarray) -> None:
        """Of the rows [B, W] of the pass that verified last keep those that are true in ``kept``; forget the others.

        What a sequence keeps is one path; the next pass is then the one that plain decoding of that path would make.
        """

    @abstractmethod
    def drafter(self, folder: str | Path) -> Drafter:
        """Load the dense model of ``folder``, whose ids must mean the same tokens, to draft for this one."""

    @abstractmethod
    def probe_row_invariance(self) -> dict[str, Any]:
        """Run every kernel in use over one row and over many; report which are bit-identical and the largest
        difference.
        """

    @abstractmethod
    def selection_bias(self) -> dict[int, np.ndarray]:
        """By MoE layer: fp32 [E] that the routing law adds to scores for choosing; empty for families without."""

    @property
    @abstractmethod
    def ops(self) -> Ops:
        """Arithmetic for systems that predict."""

    @abstractmethod
    def adapt(self, adapters: Adapters | None) -> None:
        """Serve ``adapters`` beside the dense weights from now on, instead of those served before; None for none.

        A name that is no dense projection, or a shape that does not fit, is an error that names it.
        """

    @property
    @abstractmethod
    def dense_bytes(self) -> int:
        """Bytes of the dense weights held."""

    @property
    def stored_dense_bytes(self) -> int:
        """Bytes of the dense weights as the checkpoint stores them, which is what a modeled machine holds."""
        return self.dense_bytes

    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of the KV cache held now."""

    def buffer(self, nbytes: int) -> np.ndarray:
        """A zeroed, page-aligned uint8 array [nbytes] for experts, in memory that this backend computes on in place."""
        return aligned_buffer(nbytes)

    def allocator_peak_bytes(self) -> int | None:
        """The most that the library's allocator held at a time since the model was loaded; None: it keeps no count."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a row should say of how this backend computes, a line each."""
        return ()
