"""Engines that read with a fixed pool of threads: ``pread`` through the page cache, ``direct`` past it.

The disk sees at most ``threads`` reads of at most ``block_bytes`` at a time. Knows no cache, no policy and no tensor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from moebench.store.block_queue import DEMAND, PREFETCH, BlockQueue, ReadRequest
from moebench.store.engines import ReadEngine, StoreError
from moebench.store.extents import Segment
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer
from moebench.units import MIB, PAGE, align_up

CLOSED = -1
NO_PROGRESS_LIMIT = 3  # reads in a row that may return nothing usable before the expert is given up


class ThreadEngine(ReadEngine):
    """The pool and its bookkeeping; subclasses open the file and may override how one block is read."""

    name: str

    def __init__(self, pack: Pack, threads: int = 4, block_bytes: int = MIB) -> None:
        super().__init__(pack)
        if threads < 1 or block_bytes < PAGE or block_bytes % PAGE:
            raise StoreError(f"engine {self.name}: threads must be at least 1 and block_bytes a multiple of {PAGE}")
        self.block_bytes, self.thread_count = block_bytes, threads
        self._gaps = pack.manifest.extents.gaps() if pack.manifest.layout == "checkpoint" else []
        self._queue, self._lock = BlockQueue(), threading.Lock()
        self._fd = self._open(pack.file_path)
        self._threads = [
            threading.Thread(target=self._work, name=f"moebench-{self.name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: int, buffer: np.ndarray, priority: int) -> Future[int]:
        """Start reading expert ``key``; raises ``StoreError`` for a wrong argument or a closed engine."""
        if priority not in (DEMAND, PREFETCH):
            raise StoreError(
                f"engine {self.name}: priority {priority!r} is not one of {DEMAND} (demand), {PREFETCH} (prefetch)"
            )
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise StoreError(
                f"engine {self.name}: the buffer must be a writable, contiguous, one-dimensional uint8 array"
            )
        if buffer.nbytes < self.pack.slot_bytes or buffer.ctypes.data % PAGE:
            raise StoreError(
                f"engine {self.name}: the buffer must hold {self.pack.slot_bytes} bytes from a {PAGE} boundary"
            )
        request = ReadRequest(key, buffer, priority, deque(self._blocks(key)))
        request.future.set_running_or_notify_cancel()  # a cancelled future would free a buffer that is being filled
        if not self._queue.put(request):
            raise StoreError(f"engine {self.name}: closed")
        with self._lock:
            self.requests += 1
        return request.future

    def promote(self, key: int) -> None:
        """Raise a queued read of ``key`` to demand priority; blocks already taken by a thread are not affected."""
        self._queue.promote(key)

    def cancel(self, key: int) -> bool:
        """Take back a queued prefetch of ``key`` that no thread has begun."""
        error = StoreError(f"{self.pack.where(key)}: the read was cancelled before it began")
        if (request := self._queue.cancel(key, error)) is None:
            return False
        request.future.set_exception(error)
        return True

    def close(self) -> None:
        """Let threads finish their block, fail all that is not complete then, join the threads, close the file."""
        error = StoreError(f"{self.pack.file_path}: engine {self.name} was closed before the expert was read")
        for request in self._queue.close(error):
            request.future.set_exception(error)
        for thread in self._threads:
            thread.join()
        with self._lock:
            fd, self._fd = self._fd, CLOSED
        if fd != CLOSED:
            self._release(fd)

    @property
    def staging_bytes(self) -> int:
        """No bounce buffers: blocks land in the caller's buffer."""
        return 0

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where queue or threads are in a state they must not be in."""
        self._queue.check_integrity()
        assert self._fd == CLOSED or all(thread.is_alive() for thread in self._threads), "a reader thread died"

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY)

    def _release(self, fd: int) -> None:
        os.close(fd)

    def _segments(self, key: int) -> list[Segment]:
        return self.pack.segments(key)

    def _blocks(self, key: int) -> Iterator[Segment]:
        for offset, nbytes, dest in self._segments(key):
            for start in range(0, nbytes, self.block_bytes):
                yield Segment(offset + start, min(self.block_bytes, nbytes - start), dest + start)

    def _work(self) -> None:
        bounce = self._bounce_buffer()
        while (taken := self._queue.take()) is not None:
            request, block = taken
            nbytes, error = 0, None
            try:
                nbytes = self._read_block(request, block, bounce)
            except Exception as problem:  # a thread that dies would leave futures waiting for ever
                error = problem
            with self._lock:
                self.bytes_read += nbytes
            if self._queue.settle(request, nbytes, error):
                self._resolve(request)

    def _resolve(self, request: ReadRequest) -> None:
        try:
            if request.error is not None:
                raise request.error
            for start, end in self._gaps:
                request.buffer[start:end] = 0
            self.pack.check(request.key, request.buffer)
        except Exception as error:
            request.future.set_exception(error)
        else:
            request.future.set_result(request.nbytes)

    def _bounce_buffer(self) -> np.ndarray | None:
        return None

    def _read_block(self, request: ReadRequest, block: Segment, bounce: np.ndarray | None) -> int:
        return self._read_fully(request, request.buffer.data[block.dest : block.dest + block.nbytes], block.offset, 1)

    def _read_fully(self, request: ReadRequest, view: memoryview, offset: int, unit: int) -> int:
        """Fill ``view`` from ``offset``, going on after short reads in whole ``unit`` bytes; returns the bytes read."""
        done, nbytes, idle = 0, 0, 0
        while done < len(view):
            try:
                count = self._read_at(self._fd, view[done:], offset + done)
            except OSError as error:
                reason = errno.errorcode.get(error.errno or 0, "")
                message = f"{self.pack.where(request.key)}: read at {offset + done} failed ({reason} {error.strerror})"
                raise StoreError(message) from error
            nbytes += count
            step = count if done + count == len(view) else count // unit * unit
            done, idle = done + step, 0 if step else idle + 1
            if idle == NO_PROGRESS_LIMIT:
                where = self.pack.where(request.key)
                raise StoreError(f"{where}: short read, {done} of {len(view)} bytes came from offset {offset}")
        return nbytes

    def _read_at(self, fd: int, view: memoryview, offset: int) -> int:
        """One read call: fill the start of ``view``, return how many bytes came. Fault injection replaces this."""
        return os.preadv(fd, [view], offset)


class PreadEngine(ThreadEngine):
    """Buffered reads: what the page cache holds comes from memory."""

    name = "pread"


class DirectEngine(ThreadEngine):
    """Reads past the page cache (O_DIRECT, F_NOCACHE on macOS), straight into the caller's buffer.

    Layout ``checkpoint`` is not aligned: there each thread owns one bounce buffer and copies out of it.
    """

    name = "direct"

    def _open(self, path: Path) -> int:
        try:
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            raise self._refused(path, error.strerror) from error
        try:
            if hasattr(fcntl, "F_NOCACHE"):
                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
            elif not hasattr(os, "O_DIRECT"):
                raise self._refused(path, "neither O_DIRECT nor F_NOCACHE")
            os.preadv(fd, [aligned_buffer(PAGE).data], 0)  # some file systems refuse only the first read
        except OSError as error:
            os.close(fd)
            raise self._refused(path, error.strerror) from error
        except StoreError:
            os.close(fd)
            raise
        return fd

    def _refused(self, path: Path, reason: str | None) -> StoreError:
        return StoreError(f"{path}: this file system refuses direct reads ({reason}); use engine=pread")

    @property
    def staging_bytes(self) -> int:
        """One bounce buffer a thread in layout checkpoint, none otherwise."""
        return self.thread_count * self._bounce_bytes

    @property
    def _bounce_bytes(self) -> int:
        if self.pack.manifest.layout != "checkpoint":
            return 0
        largest = max(spec.nbytes for spec in self.pack.manifest.tensors)
        return min(self.block_bytes, align_up(largest)) + PAGE

    def _bounce_buffer(self) -> np.ndarray | None:
        return aligned_buffer(self._bounce_bytes) if self._bounce_bytes else None

    def _segments(self, key: int) -> list[Segment]:
        segments = super()._segments(key)
        return segments if self._bounce_bytes else [segments[0]._replace(nbytes=self.pack.slot_bytes)]

    def _read_block(self, request: ReadRequest, block: Segment, bounce: np.ndarray | None) -> int:
        if bounce is None:
            view = request.buffer.data[block.dest : block.dest + block.nbytes]
            return self._read_fully(request, view, block.offset, PAGE)
        start = block.offset // PAGE * PAGE
        head, span = block.offset - start, align_up(block.offset + block.nbytes) - start
        nbytes = self._read_fully(request, bounce.data[:span], start, PAGE)
        request.buffer[block.dest : block.dest + block.nbytes] = bounce[head : head + block.nbytes]
        return nbytes
