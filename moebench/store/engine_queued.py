"""What the engines with a queue share: requests, places to land, counters, and the delivery of experts.

A subclass reads: it takes blocks from the queue, fills their buffers and settles them. Knows no cache, no policy and no
tensor.
"""

from __future__ import annotations

import errno
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from moebench.store.block_queue import DEMAND, PREFETCH, Block, BlockQueue, Part, Piece, ReadRequest
from moebench.store.engines import ReadEngine, StoreError
from moebench.store.extents import Segment
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer
from moebench.units import KIB, PAGE, align_up

NO_PROGRESS_LIMIT = 3  # reads in a row that may return nothing usable before the expert is given up
SCRATCH = 64 * KIB  # what nobody wants is read into this, over and over
MOST_CHECKED = 1 << 16  # buffers that are remembered as right, for callers that never use one again
MOST_BUFFERS = 1024  # that one read call can fill (IOV_MAX of Linux and macOS)


class ReadFailed(Exception):
    """What went wrong with a block, before it is known which expert says so."""


class Transfer:
    """One block on its way: ``views`` are still to be filled, from ``at`` in the file. ``unit`` is 1 or a page."""

    __slots__ = ("at", "block", "idle", "left", "request", "unit", "views")

    def __init__(self, request: ReadRequest, block: Block, views: list[np.ndarray], unit: int) -> None:
        self.request, self.block, self.views, self.unit = request, block, views, unit
        self.at, self.left, self.idle = block.offset, sum(map(len, views)), 0

    def advance(self, count: int) -> bool:
        """``count`` bytes have come; True when that is all, ``ReadFailed`` when a read keeps ending early."""
        step = count if count == self.left else count // self.unit * self.unit
        self.idle = 0 if step else self.idle + 1
        if self.idle == NO_PROGRESS_LIMIT:
            done, offset = self.at - self.block.offset, self.block.offset
            raise ReadFailed(f"short read, {done} of {done + self.left} bytes came from offset {offset}")
        self.at, self.left = self.at + step, self.left - step
        while step:
            first = self.views.pop(0)
            if len(first) > step:
                self.views.insert(0, first[step:])
            step -= min(step, len(first))
        return not self.left


class QueuedEngine(ReadEngine):
    """Queue, landing buffers and delivery.

    ``block_bytes`` cuts each piece of an expert into calls of that size, between which demand overtakes prefetch; 0
    reads a piece with one call. Bytes land in one of ``pool`` buffers (0: ``pool_default``) where they cannot land in
    the caller's: on a coded pack, and past the page cache, which gives whole pages only, in layouts that scatter an
    expert. ``workers`` threads check and decode what the reader does not.
    """

    name: str
    past_cache = False  # reads are whole pages, past the page cache

    def __init__(
        self, pack: Pack, block_bytes: int, coded: bool, pool: int, pool_default: int, workers: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(pack)
        if block_bytes < 0 or block_bytes % PAGE:
            raise StoreError(f"engine {self.name}: block_bytes must be a multiple of {PAGE}, or 0 for one call a piece")
        if coded and not pack.coded:
            raise StoreError(f"engine {self.name}: coded=true has no meaning on {pack.path}, a pack with codec=none")
        self.block_bytes, self.coded = block_bytes, coded
        self._decodes = pack.coded and not coded
        self._whole = pack.manifest.extents.whole
        self._gaps = [] if self._whole else pack.manifest.extents.gaps()
        self._landing_bytes = self._most_landing()
        if pool < 0 or (pool and not self._landing_bytes):
            raise StoreError(
                f"engine {self.name}: pool counts the buffers in which bytes land before they are decoded or put "
                f"together; here they land in place, leave it out"
            )
        self._pool = (pool or pool_default) if self._landing_bytes else 0
        arena = aligned_buffer(self._pool * self._landing_bytes).reshape(self._pool, -1) if self._pool else ()
        self._queue, self._lock = BlockQueue(arena, wake), threading.Lock()
        self._scratch: np.ndarray | None = None
        self._checked: dict[int, weakref.ref[np.ndarray]] = {}
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix=f"moebench-{self.name}-worker")
        self.inject: Callable[[list[np.ndarray], int, Callable[[], int]], int] | None = None

    def submit(self, key: int, buffer: np.ndarray, priority: int) -> Future[int]:
        """Start reading expert ``key``; raises ``StoreError`` for a wrong argument or a closed engine."""
        return self._enqueue([self._request([key], [buffer], priority)])[0]

    def submit_all(self, keys: Sequence[int], buffers: Sequence[np.ndarray], priority: int) -> list[Future[int]]:
        """Start reading several experts: the queue is opened once for all of them."""
        return self._enqueue(
            [self._request((key,), (buffer,), priority) for key, buffer in zip(keys, buffers, strict=True)]
        )

    def submit_run(self, keys: Sequence[int], buffers: Sequence[np.ndarray], priority: int) -> list[Future[int]]:
        """Read neighbours with one call, and the gaps between them, which count in ``bytes_read`` alone.

        Of a run longer than the pool of landing buffers, one call reads as many experts as the pool holds.
        """
        if len(keys) > 1 and not self._whole:
            raise StoreError(
                f"engine {self.name}: layout {self.pack.manifest.layout} scatters an expert over the file, so that a "
                f"run of {len(keys)} is no single read; submit them one by one"
            )
        most = self._pool or len(keys)
        cuts = [slice(at, at + most) for at in range(0, len(keys), most)]
        return self._enqueue([self._request(keys[cut], buffers[cut], priority) for cut in cuts])

    def promote(self, key: int) -> None:
        """Raise a queued read of ``key`` to demand priority; what a reader has already taken is not affected."""
        self._queue.promote(key)

    def cancel(self, key: int) -> bool:
        """Take back a queued prefetch of ``key`` that no reader has begun; one of a run goes on."""
        error = ReadFailed("the read was cancelled before it began")
        if (request := self._queue.cancel(key, error)) is None:
            return False
        self._deliver(request, request.parts[0])
        return True

    def _fail_queued(self, reason: str = "") -> None:
        """Refuse new requests, and fail those that nobody is reading; the others fail with their last block."""
        error = ReadFailed(reason or f"engine {self.name} was closed before the expert was read")
        for request in self._queue.close(error):
            for part in request.parts:
                self._deliver(request, part)

    @property
    def staging_bytes(self) -> int:
        """The pool of landing buffers, and once a run has had gaps, what those are read into."""
        return self._pool * self._landing_bytes + (0 if self._scratch is None else SCRATCH)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the queue is in a state it must not be in."""
        self._queue.check_integrity()

    def _most_landing(self) -> int:
        if self._decodes:
            return self.pack.landing_bytes
        if self.past_cache and not self._whole:
            return sum(align_up(segment.nbytes) + PAGE for segment in self.pack.segments(0))
        return 0

    def _reads(self, key: int) -> Iterator[Segment]:
        """What is read of expert ``key``, and where it lands."""
        at = 0
        for offset, nbytes, dest in self.pack.segments(key):
            if not self.past_cache:
                yield Segment(offset, nbytes, dest)
            elif self._whole:
                yield Segment(offset, align_up(nbytes), dest)
            else:
                start = offset // PAGE * PAGE
                span = align_up(offset + nbytes) - start
                yield Segment(start, span, at)
                at += span

    def _request(self, keys: Sequence[int], buffers: Sequence[np.ndarray], priority: int) -> ReadRequest:
        if priority not in (DEMAND, PREFETCH):
            raise StoreError(
                f"engine {self.name}: priority {priority!r} is not one of {DEMAND} (demand), {PREFETCH} (prefetch)"
            )
        parts = []
        for key, buffer in zip(keys, buffers, strict=True):
            self._check_buffer(buffer)
            parts.append(Part(key, buffer, None if self._landing_bytes else buffer))
        blocks = self._run(parts) if len(parts) > 1 else self._blocks(parts[0])
        for part in parts:
            part.future.set_running_or_notify_cancel()  # a cancelled future would free a buffer that is being filled
        return ReadRequest(parts, priority, blocks)

    def _enqueue(self, requests: list[ReadRequest]) -> list[Future[int]]:
        if not self._queue.put(requests):
            raise StoreError(f"engine {self.name}: closed")
        futures = [part.future for request in requests for part in request.parts]
        with self._lock:
            self.requests += len(futures)
        return futures

    def _check_buffer(self, buffer: np.ndarray) -> None:
        known = self._checked.get(id(buffer))  # slots come again and again
        if known is not None and known() is buffer:
            return
        form = buffer.__array_interface__
        address, read_only = form["data"]
        if form["typestr"] != "|u1" or len(form["shape"]) != 1 or form["strides"] is not None or read_only:
            raise StoreError(
                f"engine {self.name}: the buffer must be a writable, contiguous, one-dimensional uint8 array"
            )
        if buffer.nbytes < self.buffer_bytes or address % PAGE:
            raise StoreError(
                f"engine {self.name}: the buffer must hold {self.buffer_bytes} bytes from a {PAGE} boundary"
            )
        if len(self._checked) >= MOST_CHECKED:
            self._checked.clear()
        self._checked[id(buffer)] = weakref.ref(buffer)

    def _blocks(self, part: Part) -> deque[Block]:
        if self._whole and not self.block_bytes:  # one call, on the way of every read: no more is done than must be
            ((offset, nbytes, dest),) = self.pack.segments(part.key)
            part.nbytes = align_up(nbytes) if self.past_cache else nbytes
            return deque((Block(offset, (Piece(part, dest, part.nbytes),)),))
        blocks: deque[Block] = deque()
        for offset, nbytes, dest in self._reads(part.key):
            part.nbytes += nbytes
            step = self.block_bytes or nbytes
            for at in range(0, nbytes, step):
                blocks.append(Block(offset + at, (Piece(part, dest + at, min(step, nbytes - at)),)))
        return blocks

    def _run(self, parts: list[Part]) -> deque[Block]:
        pieces: list[Piece] = []
        start = end = self.pack.segments(parts[0].key)[0].offset
        for part in parts:
            (segment,) = self.pack.segments(part.key)
            part.nbytes = align_up(segment.nbytes)  # every buffer has room for the rest of the last page
            if segment.offset < end:
                raise StoreError(f"{self.pack.where(part.key)}: a run must ascend on storage")
            if segment.offset > end:
                pieces.append(Piece(None, 0, segment.offset - end))
            pieces.append(Piece(part, 0, part.nbytes))
            end = segment.offset + part.nbytes
        gaps = [piece.nbytes for piece in pieces if piece.part is None]
        if len(parts) + sum(-(-gap // SCRATCH) for gap in gaps) > MOST_BUFFERS:
            raise StoreError(f"engine {self.name}: a run of {len(parts)} with gaps of {sum(gaps)} bytes is too long")
        if gaps:
            with self._lock:
                self._scratch = aligned_buffer(SCRATCH) if self._scratch is None else self._scratch
        return deque([Block(start, tuple(pieces))])

    def _transfer(self, request: ReadRequest, block: Block) -> Transfer:
        views: list[np.ndarray] = []
        for part, start, nbytes in block.pieces:
            if part is not None:
                assert part.target is not None
                views.append(part.target[start : start + nbytes])
                continue
            assert self._scratch is not None
            whole, rest = divmod(nbytes, SCRATCH)
            views += [self._scratch] * whole + [self._scratch[:rest]] * bool(rest)
        return Transfer(request, block, views, PAGE if self.past_cache else 1)

    def _outcome(self, transfer: Transfer, read: Callable[[], int]) -> int:
        """Bytes that one read call brought, counted; ``ReadFailed`` for an error code. Faults are injected here."""
        try:
            count = self.inject(transfer.views, transfer.at, read) if self.inject else read()
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, "")
            raise ReadFailed(f"read at {transfer.at} failed ({reason} {error.strerror})") from error
        with self._lock:
            self.bytes_read += count
        return count

    def _settle(self, request: ReadRequest, error: Exception | None) -> None:
        """One block of ``request`` is read or failed; the last one delivers its experts, a run's on several threads."""
        if self._queue.settle(request, error):
            for part in request.parts[1:]:
                try:
                    self._workers.submit(self._deliver, request, part)
                except RuntimeError:  # the engine is closing and takes no more tasks
                    self._deliver(request, part)
            self._deliver(request, request.parts[0])

    def _deliver(self, request: ReadRequest, part: Part) -> None:
        error = request.error
        try:
            if error is None:
                self._put_in_place(part)
            elif isinstance(error, ReadFailed):
                raise StoreError(f"{self.pack.where(part.key)}: {error}") from error
        except Exception as problem:  # whatever it is, somebody waits for the future
            error = problem
        self._queue.release(part)
        if error is not None:
            part.future.set_exception(error)
        else:
            part.future.set_result(part.nbytes)

    def _put_in_place(self, part: Part) -> None:
        if self.coded:
            return  # its hash is that of what it decodes to
        if self._decodes:
            self.pack.decode(part.key, part.target, part.buffer)
            return
        if self._landing_bytes:
            assert part.target is not None
            for segment, read in zip(self.pack.segments(part.key), self._reads(part.key), strict=True):
                at = read.dest + segment.offset - read.offset
                part.buffer[segment.dest : segment.dest + segment.nbytes] = part.target[at : at + segment.nbytes]
        for start, end in self._gaps:
            part.buffer[start:end] = 0
        self.pack.check(part.key, part.buffer)

    @abstractmethod
    def close(self) -> None:
        """Finish what is being read, fail what is queued, and release threads and files; safe to call twice."""
