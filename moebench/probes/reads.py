"""Reads as a run issues them: through moebench's own engines, each expert hashed, a demand at a time.

A point is (bytes of an expert, reads at a time). Knows engines and packs; knows no policy.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import numpy as np

from moebench.probes.file import ProbeFile
from moebench.probes.samples import Samples
from moebench.store.block_queue import DEMAND
from moebench.store.engines import ReadEngine, open_engine
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer
from moebench.store.steady import Flow
from moebench.units import GB, MIB

Point = tuple[int, int]
Work = Callable[[int, int, float], float]  # (bytes, how many at a time, seconds) -> GB/s, or microseconds
WARM = 16 * MIB  # of the page cache
PASSES = 5  # over all points in turn, so that what drifts hits all alike


def grid(points: Sequence[Point], work: Work, seconds: float) -> dict[Point, Samples]:
    """What ``work`` returns at each point: one sample a pass, ``seconds`` for all."""
    found: dict[Point, list[float]] = {point: [] for point in points}
    each = seconds / (PASSES * len(points))
    for _ in range(PASSES):
        for (size, depth), rates in found.items():
            rates.append(work(size, depth, each))
    return {point: Samples(tuple(rates)) for point, rates in found.items()}


class Reader:
    """Reads a file by one engine."""

    def __init__(self, file: ProbeFile, engine: str) -> None:
        self.file, self.engine = file, engine
        self._draw = random.Random(0)
        self._buffers: dict[Point, list[np.ndarray]] = {}

    def cold(self, size: int, depth: int, seconds: float) -> float:
        """Demands of ``depth`` experts, each begun when the one before it is complete; the page cache emptied before
        each where the engine uses one.
        """
        pack, spent, nbytes = self.file.pack(size), 0.0, 0
        until = time.perf_counter() + seconds
        engine = open_engine(self.engine, pack)
        try:
            while not nbytes or time.perf_counter() < until:
                if not getattr(engine, "past_cache", False):
                    engine.close()  # what is mapped is not dropped
                    self.file.drop()
                    engine = open_engine(self.engine, pack)
                spent += self._demand(engine, pack, self._draw.sample(range(pack.keys), min(depth, pack.keys)))
                nbytes += min(depth, pack.keys) * size
        finally:
            engine.close()
        return nbytes / spent / GB

    def warm(self, size: int, depth: int, seconds: float) -> float:
        """Demands of experts that the page cache holds, out of more of them than a core's own caches do."""
        pack, spent, nbytes = self.file.pack(size), 0.0, 0
        depth = min(depth, pack.keys)
        cached = range(min(pack.keys, max(depth, WARM // size)))
        with open_engine(self.engine, pack) as engine:
            for at in range(0, len(cached), depth):
                self._demand(engine, pack, cached[at : at + depth])
            until = time.perf_counter() + seconds
            while not nbytes or time.perf_counter() < until:
                spent += self._demand(engine, pack, self._draw.sample(cached, depth))
                nbytes += depth * size
        return nbytes / spent / GB

    def sequential(self, size: int, depth: int, seconds: float) -> float:
        """Neighbours in their order, from the start of the file on."""
        pack, spent, nbytes, at = self.file.pack(size), 0.0, 0, 0
        until = time.perf_counter() + seconds
        with open_engine(self.engine, pack) as engine:
            while not nbytes or time.perf_counter() < until:
                keys = [(at + i) % pack.keys for i in range(min(depth, pack.keys))]
                spent, nbytes, at = spent + self._demand(engine, pack, keys), nbytes + len(keys) * size, at + len(keys)
        return nbytes / spent / GB

    def ahead(self, size: int, depth: int, seconds: float) -> float:
        """Whenever one is complete the next is begun, so that ``depth`` are always under way."""
        pack = self.file.pack(size)
        with open_engine(self.engine, pack) as engine:
            return Flow(engine, self._endless(pack), self._room(pack.slot_bytes, depth), seconds).run()

    def flow(self, size: int, depth: int, wanted: Callable[[], bool]) -> float:
        """The same while it is ``wanted``."""
        pack = self.file.pack(size)
        with open_engine(self.engine, pack) as engine:
            keys = takewhile(lambda _: wanted(), self._endless(pack))
            return Flow(engine, keys, self._room(pack.slot_bytes, depth), math.inf).run()

    def _endless(self, pack: Pack) -> Iterator[int]:
        while True:
            yield self._draw.randrange(pack.keys)

    def _demand(self, engine: ReadEngine, pack: Pack, keys: Sequence[int]) -> float:
        """Seconds from the first submission until all have arrived."""
        buffers = self._room(pack.slot_bytes, len(keys))
        begun = time.perf_counter()
        for future in engine.submit_all(keys, buffers, DEMAND):
            future.result()
        return time.perf_counter() - begun

    def _room(self, nbytes: int, count: int) -> list[np.ndarray]:
        """Buffers whose pages are there; those of the last point only are kept."""
        if (nbytes, count) not in self._buffers:
            arena = aligned_buffer(nbytes * count)
            arena[:] = 0
            self._buffers = {(nbytes, count): [*arena.reshape(count, nbytes)]}
        return self._buffers[nbytes, count]
