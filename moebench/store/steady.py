"""What a disk gives through a read engine with a steady number of experts on their way: throughput and latency.

Each expert that comes is followed by another one at once, in the thread that brought it, so that the disk never waits
for a caller. Knows packs and engines; knows no model, no run and what is a good result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from moebench.store.block_queue import DEMAND
from moebench.store.engines import CUTS, DEPTH, StoreError, open_engine
from moebench.store.pages import aligned_buffer, drop_page_cache
from moebench.units import GB


@dataclass(frozen=True)
class Setting:
    """A read engine and how many experts it reads at a time."""

    engine: str
    depth: int


@dataclass
class Passes:
    """What passes over a pack gave: GB/s of each, and seconds from the demand of each expert to its checked bytes."""

    gb_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    @property
    def median_gb_s(self) -> float:
        """The middle pass."""
        return float(np.median(self.gb_s))

    @property
    def spread(self) -> float:
        """Fastest less slowest pass, as a share of the middle one."""
        return (max(self.gb_s) - min(self.gb_s)) / self.median_gb_s

    def latency_ms(self, share: float) -> float:
        """Nearest-rank percentile of the latencies."""
        ordered = sorted(self.latency_s)
        return ordered[max(0, int(np.ceil(share * len(ordered))) - 1)] * 1e3


class Flow:
    """One pass: ``keys`` in order, ``depth`` of them on their way until ``seconds`` are over or none are left."""

    def __init__(self, engine: Any, keys: Iterable[int], buffers: Sequence[np.ndarray], seconds: float) -> None:
        self.engine, self.buffers, self.seconds = engine, buffers, seconds
        self.latency_s: list[float] = []
        self._keys, self._lock, self._idle = iter(keys), threading.Lock(), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._started = self._ended = 0.0

    def run(self) -> float:
        """GB/s of experts that came; raises the error of the first that did not."""
        self._started = time.perf_counter()
        for buffer in self.buffers:
            self._follow(buffer)
        for _ in self.buffers:
            self._idle.acquire()
        if self._error is not None:
            raise self._error
        return len(self.latency_s) * self.engine.pack.mean_stored_bytes / (self._ended - self._started) / GB

    def _follow(self, buffer: np.ndarray) -> None:
        """Read the next expert into ``buffer``, and go on when it has come, or let the buffer rest."""
        while True:
            asked = time.perf_counter()
            with self._lock:
                over = self._error is not None or asked - self._started > self.seconds
                key = None if over else next(self._keys, None)
            if key is None:
                self._idle.release()
                return
            try:
                future = self.engine.submit(key, buffer, DEMAND)
            except BaseException as error:  # in a reader's thread nobody else would hear of it
                self._error = error
                continue
            if not future.done():  # one that has come already is not followed from within itself
                future.add_done_callback(partial(self._go_on, buffer, asked))
                return
            self._came(asked, future)

    def _go_on(self, buffer: np.ndarray, asked: float, done: Future[int]) -> None:
        self._came(asked, done)
        self._follow(buffer)

    def _came(self, asked: float, done: Future[int]) -> None:
        now = time.perf_counter()
        with self._lock:
            self._error = self._error or done.exception()
            self.latency_s.append(now - asked)
            self._ended = max(self._ended, now)


def measure(
    pack: Any, settings: Sequence[Setting], seconds: float, passes: int = 3, tick: Callable[[], None] = lambda: None
) -> tuple[dict[Setting, Passes], dict[str, str]]:
    """All settings in turn, ``passes`` times in another order, ``seconds`` for each pass; and by engine why it could
    not be measured.

    What reads through the page cache finds it empty, and no expert twice.
    """
    found = {setting: Passes() for setting in settings}
    refused: dict[str, str] = {}
    draw = np.random.default_rng(0)
    memory = [aligned_buffer(max(pack.slot_bytes, pack.landing_bytes)) for _ in range(max(s.depth for s in settings))]
    for buffer in memory:
        buffer[:] = 1  # pages are there before the clock runs
    for _ in range(passes):
        for at in draw.permutation(len(settings)).tolist():
            setting = settings[at]
            if setting.engine not in refused:
                try:
                    _one(pack, setting, memory[: setting.depth], seconds, draw, found[setting])
                except StoreError as error:
                    refused[setting.engine] = str(error)
            tick()
    return {setting: got for setting, got in found.items() if setting.engine not in refused}, refused


def _one(
    pack: Any, setting: Setting, buffers: list[np.ndarray], seconds: float, draw: np.random.Generator, into: Passes
) -> None:
    name, options = setting.engine, {DEPTH[setting.engine]: setting.depth}
    keys: Iterable[int] = draw.permutation(pack.keys).tolist()
    if name in ("mmap", "pread"):
        dropped, why = drop_page_cache(pack.file_path)
        if not dropped:
            raise StoreError(f"{why}: what it reads could come from memory")
    else:
        keys = cycle(keys)
    if name in CUTS:
        options["block_bytes"] = 0
    with open_engine(name, pack, **options) as engine:
        flow = Flow(engine, keys, buffers, seconds)
        into.gb_s.append(flow.run())
        into.latency_s += flow.latency_s
