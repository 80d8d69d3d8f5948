"""The measuring clock: a copy starts when its own read has landed, fails with it, and waits for no sibling."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from moebench.store.engines import StoreError
from moebench.timeline.base import DEMAND, PREFETCH
from moebench.timeline.wall import WallTimeline


class ByHand:
    """An engine whose reads end when the test says so."""

    bytes_read = calls = staging_bytes = 0
    coded = False

    def __init__(self) -> None:
        self.pack = SimpleNamespace(expert_bytes=8, read_bytes=lambda key: 8)
        self.reads: dict[int, tuple[Future, np.ndarray]] = {}

    def submit(self, key, buffer, priority):
        future: Future = Future()
        self.reads[key] = future, buffer
        return future

    def submit_all(self, keys, buffers, priority):
        return [self.submit(key, buffer, priority) for key, buffer in zip(keys, buffers, strict=True)]

    def land(self, key):
        future, buffer = self.reads[key]
        buffer[:] = key
        future.set_result(8)

    def cancel(self, key):
        self.reads[key][0].set_exception(StoreError("cancelled"))
        return True

    def close(self):
        pass


@pytest.fixture
def clock():
    arenas = {name: np.zeros((4, 8), np.uint8) for name in ("device", "host")}
    timeline = WallTimeline(ByHand(), lambda tier, slot: arenas[tier][slot])
    timeline.arenas = arenas
    yield timeline
    timeline.close()


def both(clock, priority=DEMAND):
    reads = clock.read([5, 6], [0, 1], "host", priority)
    return reads, [
        clock.copy(k, ("host", i), ("device", i), r) for i, (k, r) in enumerate(zip((5, 6), reads, strict=True))
    ]


def test_a_copy_waits_for_no_sibling(clock):
    _, (first, second) = both(clock)
    clock.engine.land(6)
    clock.wait(second)  # would never return if copies went in order
    assert (clock.arenas["device"][1] == 6).all()
    assert not clock.is_ready(first)
    clock.engine.land(5)
    clock.wait(first)
    assert (clock.arenas["device"][0] == 5).all()


def test_a_failed_read_fails_its_copy_and_no_other(clock):
    _, (first, second) = both(clock)
    clock.engine.reads[5][0].set_exception(StoreError("gone"))
    clock.engine.land(6)
    clock.wait(second)
    with pytest.raises(StoreError, match="gone"):
        clock.wait(first)


def test_a_cancelled_read_takes_its_copy_along(clock):
    (read, _), (first, second) = both(clock, PREFETCH)
    assert clock.cancel(read, first)
    assert clock.is_ready(first)
    clock.engine.land(6)
    clock.wait(second)
    assert not clock.arenas["device"][0].any()
