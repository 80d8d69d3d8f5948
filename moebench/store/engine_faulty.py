"""The ``faulty`` engine: another engine with seeded faults, to show that each ends in right bytes or a clear error.

Faults are drawn by file offset and attempt, not by thread timing, so a seed gives the same plan on every run.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import xxhash

from moebench.store.engine_queued import QueuedEngine
from moebench.store.engines import ENGINES, ReadEngine, StoreError, open_engine
from moebench.store.pack import Pack


class FaultyEngine(ReadEngine):
    """Wraps engine ``inner`` (its options follow by name).

    ``eio``, ``short_read`` and ``bit_flip`` are rates per read call, 0 to 1: it fails, returns half, or has one wrong
    bit. ``delay_s`` delays read calls, all of them or the rate ``spike`` of them. ``reorder`` holds up to that many
    finished experts and hands them out shuffled. ``keys`` restricts the faults of read calls to these experts.
    """

    def __init__(
        self,
        pack: Pack,
        *,
        inner: str = "pread",
        seed: int = 0,
        eio: float = 0.0,
        short_read: float = 0.0,
        bit_flip: float = 0.0,
        delay_s: float = 0.0,
        spike: float = 1.0,
        reorder: int = 0,
        keys: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(pack)
        if not all(0 <= rate <= 1 for rate in (eio, short_read, bit_flip, spike)) or delay_s < 0 or reorder < 0:
            raise StoreError(
                "engine faulty: eio, short_read, bit_flip, spike are rates from 0 to 1, delay_s and reorder from 0 up"
            )
        self._rates = {"eio": eio, "short_read": short_read, "bit_flip": bit_flip, "spike": spike if delay_s else 0.0}
        self._seed, self._delay_s, self._reorder = seed, delay_s, reorder
        self._ranges = None if keys is None else [(s.offset, s.nbytes) for key in keys for s in pack.segments(key)]
        self._lock, self._attempts, self.injected = threading.Lock(), Counter[int](), Counter[str]()
        self._held: list[tuple[Future[int], Future[int]]] = []
        self._outstanding, self._shuffle = 0, random.Random(seed)
        engine = open_engine(inner, pack, **options)
        if not isinstance(engine, QueuedEngine):
            engine.close()
            valid = ", ".join(name for name in ENGINES if name != "faulty")
            raise StoreError(f"engine faulty: inner {inner!r} is not one of {valid}")
        self._inner = engine
        engine.inject = self._fault

    def submit(self, key: int, buffer: np.ndarray, priority: int) -> Future[int]:
        """Start reading expert ``key`` through the inner engine."""
        return self._hand_in(1, lambda: [self._inner.submit(key, buffer, priority)])[0]

    def submit_run(self, keys: Sequence[int], buffers: Sequence[np.ndarray], priority: int) -> list[Future[int]]:
        """Start reading neighbours through the inner engine."""
        return self._hand_in(len(keys), lambda: self._inner.submit_run(keys, buffers, priority))

    def promote(self, key: int) -> None:
        """Raise a queued read of ``key`` to demand priority."""
        self._inner.promote(key)

    def cancel(self, key: int) -> bool:
        """Take back a queued prefetch of ``key``."""
        return self._inner.cancel(key)

    def close(self) -> None:
        """Close the inner engine; every future handed out is done afterwards."""
        self._inner.close()

    @property
    def staging_bytes(self) -> int:
        """The inner engine's."""
        return self._inner.staging_bytes

    @property
    def requests(self) -> int:  # type: ignore[override]
        """The inner engine's count."""
        return self._inner.requests

    @property
    def calls(self) -> int:  # type: ignore[override]
        """The inner engine's count."""
        return self._inner.calls

    @property
    def coded(self) -> bool:  # type: ignore[override]
        """Whether the inner engine leaves experts as they are stored."""
        return self._inner.coded

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """The inner engine's count."""
        return self._inner.bytes_read

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the inner engine or the shuffled hand-out is inconsistent."""
        self._inner.check_integrity()
        with self._lock:
            assert len(self._held) <= self._outstanding, "more experts held than outstanding"

    def _hand_in(self, count: int, submit: Callable[[], list[Future[int]]]) -> list[Future[int]]:
        """Submit ``count`` experts and wrap their futures."""
        with self._lock:
            self._outstanding += count
        try:
            inner = submit()
        except BaseException:
            self._hand_out([], gone=count)
            raise
        outer: list[Future[int]] = [Future() for _ in inner]
        for done, future in zip(inner, outer, strict=True):
            future.set_running_or_notify_cancel()
            done.add_done_callback(partial(self._finished, future))
        return outer

    def _finished(self, outer: Future[int], done: Future[int]) -> None:
        self._hand_out([(done, outer)])

    def _hand_out(self, finished: list[tuple[Future[int], Future[int]]], gone: int = 0) -> None:
        """Hold ``finished`` until enough are held or nothing else can come, then release in random order."""
        with self._lock:
            self._outstanding -= gone
            self._held += finished
            if len(self._held) <= self._reorder and len(self._held) < self._outstanding:
                return
            batch, self._held = self._held, []
            self._outstanding -= len(batch)
            if self._reorder:
                self._shuffle.shuffle(batch)
                self.injected["reorder"] += len(batch) > 1
        for done, outer in batch:
            if (error := done.exception()) is not None:
                outer.set_exception(error)
            else:
                outer.set_result(done.result())

    def _fault(self, views: list[np.ndarray], offset: int, read: Callable[[], int]) -> int:
        if not self._applies(offset, sum(map(len, views))):
            return read()
        with self._lock:
            self._attempts[offset] += 1
            drawn = {kind for kind in self._rates if self._draw(kind, offset) < self._rates[kind]}
            self.injected.update(drawn)
        if "spike" in drawn:
            time.sleep(self._delay_s)
        if "eio" in drawn:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = read()
        if "bit_flip" in drawn and count:
            at = int(self._draw("where", offset) * count)
            for view in views:
                if at < len(view):
                    view[at] ^= 1
                    break
                at -= len(view)
        return count // 2 if "short_read" in drawn else count

    def _applies(self, offset: int, nbytes: int) -> bool:
        if self._ranges is None:
            return True
        return any(start < offset + nbytes and offset < start + length for start, length in self._ranges)

    def _draw(self, kind: str, offset: int) -> float:
        """A number in [0, 1) for this kind of fault at this offset and attempt."""
        return xxhash.xxh3_64_intdigest(f"{self._seed}:{kind}:{offset}:{self._attempts[offset]}".encode()) / 2**64
