"""A read engine on an overlay, and beside it one thread that writes swaps while nobody waits for a read.

Knows reads, their priority and whose expert is on the move; decides nothing about who moves. An expert on the move is
read from the memory that it is written from, so that no read waits for a swap or meets half of one; a swap waits until
every read of its two experts that was begun earlier has ended.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from moebench.store.block_queue import DEMAND
from moebench.store.engines import ReadEngine, StoreError
from moebench.store.overlay import Overlay
from moebench.store.pages import aligned_buffer


class RelocatingEngine(ReadEngine):
    """Reads through ``inner``, an engine opened on ``overlay``; ``close`` removes the overlay.

    ``move`` starts a swap and ``landed`` says when it is done: one at a time, from the thread that submits reads.
    ``forwarded`` counts experts read from memory, ``pauses`` pieces that waited for reads, ``seconds`` is what writing
    took without those waits.
    """

    def __init__(self, inner: ReadEngine, overlay: Overlay) -> None:
        super().__init__(overlay)
        self.inner, self.overlay = inner, overlay
        self.forwarded = self.pauses = 0
        self.seconds = 0.0
        self._room = [aligned_buffer(overlay.slot_bytes) for _ in range(2)]
        self._moving: dict[int, np.ndarray] = {}
        self._reading: Counter[int] = Counter()  # reads under way, by key
        self._waited_for: Counter[int] = Counter()  # those of them that are demand
        self._changed, self._closed = threading.Condition(), False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="moebench-relocate")
        self._swap: Future[None] | None = None

    # --- reads -----------------------------------------------------------------------------------------------------

    def submit(self, key: int, buffer: np.ndarray, priority: int) -> Future[int]:
        """Start reading expert ``key`` from storage, or copy it from where it is written from."""
        if key in self._moving:
            return self._from_memory(key, buffer)
        return self._tracked([key], priority, lambda: [self.inner.submit(key, buffer, priority)])[0]

    def submit_run(self, keys: Sequence[int], buffers: Sequence[np.ndarray], priority: int) -> list[Future[int]]:
        """Start reading neighbours; those on the move come from memory, the others are still one run."""
        still = [(key, buffer) for key, buffer in zip(keys, buffers, strict=True) if key not in self._moving]
        rest = [key for key, _ in still]
        begun: list[Future[int]] = []
        if still:
            run = [buffer for _, buffer in still]
            begun = self._tracked(rest, priority, lambda: self.inner.submit_run(rest, run, priority))
        by_key = dict(zip(rest, begun, strict=True))
        return [by_key.get(k) or self._from_memory(k, b) for k, b in zip(keys, buffers, strict=True)]

    def promote(self, key: int) -> None:
        """Raise a queued read of ``key`` to demand priority."""
        with self._changed:
            if self._reading[key]:
                self._waited_for[key] = self._reading[key]
        self.inner.promote(key)

    def cancel(self, key: int) -> bool:
        """Take back a queued prefetch of ``key``."""
        return self.inner.cancel(key)

    def _from_memory(self, key: int, buffer: np.ndarray) -> Future[int]:
        size = self.overlay.expert_bytes
        np.copyto(buffer[:size], self._moving[key][:size])
        self.forwarded += 1
        future: Future[int] = Future()
        future.set_result(0)
        return future

    def _tracked(self, keys: list[int], priority: int, begin: Callable[[], list[Future[int]]]) -> list[Future[int]]:
        """Start reads that swaps know of from before they begin until they end."""
        with self._changed:
            self._reading.update(keys)
            if priority == DEMAND:
                self._waited_for.update(keys)
        try:
            futures = begin()
        except BaseException:
            for key in keys:
                self._ended(key)
            raise
        for key, future in zip(keys, futures, strict=True):
            future.add_done_callback(partial(self._ended, key))
        return futures

    def _ended(self, key: int, _: Future[int] | None = None) -> None:
        with self._changed:
            self._reading[key] -= 1
            if not self._reading[key]:
                del self._reading[key]
            if self._waited_for[key] > self._reading[key]:
                self._waited_for[key] -= 1
                if not self._waited_for[key]:
                    del self._waited_for[key]
            self._changed.notify_all()

    # --- swaps -----------------------------------------------------------------------------------------------------

    def move(self, a: int, b: int, bytes_a: np.ndarray, bytes_b: np.ndarray) -> None:
        """Start exchanging the places of two experts of one layer, given their bytes, which are copied."""
        if self._swap is not None:
            raise StoreError(f"{self.overlay.folder}: a swap is under way")
        size = self.overlay.expert_bytes
        for room, data in zip(self._room, (bytes_a, bytes_b), strict=True):
            np.copyto(room[:size], data[:size])
        self._moving = {a: self._room[0], b: self._room[1]}
        self._swap = self._writer.submit(self._write, a, b)

    def landed(self) -> bool:
        """Whether the swap is durable: then its experts are read from their new places from now on.

        Raises what stopped it.
        """
        if self._swap is None or not self._swap.done():
            return False
        self._swap.result()
        self.overlay.adopt()
        self._swap, self._moving = None, {}
        return True

    @property
    def written_bytes(self) -> int:
        """Bytes of experts that swaps wrote so far."""
        return self.overlay.written_bytes

    def _write(self, a: int, b: int) -> None:
        started, waited = time.perf_counter(), 0.0

        def pause() -> None:
            nonlocal waited
            before = time.perf_counter()
            self._pause(a, b)
            waited += time.perf_counter() - before

        try:
            self.overlay.swap(a, b, self._room[0], self._room[1], pause)
        except OSError as error:
            raise StoreError(f"{self.overlay.file_path}: moving experts {a} and {b}: {error.strerror}") from error
        finally:
            self.seconds += time.perf_counter() - started - waited

    def _pause(self, a: int, b: int) -> None:
        """Wait until nobody waits for a read, and nobody reads what is on the move."""

        def free() -> bool:
            return self._closed or not (self._waited_for or self._reading[a] or self._reading[b])

        with self._changed:
            self.pauses += not free()
            self._changed.wait_for(free)
            if self._closed:
                raise StoreError(f"{self.overlay.folder}: closed before experts {a} and {b} had changed places")

    # --- the rest --------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> int:  # type: ignore[override]
        """Experts submitted so far, those that came from memory too."""
        return self.inner.requests + self.forwarded

    @property
    def calls(self) -> int:  # type: ignore[override]
        """The inner engine's count."""
        return self.inner.calls

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """The inner engine's count."""
        return self.inner.bytes_read

    @property
    def staging_bytes(self) -> int:
        """The inner engine's, and the two experts of a swap."""
        return self.inner.staging_bytes + sum(room.nbytes for room in self._room)

    def close(self) -> None:
        """Give up a swap that is under way, at the end of its piece, stop the engine and remove the overlay."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.shutdown(wait=True, cancel_futures=True)
        self.inner.close()
        self.overlay.remove()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where reads, swaps and the map contradict each other."""
        self.overlay.check_integrity()
        with self._changed:
            assert all(n > 0 for n in self._reading.values()), "a read ended twice"
            assert self._waited_for <= self._reading, "more reads are waited for than are under way"
        assert bool(self._moving) == (self._swap is not None), "experts are on the move without a swap"
