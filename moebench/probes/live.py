"""A model that computes, pass by pass: what its layers take without their experts, and a pass beside its layers.

All experts are in memory and nobody decides anything. Knows a backend and a pack; knows no system.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moebench.probes.samples import Samples
from moebench.step import DECODE, PREFILL, Routing, Step
from moebench.store.block_queue import DEMAND
from moebench.store.block_queue import PREFETCH as PREFETCHED
from moebench.store.engines import ReadEngine
from moebench.store.pages import aligned_buffer

PASSES = 5  # measured on one growing context before it is built anew
PIECE = 32  # tokens of a pass that builds a context


class Resident:
    """Serves experts from memory and notes when a layer asks, when it has computed all that it asked for, and on how
    many rows each of them; ``hold(number, count)``, if there is one, is waited for before each of ``count`` experts.
    """

    def __init__(self, pack: Any) -> None:
        self.pack = pack
        self.buffers = [aligned_buffer(pack.slot_bytes) for _ in range(pack.keys)]
        for key, buffer in enumerate(self.buffers):
            pack.read(key, buffer)
        self.valid = np.ones(1, bool)
        self.hold: Callable[[int, int], None] | None = None
        self.waited_s = 0.0
        self.clear(self.valid)

    def clear(self, valid: np.ndarray) -> None:
        """A pass begins."""
        self.valid, self.waited_s = valid, 0.0
        self.marks: list[tuple[float, float, list[int]]] = []  # of each layer: asks, is through, rows of each expert

    def serve(self, layer: int, hidden: Any, native: Routing) -> tuple[Routing, Iterator[tuple[int, np.ndarray]]]:
        """The native routing and its experts."""
        return native, self._experts(layer * self.pack.experts, native, time.perf_counter())

    def _experts(self, base: int, native: Routing, asked: float) -> Iterator[tuple[int, np.ndarray]]:
        demand = native.demand(self.valid)
        rows = np.bincount(native.experts[self.valid].reshape(-1), minlength=self.pack.experts)[demand].tolist()
        for number, expert in enumerate(demand):
            if self.hold is not None:
                begun = time.perf_counter()
                self.hold(number, len(demand))
                self.waited_s += time.perf_counter() - begun
            yield expert, self.buffers[base + expert]
        self.marks.append((asked, time.perf_counter(), rows))


class Parts(NamedTuple):
    """Microseconds of a pass: of a layer without its experts, of the pass beside its layers, and what each expert takes
    beyond its kernels, such as bringing rows to it and back.
    """

    layer: float
    beside: float
    each: float


class Passes:
    """Runs passes of a backend over random tokens. ``expert_s(rows)`` is what an expert's kernels are known to take."""

    def __init__(
        self, backend: Any, pack: Any, vocabulary: int, expert_s: Callable[[int], float] = lambda rows: 0.0
    ) -> None:
        self.backend, self.server, self.vocabulary, self.expert_s = backend, Resident(pack), vocabulary, expert_s
        self._generator = np.random.default_rng(0)

    def sample(self, context: int, rows: int, seconds: float) -> list[Parts]:
        """Of passes of ``rows`` tokens that begin with about ``context`` tokens cached."""
        found: list[Parts] = []
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

    def first(self, rows: int, seconds: float) -> list[Parts]:
        """Of passes of ``rows`` tokens that each begin a sequence."""
        found: list[Parts] = []
        until = time.perf_counter() + seconds
        while not found or time.perf_counter() < until:
            self.backend.reset(1)
            begun = time.perf_counter()
            self._forward(0, rows, PREFILL)
            found.append(self._parts(begun, time.perf_counter()))
        return found

    def adapted(self, install: Callable[[], Any], count: int, context: int, seconds: float) -> Samples:
        """Microseconds that each of ``count`` adapters adds to a pass of one row: of pairs of passes without and with
        those that ``install`` puts in place, until it is told to ``remove`` them.
        """
        found: list[float] = []
        past, until = 0, time.perf_counter() + seconds
        while len(found) < PASSES or time.perf_counter() < until:
            past = self._about(past, context)
            took = []
            for serving in (False, True):
                installed = install()
                if not serving:
                    installed.remove()  # what putting them in place does to caches is in both
                begun = time.perf_counter()
                past += self._forward(past, 1, DECODE)
                took.append(time.perf_counter() - begun)
                if serving:
                    installed.remove()
            found.append(max(0.0, took[1] - took[0]) / count * 1e6)
        return Samples(tuple(found))

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
            past = self._about(past, context)
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

    def waits(self, engine: ReadEngine, context: int, seconds: float) -> tuple[Samples, Samples]:
        """Microseconds that a pass of one row takes longer, waits left out, for each layer that waits for a read before
        it computes, and for each further read that such a layer waits for: of passes without, with one read in each
        layer, and with as many as it has experts, begun together and waited for one by one.
        """
        pack, past = engine.pack, 0
        buffers = [aligned_buffer(pack.slot_bytes) for _ in range(self.server.pack.experts)]
        futures: list[Any] = []

        def read(count: int) -> None:
            keys = self._generator.choice(pack.keys, count, replace=False).tolist()
            futures[:] = engine.submit_all(keys, buffers[:count], DEMAND)

        def once(number: int, count: int) -> None:
            if number == 0:
                read(1)
                futures[0].result()

        def each(number: int, count: int) -> None:
            if number == 0:
                read(count)
            futures[number].result()

        first: list[float] = []
        more: list[float] = []
        until = time.perf_counter() + seconds
        while len(first) < PASSES or time.perf_counter() < until:
            past = self._about(past, context)
            took = []
            for self.server.hold in (None, once, each):
                begun = time.perf_counter()
                past += self._forward(past, 1, DECODE)
                took.append(time.perf_counter() - begun - self.server.waited_s)
            self.server.hold = None
            layers = len(self.server.marks)
            others = sum(len(rows) - 1 for _, _, rows in self.server.marks)
            first.append(max(0.0, took[1] - took[0]) / layers * 1e6)
            more.append(max(0.0, took[2] - took[1]) / max(1, others) * 1e6)
        return Samples(tuple(first)), Samples(tuple(more))

    def _about(self, past: int, context: int) -> int:
        """Tokens cached, after a context that has grown to twice its length was built anew."""
        if context <= past <= 2 * context + PASSES:
            return past
        self.backend.reset(1)
        return self._forward(0, context, PREFILL)

    def _forward(self, past: int, width: int, phase: int) -> int:
        """One pass and the choice of the next token; returns ``width``."""
        tokens = self._generator.integers(0, self.vocabulary, (1, width))
        position = np.arange(past, past + width, dtype=np.int32)
        step = Step(past, phase, np.zeros(width, np.int32), position, np.ones(width, bool), 1)
        self.server.clear(step.valid)
        self.backend.forward(step, tokens, self.server).argmax(-1)
        return width

    def _parts(self, begun: float, ended: float) -> Parts:
        marks = self.server.marks
        asked, through = np.array([(asks, done) for asks, done, _ in marks]).T
        layer = float(np.mean(asked[1:] - through[:-1]))
        outer = asked[0] - begun + ended - through[-1]  # one layer's is in it
        kernels = sum(sum(map(self.expert_s, rows)) for _, _, rows in marks)
        each = ((through - asked).sum() - kernels) / sum(len(rows) for _, _, rows in marks)
        return Parts(*(max(0.0, seconds) * 1e6 for seconds in (layer, outer - layer, each)))
