"""Swaps beside reads: pieces wait for demand, experts on the move read right, stops reach the caller."""

from __future__ import annotations

import time
from concurrent.futures import Future

import numpy as np
import pytest
from read_fixtures import ALL, check_all, experts_of, make_packs

from moebench.store import overlay as module
from moebench.store.block_queue import DEMAND, PREFETCH
from moebench.store.engines import ReadEngine, StoreError, open_engine
from moebench.store.overlay import Overlay
from moebench.store.pages import aligned_buffer
from moebench.store.relocate import RelocatingEngine
from moebench.store.swap_journal import Disk
from moebench.units import PAGE


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return make_packs(tmp_path_factory)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(module, "WRITE_UNIT_BYTES", PAGE)  # several pieces an expert


class Held(ReadEngine):
    """An engine whose reads end when the test says so."""

    def __init__(self, overlay):
        super().__init__(overlay)
        self.begun, self.promoted = [], []

    def submit(self, key, buffer, priority):
        self.requests += 1
        self.begun.append((key, buffer, Future()))
        return self.begun[-1][2]

    def finish(self, key):
        for _, buffer, future in [entry for entry in self.begun if entry[0] == key]:
            try:
                self.pack.read(key, buffer)
            except StoreError as error:
                future.set_exception(error)
            else:
                future.set_result(self.pack.slot_bytes)
        self.begun = [entry for entry in self.begun if entry[0] != key]

    def promote(self, key):
        self.promoted.append(key)

    def close(self):
        pass

    @property
    def staging_bytes(self):
        return 0


@pytest.fixture
def held(packs, tmp_path):
    overlay = Overlay.create(packs["packed"], tmp_path)
    engine = RelocatingEngine(Held(overlay), overlay)
    yield engine
    engine.close()
    assert not overlay.folder.exists()


def settle(engine, timeout=20):
    engine._swap.exception(timeout)
    return engine.landed()


def until(condition):
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came about")


def test_pieces_wait_while_demand_is_pending_and_prefetch_does_not_hold_them_up(packs, held):
    data, buffers = experts_of(packs["packed"]), [aligned_buffer(held.pack.slot_bytes) for _ in range(12)]
    held.submit(4, buffers[4], PREFETCH)
    held.submit(5, buffers[5], DEMAND)
    held.move(0, 1, data[0], data[1])
    until(lambda: held.pauses)
    assert held.written_bytes == 0
    held.promote(4)
    held.inner.finish(5)
    assert not held.landed()
    assert held.written_bytes == 0  # what was promoted is demand
    held.inner.finish(4)
    assert settle(held)
    assert held.written_bytes == 2 * held.pack.expert_bytes
    assert held.seconds > 0
    check_all(held.overlay)
    held.check_integrity()


def test_a_read_that_was_begun_before_ends_with_right_bytes_and_later_ones_come_from_memory(packs, held):
    data, buffers = experts_of(packs["packed"]), [aligned_buffer(held.pack.slot_bytes) for _ in range(12)]
    early = held.submit(0, buffers[0], PREFETCH)
    held.move(0, 1, data[0], data[1])
    until(lambda: held.pauses)
    later = held.submit(1, buffers[1], DEMAND)
    assert later.result(0) == 0
    run = held.submit_run([0, 1, 2], [aligned_buffer(held.pack.slot_bytes), buffers[3], buffers[2]], DEMAND)
    assert [future.done() for future in run] == [True, True, False]
    assert held.forwarded == 3
    for key in (1, 3):
        np.testing.assert_array_equal(buffers[key], data[1])
    assert held.written_bytes == 0  # the early read of expert 0 is still under way
    held.inner.finish(0)
    held.inner.finish(2)
    assert early.result(0) == run[2].result(0) == held.pack.slot_bytes
    held.check_integrity()
    assert settle(held)
    again = held.submit(0, buffers[4], DEMAND)
    held.inner.finish(0)
    assert again.result(0)
    np.testing.assert_array_equal(buffers[4], data[0])
    assert held.overlay.place[:2].tolist() == [1, 0]


def test_what_stops_a_swap_reaches_the_caller_and_reads_stay_right(packs, held):
    data, buffer = experts_of(packs["packed"]), aligned_buffer(held.pack.slot_bytes)

    class Full(Disk):
        def write(self, fd, data, offset):
            raise OSError(28, "No space left on device")

    held.overlay.disk = Full()
    held.move(0, 1, data[0], data[1])
    with pytest.raises(StoreError, match=r"moving experts 0 and 1: No space left"):
        settle(held)
    assert held.submit(0, buffer, DEMAND).result(0) == 0
    np.testing.assert_array_equal(buffer, data[0])


def test_closing_gives_up_a_swap_and_removes_the_folder(packs, held):
    data, buffer = experts_of(packs["packed"]), aligned_buffer(held.pack.slot_bytes)
    held.submit(5, buffer, DEMAND)
    held.move(0, 1, data[0], data[1])
    until(lambda: held.pauses)
    held.close()
    assert held.written_bytes == 0
    assert not held.overlay.folder.exists()
    with pytest.raises(StoreError, match="closed before experts 0 and 1"):
        held._swap.result()


@pytest.mark.parametrize("name", ALL)
def test_every_engine_reads_right_bytes_while_experts_keep_changing_places(packs, tmp_path, name):
    pack = packs["packed"]
    data, overlay = experts_of(pack), Overlay.create(pack, tmp_path)
    buffers = [aligned_buffer(pack.slot_bytes) for _ in range(pack.keys)]
    rng = np.random.default_rng(0)
    with RelocatingEngine(open_engine(name, overlay), overlay) as engine:
        swaps, ends = 0, time.monotonic() + 60
        while swaps < 8:
            assert time.monotonic() < ends
            swaps += engine.landed()
            if engine._swap is None:
                layer, (i, j) = int(rng.integers(3)), rng.choice(4, 2, replace=False)
                a, b = layer * 4 + int(i), layer * 4 + int(j)
                engine.move(a, b, data[a], data[b])
            keys, priority = rng.permutation(pack.keys)[:6].tolist(), int(rng.integers(2))
            if rng.integers(2):
                keys.sort(key=lambda k: overlay.position([k])[0])
                futures = engine.submit_run(keys, [buffers[k] for k in keys], priority)
            else:
                futures = [engine.submit(k, buffers[k], priority) for k in keys]
            for key, future in zip(keys, futures, strict=True):
                future.result(20)
                np.testing.assert_array_equal(buffers[key][: pack.expert_bytes], data[key][: pack.expert_bytes])
            engine.check_integrity()
            engine.inner.check_integrity()
        if engine._swap is not None:
            assert settle(engine)
        check_all(overlay)
    assert not overlay.folder.exists()
