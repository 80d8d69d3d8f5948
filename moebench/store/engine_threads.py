"""Engines that read with a fixed pool of threads: ``pread`` through the page cache, ``direct`` past it.

The disk sees at most ``threads`` reads of at most ``block_bytes`` at a time. Knows no cache, no policy and no tensor.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import numpy as np

from moebench.store.engine_queued import QueuedEngine, Transfer
from moebench.store.engines import StoreError
from moebench.store.pack import Pack
from moebench.store.pages import open_direct
from moebench.units import MIB

CLOSED = -1


class ThreadEngine(QueuedEngine):
    """The threads; subclasses open the file and may override how one call reads."""

    def __init__(
        self, pack: Pack, threads: int = 4, block_bytes: int = MIB, pool: int = 0, coded: bool = False
    ) -> None:
        if threads < 1:
            raise StoreError(f"engine {self.name}: threads must be at least 1")
        super().__init__(pack, block_bytes, coded, pool, pool_default=2 * threads, workers=threads)
        self._fd = self._open(pack.file_path)
        self._threads = [
            threading.Thread(target=self._work, name=f"moebench-{self.name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let threads finish their block, fail all that is not complete then, join the threads, close the file."""
        self._fail_queued()
        for thread in self._threads:
            thread.join()
        self._workers.shutdown()
        with self._lock:
            fd, self._fd = self._fd, CLOSED
        if fd != CLOSED:
            self._release(fd)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where queue or threads are in a state they must not be in."""
        super().check_integrity()
        assert self._fd == CLOSED or all(thread.is_alive() for thread in self._threads), "a reader thread died"

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY)

    def _release(self, fd: int) -> None:
        os.close(fd)

    def _work(self) -> None:
        while (taken := self._queue.take()) is not None:
            error = None
            try:
                transfer = self._transfer(*taken)
                while not transfer.advance(self._outcome(transfer, partial(self._call, transfer))):
                    pass
            except Exception as problem:  # a thread that dies would leave futures waiting for ever
                error = problem
            self._settle(taken[0], error)

    def _call(self, transfer: Transfer) -> int:
        with self._lock:
            self.calls += 1
        return self._read_at(self._fd, transfer.views, transfer.at)

    def _read_at(self, fd: int, views: list[np.ndarray], offset: int) -> int:
        """One read call: fill ``views`` from the first on, return how many bytes came."""
        return os.preadv(fd, [view.data for view in views], offset)


class PreadEngine(ThreadEngine):
    """Buffered reads: what the page cache holds comes from memory."""

    name = "pread"


class DirectEngine(ThreadEngine):
    """Reads past the page cache (O_DIRECT, F_NOCACHE on macOS), where an expert is one extent straight into the
    caller's buffer.
    """

    name, past_cache = "direct", True

    def _open(self, path: Path) -> int:
        return open_direct(path)
