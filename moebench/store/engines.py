"""Contract of read engines (implementations: ``engine_*.py``). Placeholder of the interface; see class docstrings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

import numpy as np


class StoreError(Exception):
    """A pack that is missing, incomplete, foreign or corrupt; the message names file, expert and offset where it can."""


class ReadEngine(ABC):
    """Reads whole experts of one pack into caller-owned buffers, demand before prefetch.

    Contract: ``submit`` never blocks on the disk. The future resolves to the number of bytes read from storage, after every
    byte of the expert stands in ``buffer`` and its hash was checked; otherwise it raises ``StoreError`` naming file, expert
    and offset. Buffers are uint8 arrays of at least ``pack.slot_bytes`` bytes, 4096-aligned; they stay untouched by anyone
    else until the future is done. Requests of lower ``priority`` value are served first, block by block.
    """

    def __init__(self, pack: Any) -> None:
        self.pack = pack

    @abstractmethod
    def submit(self, key: int, buffer: np.ndarray, priority: int) -> Future[int]:
        """Start reading expert ``key`` (layer * experts + expert)."""

    @abstractmethod
    def promote(self, key: int) -> None:
        """Raise a queued read of ``key`` to demand priority; no effect when it is done."""

    @abstractmethod
    def close(self) -> None:
        """Finish or cancel what is queued and release threads and files; safe to call twice."""

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Bytes of bounce buffers that this engine holds, for the ledger."""
