"""Every engine delivers the same bytes from every disk layout, serves demand first, and ends each failure in an error
that names file, expert and offset; none leaks a thread, a file or a buffer that is still being filled."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest
from read_fixtures import ALL, LAYOUTS, PIECES, READERS, WHOLE, Gate, dirty_buffers, make_packs
from store_fixtures import SmallSource

from moebench.store import engine_threads
from moebench.store.block_queue import DEMAND, PREFETCH
from moebench.store.engines import ENGINES, StoreError, open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack
from moebench.units import PAGE


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return make_packs(tmp_path_factory)


@pytest.fixture
def pack(packs):
    return packs["packed"]


@pytest.mark.parametrize("layout", [*LAYOUTS, "rans"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("threads", "block_bytes"), [(1, 1 << 20), (3, PAGE), (2, 0)])
def test_all_engines_deliver_the_packed_bytes(packs, name, layout, threads, block_bytes):
    pack, expected = packs[layout], aligned_buffer(packs["packed"].slot_bytes)
    buffers, cut = dirty_buffers(pack), {} if name == "uring" else {"block_bytes": block_bytes}
    with open_engine(name, pack, threads=threads, **cut) as engine:
        futures = [engine.submit(key, buffers[key], key % 2) for key in range(pack.keys)]
        counts = [future.result(timeout=20) for future in futures]
        engine.check_integrity()
        assert (engine.requests, engine.bytes_read) == (pack.keys, sum(counts))
    for key, buffer in enumerate(buffers):
        packs["packed"].read(key, expected)
        assert np.array_equal(buffer[: pack.expert_bytes], expected[: pack.expert_bytes])
    stored = sum(pack.manifest.lengths)
    assert stored == sum(nbytes for key in range(pack.keys) for _, nbytes, _ in pack.segments(key))
    assert sum(counts) >= stored if name in ("direct", "uring") else sum(counts) == stored


@pytest.mark.parametrize("layout", PIECES)
@pytest.mark.parametrize("name", ALL)
def test_storage_is_called_once_an_expert_and_in_scattered_layouts_once_a_piece(packs, name, layout):
    pack, pieces = packs[layout], PIECES[layout]
    with open_engine(name, pack, **WHOLE[name]) as engine:
        for key, buffer in enumerate(dirty_buffers(pack)):
            engine.submit(key, buffer, key % 2).result(timeout=20)
            assert (engine.requests, engine.calls) == (key + 1, (key + 1) * pieces)


@pytest.mark.parametrize("name", READERS)
def test_blocks_are_calls_of_their_own(packs, name):
    with open_engine(name, packs["packed"], block_bytes=PAGE) as engine:
        engine.submit(5, dirty_buffers(engine.pack, 1)[0], DEMAND).result(timeout=20)
        assert engine.calls == 3


@pytest.mark.parametrize("name", READERS)
def test_demand_overtakes_a_prefetch_between_two_blocks(pack, name):
    with open_engine(name, pack, threads=1, block_bytes=PAGE) as engine:
        gate, buffers = Gate(engine), dirty_buffers(pack)
        futures = [engine.submit(key, buffers[key], PREFETCH) for key in (0, 1)]
        assert gate.started.acquire(timeout=20)
        futures += [engine.submit(key, buffers[key], DEMAND) for key in (5, 4)]
        engine.check_integrity()
        gate.open()
        for future in futures:
            future.result(timeout=20)
    blocks = range(3)
    assert gate.log == [
        (0, 0),
        *((5, b) for b in blocks),
        *((4, b) for b in blocks),
        (0, 1),
        (0, 2),
        *((1, b) for b in blocks),
    ]


def test_promote_moves_what_still_waits_behind_earlier_demand(pack):
    with open_engine("pread", pack, threads=1, block_bytes=PAGE) as engine:
        gate, buffers = Gate(engine), dirty_buffers(pack)
        futures = [engine.submit(key, buffers[key], PREFETCH) for key in (0, 1, 2)]
        assert gate.started.acquire(timeout=20)
        futures.append(engine.submit(3, buffers[3], DEMAND))
        engine.promote(2)
        engine.promote(2)
        engine.promote(9)
        engine.check_integrity()
        gate.open()
        for future in futures:
            future.result(timeout=20)
        engine.promote(2)
        engine.check_integrity()
    assert [key for key, _ in gate.log] == [0, 3, 3, 3, 2, 2, 2, 0, 0, 1, 1, 1]


def test_a_failed_request_is_done_only_when_no_thread_fills_its_buffer(pack):
    with open_engine("pread", pack, threads=2, block_bytes=PAGE) as engine:
        second, failed = threading.Event(), threading.Event()
        real = engine._read_at

        def read_at(fd, views, offset):
            if offset % pack.slot_bytes == 0:
                assert second.wait(20)
                failed.set()
                raise OSError(errno.EIO, "Input/output error")
            second.set()
            assert release.wait(20)
            return real(fd, views, offset)

        release, engine._read_at = threading.Event(), read_at
        future = engine.submit(7, dirty_buffers(pack, 1)[0], DEMAND)
        assert failed.wait(20)
        with pytest.raises(TimeoutError):
            future.result(timeout=0.05)
        assert not future.cancel()
        release.set()
        with pytest.raises(StoreError, match=r"experts.bin: layer 1, expert 3, offset 86016: .*EIO"):
            future.result(timeout=20)
        engine.check_integrity()


def test_the_first_error_spares_the_blocks_still_waiting(pack):
    calls = []

    def read_at(fd, views, offset):
        calls.append(offset)
        raise OSError(errno.EIO, "Input/output error")

    with open_engine("pread", pack, threads=1, block_bytes=PAGE) as engine:
        engine._read_at = read_at
        for key in (0, 1):
            with pytest.raises(StoreError, match="EIO"):
                engine.submit(key, dirty_buffers(pack, 1)[0], PREFETCH).result(timeout=20)
            engine.check_integrity()
    assert calls == [0, pack.slot_bytes]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_reads_go_on_and_endless_ones_are_named(packs, layout, name):
    pack = packs[layout]
    with open_engine(name, pack) as engine:
        real, buffer = engine._read_at, dirty_buffers(pack, 1)[0]
        engine._read_at = lambda fd, views, offset: real(fd, [views[0][: max(PAGE, len(views[0]) // 2)]], offset)
        engine.submit(6, buffer, DEMAND).result(timeout=20)
        pack.check(6, buffer)
        engine._read_at = lambda fd, views, offset: 0
        with pytest.raises(StoreError, match=r"experts.bin: layer 1, expert 2, offset \d+: short read, 0 of \d+ bytes"):
            engine.submit(6, buffer, DEMAND).result(timeout=20)


@pytest.mark.parametrize("name", READERS)
def test_wrong_bytes_on_disk_are_an_error(tmp_path, name):
    path = write_pack(tmp_path / "p", SmallSource(), QuantSpec("int8"), PlainLayout()).path
    pack = Pack.open(path)
    data = bytearray(pack.file_path.read_bytes())
    data[pack.slot_bytes + 17] ^= 1
    pack.file_path.write_bytes(data)
    with open_engine(name, pack) as engine:
        first, second, third = (engine.submit(key, buffer, DEMAND) for key, buffer in enumerate(dirty_buffers(pack, 3)))
        assert first.result(timeout=20) == third.result(timeout=20)
        with pytest.raises(StoreError, match="layer 0, expert 1, offset 20480: wrong bytes"):
            second.result(timeout=20)


@pytest.mark.parametrize("name", ["pread", "direct"])
def test_a_file_cut_off_behind_the_engine_is_an_error(tmp_path, name):
    pack = write_pack(tmp_path / "p", SmallSource(), QuantSpec("int8"), PlainLayout())
    with open_engine(name, pack) as engine:
        os.truncate(pack.file_path, pack.slot_bytes * 2 + PAGE)
        buffers = dirty_buffers(pack, 2)
        engine.submit(1, buffers[0], DEMAND).result(timeout=20)
        with pytest.raises(StoreError, match=r"layer 0, expert 2, offset \d+: short read, 4096 of"):
            engine.submit(2, buffers[1], DEMAND).result(timeout=20)


def test_close_fails_what_is_queued_and_ends_threads_and_files(pack):
    engine = open_engine("pread", pack, threads=1, block_bytes=PAGE)
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
    with pytest.raises(StoreError, match="closed"):
        futures[0].result(timeout=0)
    engine.close()
    engine.check_integrity()
    with pytest.raises(StoreError, match="closed"):
        engine.submit(0, dirty_buffers(pack, 1)[0], DEMAND)


@pytest.mark.parametrize("name", ALL)
def test_closed_engines_leave_no_thread_and_no_file(packs, name):
    def held():
        files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        return files, sum(thread.name.startswith("moebench-") for thread in threading.enumerate())

    before = held()
    for layout in LAYOUTS:
        with open_engine(name, packs[layout], threads=2) as engine:
            engine.submit(0, dirty_buffers(packs[layout], 1)[0], DEMAND).result(timeout=20)
            assert held() > before
    assert held() == before


def test_wrong_requests_are_refused_at_once(pack):
    good = aligned_buffer(pack.slot_bytes)
    read_only = aligned_buffer(pack.slot_bytes)
    read_only.flags.writeable = False
    with open_engine("pread", pack) as engine:
        for buffer, word in (
            (aligned_buffer(pack.slot_bytes - 1), "12288 bytes"),
            (aligned_buffer(pack.slot_bytes + 1)[1:], "boundary"),
            (good.view(np.int8), "uint8"),
            (read_only, "writable"),
        ):
            with pytest.raises(StoreError, match=word):
                engine.submit(0, buffer, DEMAND)
        with pytest.raises(StoreError, match="no expert 12; keys are 0 to 11"):
            engine.submit(12, good, DEMAND)
        with pytest.raises(StoreError, match="priority 2"):
            engine.submit(0, good, 2)
        assert engine.requests == 0
        engine.check_integrity()


def test_unknown_engines_and_options_list_the_valid_ones(pack):
    with pytest.raises(StoreError, match=f"'spdk'; valid: {', '.join(ENGINES)}"):
        open_engine("spdk", pack)
    with pytest.raises(StoreError, match="unknown option depth; valid: threads, block_bytes, pool, coded"):
        open_engine("direct", pack, depth=3)
    with pytest.raises(StoreError, match="unknown option depth; valid: threads, block_bytes, pool, coded"):
        open_engine("faulty", pack, depth=3)
    with pytest.raises(StoreError, match="multiple of 4096"):
        open_engine("pread", pack, block_bytes=5000)
    with pytest.raises(StoreError, match="threads must be at least 1"):
        open_engine("pread", pack, threads=0)
    with pytest.raises(StoreError, match=r"coded=true has no meaning .* a pack with codec=none"):
        open_engine("pread", pack, coded=True)


@pytest.mark.parametrize("refuse_at", ["open", "read"])
def test_a_file_system_without_direct_reads_is_an_error_that_names_the_way_out(pack, monkeypatch, refuse_at):
    def refuse(*args):
        raise OSError(errno.EINVAL, "Invalid argument")

    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    monkeypatch.setattr(engine_threads.os, "open" if refuse_at == "open" else "preadv", refuse)
    with pytest.raises(StoreError, match=r"refuses direct reads .* use engine=pread"):
        open_engine("direct", pack)
    monkeypatch.undo()
    assert not before or len(os.listdir("/proc/self/fd")) == len(before)


def test_random_advice_reaches_the_kernel(pack, monkeypatch):
    from moebench.store import engine_mmap

    advice = []

    class Mapping(engine_mmap.mmap.mmap):
        def madvise(self, option):
            advice.append(option)
            return super().madvise(option)

    monkeypatch.setattr(engine_mmap.mmap, "mmap", Mapping)
    for wanted in (False, True):
        open_engine("mmap", pack, random_advice=wanted).close()
    assert advice == [engine_mmap.mmap.MADV_NORMAL, engine_mmap.mmap.MADV_RANDOM]
