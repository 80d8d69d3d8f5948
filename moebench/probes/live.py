"""A model that computes, pass by pass: what its layers take without their experts, and a pass beside its layers.

All experts are in memory and nobody decides anything. Knows a backend and a pack; knows no system.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from moebench.probes.samples import Samples
from moebench.step import DECODE, PREFILL, Routing, Step
from moebench.store.block_queue import PREFETCH as PREFETCHED
from moebench.store.engines import ReadEngine
from moebench.store.pages import aligned_buffer

PASSES = 5  # measured on one growing context before it is built anew
PIECE = 32  # tokens of a pass that builds a context


class Resident:
    """Serves experts from memory and notes when a layer asks and when it has all that it asked for."""

    def __init__(self, pack: Any) -> None:
        self.pack = pack
        self.buffers = [aligned_buffer(pack.slot_bytes) for _ in range(pack.keys)]
        for key, buffer in enumerate(self.buffers):
            pack.read(key, buffer)
        self.valid = np.ones(1, bool)
        self.marks: list[tuple[float, float]] = []  # of each layer: asks, has computed its last expert

    def serve(self, layer: int, hidden: Any, native: Routing) -> tuple[Routing, Iterator[tuple[int, np.ndarray]]]:
        """The native routing and its experts."""
        return native, self._experts(layer * self.pack.experts, native, time.perf_counter())

    def _experts(self, base: int, native: Routing, asked: float) -> Iterator[tuple[int, np.ndarray]]:
        for expert in native.demand(self.valid):
            yield expert, self.buffers[base + expert]
        self.marks.append((asked, time.perf_counter()))


class Passes:
    """Runs passes of a backend over random tokens."""

    def __init__(self, backend: Any, pack: Any, vocabulary: int) -> None:
        self.backend, self.server, self.vocabulary = backend, Resident(pack), vocabulary
        self._generator = np.random.default_rng(0)

    def sample(self, context: int, rows: int, seconds: float) -> list[tuple[float, float]]:
        """(microseconds of a layer without experts, of the pass beside its layers) of passes of ``rows`` tokens that
        begin with about ``context`` tokens cached.
        """
        found: list[tuple[float, float]] = []
        until = time.perf_counter() + seconds
        while not found or time.perf_counter() < until:
            self.backend.reset(1)
            past = 0
            while past < context:
                past += self._forward(past, min(PIECE, context - past), PREFILL)
            for _ in range(PASSES):
                begun = time.perf_counter()
                past += self._forward(past, rows, DECODE if rows == 1 else PREFILL)
                found.append(self._parts(begun, time.perf_counter()))
        return found

    def speed(self, context: int, seconds: float) -> float:
        """Passes of one row a second, from about ``context`` tokens cached on."""
        self.backend.reset(1)
        past, passes, begun = self._forward(0, context, PREFILL), 0, time.perf_counter()
        while not passes or time.perf_counter() < begun + seconds:
            past += self._forward(past, 1, DECODE)
            passes += 1
        return passes / (time.perf_counter() - begun)

    def beside(self, engine: ReadEngine, count: int, context: int, seconds: float) -> Samples:
        """Microseconds that a pass of one row takes longer for each of ``count`` reads that were begun before it, from
        pairs of passes with and without.
        """
        found: list[float] = []
        pack, past = engine.pack, 0
        buffers = [aligned_buffer(pack.slot_bytes) for _ in range(count)]
        until = time.perf_counter() + seconds
        while len(found) < PASSES or time.perf_counter() < until:
            if past < context or past > 2 * context + PASSES:  # the context stays about as long
                self.backend.reset(1)
                past = self._forward(0, context, PREFILL)
            took = []
            for number in (count, 0):
                keys = self._generator.choice(pack.keys, number, replace=False).tolist()
                futures = engine.submit_all(keys, buffers[: len(keys)], PREFETCHED)
                begun = time.perf_counter()
                past += self._forward(past, 1, DECODE)
                took.append(time.perf_counter() - begun)
                for future in futures:
                    future.result()
            found.append(max(0.0, took[0] - took[1]) / count * 1e6)
        return Samples(tuple(found))

    def _forward(self, past: int, width: int, phase: int) -> int:
        """One pass and the choice of the next token; returns ``width``."""
        tokens = self._generator.integers(0, self.vocabulary, (1, width))
        position = np.arange(past, past + width, dtype=np.int32)
        step = Step(past, phase, np.zeros(width, np.int32), position, np.ones(width, bool), 1)
        self.server.valid, self.server.marks = step.valid, []
        self.backend.forward(step, tokens, self.server).argmax(-1)
        return width

    def _parts(self, begun: float, ended: float) -> tuple[float, float]:
        marks = self.server.marks
        gaps = [asks - before for (_, before), (asks, _) in pairwise(marks)]
        layer = float(np.median(gaps))
        outer = (
            marks[0][0] - begun + ended - marks[-1][1]
        )  # before the first layer asks and after the last: a layer too
        return layer * 1e6, max(0.0, outer - layer) * 1e6
