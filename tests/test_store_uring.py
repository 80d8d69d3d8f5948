"""The ring gives back what was read, in the order and with the bound that the engine promises; a kernel or a file
system without it is refused, and a ring that fails leaves nobody waiting."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_fixtures import dirty_buffers, make_packs, needs_uring

from moebench.store import engine_uring, uring
from moebench.store.block_queue import DEMAND, PREFETCH
from moebench.store.engine_uring import UringEngine
from moebench.store.engines import StoreError, open_engine
from moebench.units import PAGE


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return make_packs(tmp_path_factory)


@pytest.fixture
def pack(packs):
    return packs["packed"]


class Gate:
    """Lets reads into the ring one by one and writes down whose they are."""

    def __init__(self, engine):
        self.real, self.log = engine._push, []
        self.started, self.permits = threading.Semaphore(0), threading.Semaphore(0)
        engine._push = self

    def __call__(self, ring, transfer, name):
        self.log.append([part.key for part in transfer.request.parts])
        self.started.release()
        assert self.permits.acquire(timeout=20)
        self.real(ring, transfer, name)

    def open(self):
        self.permits.release(1000)


@needs_uring
@settings(max_examples=30)
@given(
    entries=st.sampled_from([1, 3, 8]),
    reads=st.lists(st.tuples(st.integers(0, 9000), st.lists(st.integers(1, 500), min_size=1, max_size=4)), max_size=40),
)
def test_the_ring_reads_what_pread_reads(tmp_path_factory, entries, reads):
    path = tmp_path_factory.getbasetemp() / "ring"
    data = np.random.default_rng(1).integers(0, 256, 8192, np.uint8).tobytes()
    path.write_bytes(data)
    ring, got, wanted = uring.Ring(entries), {}, {}
    fd = os.open(path, os.O_RDONLY)
    try:
        for name, (offset, sizes) in enumerate(reads):
            views = [np.full(size, 0xAA, np.uint8) for size in sizes]
            if name - len(got) == ring.entries:
                got.update(ring.enter())
            ring.readv(fd, engine_uring._addresses(views), offset, name)
            wanted[name] = views, data[offset : offset + sum(sizes)]
        while len(got) < len(reads):
            got.update(ring.enter())
    finally:
        ring.close()
        os.close(fd)
    for name, (views, expected) in wanted.items():
        assert got[name] == len(expected)
        assert np.concatenate(views).tobytes()[: len(expected)] == expected


@needs_uring
def test_error_codes_come_back_by_name(tmp_path):
    ring = uring.Ring(2)
    views = [np.zeros(10, np.uint8)]
    ring.readv(-1, engine_uring._addresses(views), 0, 5)
    ring.readv(os.open(tmp_path, os.O_RDONLY), engine_uring._addresses(views), 0, 6)
    got = {}
    while len(got) < 2:
        got.update(ring.enter())
    assert got == {5: -errno.EBADF, 6: -errno.EISDIR}
    ring.readv(-1, engine_uring._addresses(views), 0, 7)
    with pytest.raises(AssertionError, match="name is taken"):
        ring.readv(-1, engine_uring._addresses(views), 0, 7)
    ring.close()


@needs_uring
def test_demand_overtakes_what_was_not_submitted_and_a_prefetch_can_be_taken_back_or_promoted(pack):
    with open_engine("uring", pack, depth=1) as engine:
        gate, buffers = Gate(engine), dirty_buffers(pack)
        futures = {key: engine.submit(key, buffers[key], PREFETCH) for key in (0, 1, 2, 3)}
        assert gate.started.acquire(timeout=20)
        futures[5] = engine.submit(5, buffers[5], DEMAND)
        engine.promote(3)
        assert [engine.cancel(key) for key in (0, 1, 3, 7)] == [False, True, False, False]
        engine.check_integrity()
        with pytest.raises(StoreError, match=r"expert 1\b.*cancelled before it began"):
            futures.pop(1).result(timeout=20)
        gate.open()
        read = sum(future.result(timeout=20) for future in futures.values())
        assert engine.bytes_read == read
    assert gate.log == [[0], [5], [3], [2]]
    assert (buffers[1] == 0xAA).all()


@needs_uring
@pytest.mark.parametrize("depth", [1, 3, 32])
def test_no_more_than_depth_reads_are_in_flight_and_all_of_a_batch_is(packs, monkeypatch, depth):
    most, at_once = [], threading.Event()

    class Counted(uring.Ring):
        def enter(self):
            most.append(sum(name != engine_uring.WAKE for name in self._in_flight))
            return super().enter()

    monkeypatch.setattr(engine_uring, "Ring", Counted)
    with open_engine("uring", packs["checkpoint"], depth=depth) as engine:
        buffers, push = dirty_buffers(engine.pack), engine._push
        engine._push = lambda *arguments: (at_once.wait(20), push(*arguments))
        futures = [engine.submit(key, buffers[key], DEMAND) for key in range(engine.pack.keys)]
        at_once.set()
        for key, future in enumerate(futures):
            future.result(timeout=20)
            engine.pack.check(key, buffers[key])
    assert max(most) == depth


@needs_uring
def test_the_ring_never_waits_for_a_hash(pack, monkeypatch):
    check, hold = type(pack).check, threading.Event()

    def slow(self, key, buffer):
        assert hold.wait(20)
        check(self, key, buffer)

    monkeypatch.setattr(type(pack), "check", slow)
    with open_engine("uring", pack, depth=1, threads=1) as engine:
        gate = Gate(engine)
        gate.open()
        futures = [engine.submit(key, buffer, DEMAND) for key, buffer in enumerate(dirty_buffers(pack))]
        for _ in range(pack.keys):
            assert gate.started.acquire(timeout=20)
        assert not any(future.done() for future in futures)
        hold.set()
        assert all(future.result(timeout=20) for future in futures)


@needs_uring
@pytest.mark.parametrize("run", [False, True])
def test_short_reads_go_on_page_by_page_and_endless_ones_are_named(pack, run):
    with open_engine("uring", pack) as engine:
        submit = engine.submit_run if run else lambda k, b, p: [engine.submit(*kb, p) for kb in zip(k, b, strict=True)]
        for give, calls in ((lambda n: n // 2, None), (lambda n: min(n, PAGE + 7), 3 * (4 if run else 1) + 1)):
            engine.inject, before = (lambda views, offset, read, give=give: give(read())), engine.calls
            buffers = dirty_buffers(pack, 4 if run else 1)
            for future in submit(range(len(buffers)), buffers, DEMAND):
                with pytest.raises(StoreError, match="short read") if calls is None else _nothing():
                    future.result(timeout=20)
            for key, buffer in enumerate(buffers if calls else ()):
                pack.check(key, buffer)
                assert engine.calls - before <= calls
        engine.check_integrity()


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


@needs_uring
def test_close_ends_what_was_submitted_and_fails_what_was_not(pack):
    engine = open_engine("uring", pack, depth=1)
    gate = Gate(engine)
    futures = [engine.submit(key, buffer, key % 2) for key, buffer in enumerate(dirty_buffers(pack, 4))]
    assert gate.started.acquire(timeout=20)
    closer = threading.Thread(target=engine.close)
    closer.start()
    for future in futures[1:]:
        with pytest.raises(StoreError, match="closed before the expert was read"):
            future.result(timeout=20)
    assert not futures[0].done()
    gate.open()
    closer.join(timeout=20)
    assert futures[0].result(timeout=0) == pack.slot_bytes
    engine.close()
    engine.check_integrity()
    with pytest.raises(StoreError, match="closed"):
        engine.submit(0, dirty_buffers(pack, 1)[0], DEMAND)


@needs_uring
def test_a_ring_that_fails_leaves_nobody_waiting(pack, monkeypatch):
    class Broken(uring.Ring):
        def enter(self):
            done = super().enter()
            if any(name != engine_uring.WAKE for name, _ in done):
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return done

    monkeypatch.setattr(engine_uring, "Ring", Broken)
    engine = open_engine("uring", pack, depth=2)
    gate = Gate(engine)
    futures = [engine.submit(key, buffer, DEMAND) for key, buffer in enumerate(dirty_buffers(pack))]
    gate.open()
    for key, future in enumerate(futures):
        with pytest.raises(StoreError, match=rf"expert {key % 4}, .*the ring failed \(.*Cannot allocate memory\)"):
            future.result(timeout=20)
    engine.close()


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EPERM, "forbidden here"), (errno.ENOSYS, "has no io_uring"), (errno.EINVAL, "older than Linux 6.1")],
)
def test_a_kernel_without_io_uring_is_refused_in_one_line_and_no_other_engine_is_taken(
    pack, monkeypatch, number, words
):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    monkeypatch.setattr(uring, "_call", refuse)
    assert words in uring.refusal()
    with pytest.raises(StoreError, match=rf"engine uring: .*{words} \({errno.errorcode[number]}\); use engine=direct"):
        open_engine("uring", pack)
    monkeypatch.undo()
    assert not before or len(os.listdir("/proc/self/fd")) == len(before)


@needs_uring
@pytest.mark.parametrize("refuse_at", ["ring", "read"])
def test_a_file_that_the_ring_cannot_read_is_refused_and_leaves_nothing_behind(pack, monkeypatch, refuse_at):
    class Refusing(uring.Ring):
        def __init__(self, entries):
            if refuse_at == "ring":
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            super().__init__(entries)

        def enter(self):
            return [(name, -errno.EOPNOTSUPP) for name, _ in super().enter()]

    def held():
        return len(os.listdir("/proc/self/fd")), sum(t.name.startswith("moebench-") for t in threading.enumerate())

    before = held()
    monkeypatch.setattr(engine_uring, "Ring", Refusing)
    with pytest.raises(StoreError, match=r"io_uring cannot read this file \(.*\); use engine=direct"):
        UringEngine(pack)
    assert held() == before


def test_impossible_depths_are_refused(pack):
    for options in ({"depth": 0}, {"threads": 0}):
        with pytest.raises(StoreError, match="depth and threads must be at least 1"):
            open_engine("uring", pack, **options)
    with pytest.raises(StoreError, match="unknown option block_bytes; valid: depth, threads, pool, coded"):
        open_engine("uring", pack, block_bytes=PAGE)
