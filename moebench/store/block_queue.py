"""The two-level queue between callers and readers: demand before prefetch, one read call at a time.

Knows requests, their blocks and the landing buffers they wait for; reads nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

DEMAND, PREFETCH = 0, 1


@dataclass(eq=False, slots=True)
class Part:
    """One expert of a request: ``nbytes`` from storage go to ``target``, which is the caller's ``buffer`` or, once the
    request has one, a landing buffer.
    """

    key: int
    buffer: np.ndarray
    target: np.ndarray | None
    nbytes: int = 0
    future: Future[int] = field(default_factory=Future)


class Piece(NamedTuple):
    """So many bytes of a block go to ``target[start:]`` of a part; without a part they are a gap that nobody wants."""

    part: Part | None
    start: int
    nbytes: int


class Block(NamedTuple):
    """What one read call brings: pieces that follow each other from ``offset`` in the file."""

    offset: int
    pieces: tuple[Piece, ...]


@dataclass(eq=False, slots=True)
class ReadRequest:
    """One expert, or a run of several; ``waiting`` are the blocks that no reader has taken yet."""

    parts: list[Part]
    priority: int
    waiting: deque[Block]
    reading: int = 0
    begun: bool = False
    error: Exception | None = None


class BlockQueue:
    """Thread-safe. A request leaves it only when nobody reads into its buffers any more.

    Where bytes land before they reach the caller, ``landing`` holds the buffers for that: a request gets one for each
    of its parts when its first block is taken, and until it can, nothing behind it that needs buffers is taken. Those
    that have theirs are, whatever stands before them, so that a demand never waits for a prefetch that waits for it.
    ``wake`` is called whenever a waiting reader may have something to do.
    """

    def __init__(self, landing: Iterable[np.ndarray] = (), wake: Callable[[], None] = lambda: None) -> None:
        self._changed, self._wake = threading.Condition(), wake
        self._levels: tuple[deque[ReadRequest], deque[ReadRequest]] = (deque(), deque())
        self._open: set[ReadRequest] = set()
        self._closed = False
        self._free = list(landing)
        self._lent, self._pool = 0, len(self._free)

    def put(self, requests: list[ReadRequest]) -> bool:
        """Queue requests behind those of their level; False once the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            for request in requests:
                self._open.add(request)
                self._levels[request.priority].append(request)
            self._changed.notify()  # who takes a block wakes the next one: the caller has other things to do
            self._wake()
            return True

    def take(self) -> tuple[ReadRequest, Block] | None:
        """The next block to read, waiting for one; None once the queue is closed."""
        with self._changed:
            while (found := self._next()) is None and not self._closed:
                self._changed.wait()
            if self._levels[DEMAND] or self._levels[PREFETCH]:
                self._changed.notify()
            return found

    def poll(self) -> tuple[ReadRequest, Block] | None:
        """The next block to read, or None where nothing can be read now."""
        with self._changed:
            return self._next()

    def settle(self, request: ReadRequest, error: Exception | None) -> bool:
        """Book one block as read or failed; True when that was the request's last, so that its parts can be delivered.

        The first error drops the blocks still waiting.
        """
        with self._changed:
            request.reading -= 1
            if error is not None:
                self._drop(request, error)
            finished = not request.reading and not request.waiting
            if finished:
                self._open.discard(request)
            if self._closed:
                self._wake()
            return finished

    def release(self, part: Part) -> None:
        """Take back the landing buffer of a part, if it has one."""
        with self._changed:
            if part.target is None or part.target is part.buffer:
                return
            self._free.append(part.target)
            self._lent -= 1
            part.target = None
            self._changed.notify_all()
            self._wake()

    def promote(self, key: int) -> None:
        """Move what waits of ``key``, and of the run it is in, to the end of the demand level."""
        with self._changed:
            for request in [r for r in self._levels[PREFETCH] if any(part.key == key for part in r.parts)]:
                self._levels[PREFETCH].remove(request)
                request.priority = DEMAND
                self._levels[DEMAND].append(request)

    def cancel(self, key: int, error: Exception) -> ReadRequest | None:
        """Take out a prefetch of ``key`` alone that no reader has begun; None where there is none such."""
        with self._changed:
            for request in self._levels[PREFETCH]:
                if [part.key for part in request.parts] == [key] and not request.begun:
                    self._drop(request, error)
                    self._open.discard(request)
                    return request
            return None

    def close(self, error: Exception) -> list[ReadRequest]:
        """Refuse new requests and drop waiting blocks; returns the requests that nobody is reading."""
        with self._changed:
            self._closed = True
            for request in [*self._levels[DEMAND], *self._levels[PREFETCH]]:
                self._drop(request, error)
            idle = [request for request in self._open if not request.reading]
            self._open.difference_update(idle)
            self._changed.notify_all()
            self._wake()
            return idle

    @property
    def drained(self) -> bool:
        """Whether the queue is closed and nothing of it is being read."""
        with self._changed:
            return self._closed and not self._open

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where levels, open requests, block counts and buffers contradict each other."""
        with self._changed:
            queued = [request for level in self._levels for request in level]
            assert len(queued) == len(set(queued)), "a request is queued twice"
            assert set(queued) <= self._open, "a finished request is still queued"
            assert all(request.waiting for request in queued), "a queued request has no block left"
            for priority, level in enumerate(self._levels):
                assert all(request.priority == priority for request in level), "a request stands in the wrong level"
            held = 0
            for request in self._open:
                assert request.reading or request.waiting, "an open request waits for nothing"
                assert bool(request.waiting) == (request in queued), "waiting blocks are out of reach"
                assert request.begun or not request.reading, "a request is being read and was not begun"
                for part in request.parts:
                    assert part.target is not None or not request.begun, "a begun request has no place to land"
                    held += part.target is not None and part.target is not part.buffer
            assert held <= self._lent, "a landing buffer is held and was not lent"
            assert self._lent + len(self._free) == self._pool, "a landing buffer is lost"
            assert len({id(buffer) for buffer in self._free}) == len(self._free), "a landing buffer is free twice"

    def _next(self) -> tuple[ReadRequest, Block] | None:
        short = False
        for level in self._levels:
            for request in level:
                if not request.begun:
                    without = [part for part in request.parts if part.target is None]
                    if without and (short := short or len(without) > len(self._free)):
                        continue
                    for part in without:
                        part.target = self._free.pop()
                        self._lent += 1
                    request.begun = True
                block = request.waiting.popleft()
                request.reading += 1
                if not request.waiting:
                    level.remove(request)
                return request, block
        return None

    def _drop(self, request: ReadRequest, error: Exception) -> None:
        request.error = request.error or error
        if request.waiting:
            self._levels[request.priority].remove(request)
            request.waiting.clear()
