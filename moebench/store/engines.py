"""The contract of read engines, and the names of those that ship (implementations: ``engine_*.py``)."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import numpy as np

ENGINES = {  # name: module and class, imported when opened, and a line for people
    "mmap": ("moebench.store.engine_mmap", "MmapEngine", "page faults in a mapping do the reading"),
    "pread": ("moebench.store.engine_threads", "PreadEngine", "reads through the page cache, a few at a time"),
    "direct": ("moebench.store.engine_threads", "DirectEngine", "reads past the page cache, a few at a time"),
    "uring": ("moebench.store.engine_uring", "UringEngine", "one io_uring for all reads, past the page cache"),
    "faulty": ("moebench.store.engine_faulty", "FaultyEngine", "another engine with seeded faults, for tests"),
}
DEPTH = {"mmap": "threads", "pread": "threads", "direct": "threads", "uring": "depth"}  # what says how many at a time
CUTS = ("mmap", "pread", "direct")  # engines that cut reads into calls of ``block_bytes``


class StoreError(Exception):
    """A pack that is missing, incomplete, foreign or corrupt; the message names file, expert and offset."""


class ReadEngine(ABC):
    """Reads whole experts of one pack into caller-owned buffers, demand before prefetch.

    Contract: ``submit`` never blocks on the disk. The future resolves to the number of bytes read from storage, after
    every byte of the expert stands in ``buffer`` and its hash was checked; otherwise it raises ``StoreError`` naming
    file, expert and offset. Buffers are uint8 arrays of at least ``buffer_bytes`` bytes, 4096-aligned; they stay
    untouched by anyone else until the future is done. Requests of lower ``priority`` value are served first, call by
    call.

    On a coded pack an engine decodes into the caller's buffer; opened with ``coded=True`` it leaves there what is
    stored, for ``pack.decode``.
    """

    requests = 0  # experts submitted so far
    calls = 0  # read calls issued to storage so far, short reads that go on included
    bytes_read = 0  # bytes read from storage so far, for finished and failed requests alike
    coded = False  # whether buffers get what is stored instead of the expert

    def __init__(self, pack: Any) -> None:
        self.pack = pack

    @abstractmethod
    def submit(self, key: int, buffer: np.ndarray, priority: int) -> Future[int]:
        """Start reading expert ``key`` (layer * experts + expert)."""

    def submit_all(self, keys: Sequence[int], buffers: Sequence[np.ndarray], priority: int) -> list[Future[int]]:
        """Start reading several experts in this order, each by itself."""
        return [self.submit(key, buffer, priority) for key, buffer in zip(keys, buffers, strict=True)]

    def submit_run(self, keys: Sequence[int], buffers: Sequence[np.ndarray], priority: int) -> list[Future[int]]:
        """Start reading neighbours, ascending by place on storage; each has a future of its own.

        An engine that can reads them, and the gaps between them, with one call; this one submits each.
        """
        return self.submit_all(keys, buffers, priority)

    @abstractmethod
    def promote(self, key: int) -> None:
        """Raise a queued read of ``key`` to demand priority; no effect when it is done."""

    def cancel(self, key: int) -> bool:
        """Take back a prefetch of ``key`` of which nothing was begun: its future fails and its buffer is free.

        False where it goes on, as it always does for one of a run, or for an engine that keeps no queue.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Finish what is being read, fail what is queued, and release threads and files; safe to call twice."""

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Bytes of buffers that this engine holds beside the caller's, for the ledger."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes that a caller's buffer must hold."""
        return self.pack.landing_bytes if self.coded else self.pack.slot_bytes

    def __enter__(self) -> ReadEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_engine(name: str, pack: Any, **options: Any) -> ReadEngine:
    """Open one of ``ENGINES`` on ``pack``; an unknown name or option is a ``StoreError`` that lists the valid ones."""
    if name not in ENGINES:
        raise StoreError(f"unknown engine {name!r}; valid: {', '.join(ENGINES)}")
    module, attribute, _ = ENGINES[name]
    factory = getattr(import_module(module), attribute)
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    valid = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    unknown = set() if len(valid) < len(parameters) else set(options) - set(valid)
    if unknown:
        raise StoreError(f"engine {name}: unknown option {', '.join(sorted(unknown))}; valid: {', '.join(valid)}")
    return factory(pack, **options)
