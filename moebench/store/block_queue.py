"""The two-level queue between callers and reader threads: demand before prefetch, one block at a time.

Knows requests and their blocks; reads nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from moebench.store.extents import Segment

DEMAND, PREFETCH = 0, 1


@dataclass(eq=False, slots=True)
class ReadRequest:
    """One expert being read into ``buffer``; ``waiting`` are the blocks that no thread has taken yet."""

    key: int
    buffer: np.ndarray
    priority: int
    waiting: deque[Segment]
    reading: int = 0
    nbytes: int = 0
    error: Exception | None = None
    future: Future[int] = field(default_factory=Future)


class BlockQueue:
    """Thread-safe. A request leaves it only when no thread is reading into its buffer any more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._levels: tuple[deque[ReadRequest], deque[ReadRequest]] = (deque(), deque())
        self._open: set[ReadRequest] = set()
        self._closed = False

    def put(self, request: ReadRequest) -> bool:
        """Queue a request behind those of its level; False once the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._open.add(request)
            self._levels[request.priority].append(request)
            self._changed.notify(len(request.waiting))
            return True

    def take(self) -> tuple[ReadRequest, Segment] | None:
        """The next block to read, waiting for one; None once the queue is closed."""
        with self._changed:
            while True:
                for level in self._levels:
                    if level:
                        request = level[0]
                        block = request.waiting.popleft()
                        request.reading += 1
                        if not request.waiting:
                            level.popleft()
                        return request, block
                if self._closed:
                    return None
                self._changed.wait()

    def settle(self, request: ReadRequest, nbytes: int, error: Exception | None) -> bool:
        """Book one block as read or failed; True when that was the request's last, so that its future can be resolved.

        The first error drops the blocks still waiting.
        """
        with self._changed:
            request.reading -= 1
            request.nbytes += nbytes
            if error is not None:
                self._drop(request, error)
            finished = not request.reading and not request.waiting
            if finished:
                self._open.discard(request)
            return finished

    def promote(self, key: int) -> None:
        """Move what waits of ``key`` to the end of the demand level."""
        with self._changed:
            for request in [r for r in self._levels[PREFETCH] if r.key == key]:
                self._levels[PREFETCH].remove(request)
                request.priority = DEMAND
                self._levels[DEMAND].append(request)

    def cancel(self, key: int, error: Exception) -> ReadRequest | None:
        """Take out a prefetch of ``key`` if no thread has taken a block of it; None where there is none such."""
        with self._changed:
            for request in self._levels[PREFETCH]:
                if request.key == key and not (request.reading or request.nbytes):
                    self._drop(request, error)
                    self._open.discard(request)
                    return request
            return None

    def close(self, error: Exception) -> list[ReadRequest]:
        """Refuse new requests and drop waiting blocks; returns the requests that no thread is reading."""
        with self._changed:
            self._closed = True
            for request in [*self._levels[DEMAND], *self._levels[PREFETCH]]:
                self._drop(request, error)
            idle = [request for request in self._open if not request.reading]
            self._open.difference_update(idle)
            self._changed.notify_all()
            return idle

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where levels, open requests and block counts contradict each other."""
        with self._changed:
            queued = [request for level in self._levels for request in level]
            assert len(queued) == len(set(queued)), "a request is queued twice"
            assert set(queued) <= self._open, "a finished request is still queued"
            assert all(request.waiting for request in queued), "a queued request has no block left"
            for priority, level in enumerate(self._levels):
                assert all(request.priority == priority for request in level), "a request stands in the wrong level"
            for request in self._open:
                assert request.reading or request.waiting, "an open request waits for nothing"
                assert bool(request.waiting) == (request in queued), "waiting blocks are out of reach"

    def _drop(self, request: ReadRequest, error: Exception) -> None:
        request.error = request.error or error
        if request.waiting:
            self._levels[request.priority].remove(request)
            request.waiting.clear()
