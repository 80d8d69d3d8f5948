"""The ``uring`` engine: one thread keeps an io_uring filled with reads past the page cache, and never waits for a hash.

Linux 6.1 or newer. Knows no cache, no policy and no tensor.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future

import numpy as np

from moebench.store.engine_queued import QueuedEngine, ReadFailed, Transfer
from moebench.store.engines import StoreError
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer, open_direct
from moebench.store.uring import Ring, refusal
from moebench.units import PAGE

CLOSED = -1
WAKE = 0  # the name of the read that ends when the ring's thread has something to do


class UringEngine(QueuedEngine):
    """At most ``depth`` reads are in flight, each a whole piece of an expert or a run. What waits is overtaken by
    demand, cancelled or promoted; what was submitted goes on. ``threads`` others check, decode and put together what
    has come.
    """

    name, past_cache = "uring", True

    def __init__(self, pack: Pack, depth: int = 32, threads: int = 2, pool: int = 0, coded: bool = False) -> None:
        if depth < 1 or threads < 1:
            raise StoreError(f"engine {self.name}: depth and threads must be at least 1")
        if (why := refusal()) is not None:
            raise StoreError(f"engine uring: {why}; use engine=direct")
        super().__init__(pack, 0, coded, pool, pool_default=min(depth, 4 * threads), workers=threads, wake=self._wake)
        self.depth = depth
        self._unread: deque[Transfer] = deque()  # what a short read has left over
        self._fd = open_direct(pack.file_path)
        self._event, self._count = os.eventfd(0), np.zeros(1, np.uint64)
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(started,), name="moebench-uring", daemon=True)
        self._thread.start()
        try:
            started.result()
        except OSError as error:
            self._release()
            reason = f"{pack.file_path}: io_uring cannot read this file ({error.strerror}); use engine=direct"
            raise StoreError(reason) from error

    def close(self) -> None:
        """Let reads that were submitted end, fail the others, end threads and ring, close the file."""
        if self._fd == CLOSED:
            return
        self._fail_queued()
        self._thread.join()
        self._release()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where queue or thread are in a state they must not be in."""
        super().check_integrity()
        assert self._fd == CLOSED or self._thread.is_alive(), "the ring's thread died"

    def _release(self) -> None:
        self._workers.shutdown()  # workers wake the ring: its event is closed after them
        for fd in (self._fd, self._event):
            os.close(fd)
        self._fd = CLOSED

    def _wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def _work(self, started: Future[None]) -> None:
        in_flight: dict[int, Transfer] = {}
        ring, failure = None, None
        try:
            ring = Ring(self.depth + 1)
            self._try(ring)
            started.set_result(None)
            self._serve(ring, in_flight)
        except Exception as error:
            failure = error
        if ring is not None:
            ring.close()  # before anyone is told that his buffer is free
        if failure is not None:
            self._give_up(failure, started, [*in_flight.values()])

    def _try(self, ring: Ring) -> None:
        """Read one page: a file system may refuse what the kernel offers."""
        page = aligned_buffer(PAGE)
        ring.readv(self._fd, _addresses([page]), 0, WAKE)
        ((_, result),) = ring.enter()
        if result < 0:
            raise OSError(-result, os.strerror(-result))

    def _serve(self, ring: Ring, in_flight: dict[int, Transfer]) -> None:
        name, woken, event = WAKE, True, _addresses([self._count.view(np.uint8)])
        while not self._queue.drained:
            if woken:
                ring.readv(self._event, event, 0, WAKE)
                woken = False
            while len(in_flight) < self.depth and (transfer := self._next()) is not None:
                name += 1
                in_flight[name] = transfer
                self._push(ring, transfer, name)
            for done, result in ring.enter():
                if done == WAKE:
                    woken = True
                else:
                    self._workers.submit(self._complete, in_flight.pop(done), result)

    def _next(self) -> Transfer | None:
        if self._unread:
            return self._unread.popleft()
        taken = self._queue.poll()
        return None if taken is None else self._transfer(*taken)

    def _push(self, ring: Ring, transfer: Transfer, name: int) -> None:
        self.calls += 1
        ring.readv(self._fd, _addresses(transfer.views), transfer.at, name)

    def _complete(self, transfer: Transfer, result: int) -> None:
        """Take in the result of one read, in a worker."""

        def read() -> int:
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            return result

        error = None
        try:
            if not transfer.advance(self._outcome(transfer, read)):
                self._unread.append(transfer)
                self._wake()
                return
        except Exception as problem:  # whatever it is, somebody waits for the expert
            error = problem
        self._settle(transfer.request, error)

    def _give_up(self, error: Exception, started: Future[None], in_flight: list[Transfer]) -> None:
        """The ring itself failed: nothing of what was asked of it will come."""
        if not started.done():
            started.set_exception(error)
            return
        reason = f"the ring failed ({error})"
        self._fail_queued(reason)
        for transfer in [*in_flight, *self._unread]:
            self._settle(transfer.request, ReadFailed(reason))


def _addresses(views: list[np.ndarray]) -> np.ndarray:
    """What a vectored read fills (struct iovec): uint64 [n, 2] of address and length."""
    return np.array([(view.ctypes.data, len(view)) for view in views], np.uint64)
