"""Neighbours are read by one call, the gaps between them are dropped, and each expert ends on its own."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_fixtures import ALL, Gate, dirty_buffers, make_packs, run_of
from store_fixtures import SmallSource

from moebench.store.block_queue import DEMAND, PREFETCH
from moebench.store.engines import StoreError, open_engine
from moebench.store.layout import QuantSpec
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack
from moebench.units import PAGE


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return make_packs(tmp_path_factory)


@pytest.fixture
def pack(packs):
    return packs["packed"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", ["packed", "ordered", "rans"])
@settings(max_examples=12)
@given(chosen=st.sets(st.integers(0, 11), min_size=2), priority=st.sampled_from([DEMAND, PREFETCH]))
def test_a_run_is_one_call_and_its_gaps_are_counted_and_dropped(packs, name, layout, chosen, priority):
    pack = packs[layout]
    keys, sizes, gap = run_of(pack, chosen)
    buffers = dirty_buffers(pack, len(keys))
    with open_engine(name, pack, **({"pool": 12} if pack.coded else {})) as engine:
        staging = engine.staging_bytes
        futures = engine.submit_run(keys, buffers, priority)
        assert [future.result(timeout=20) for future in futures] == sizes
        assert (engine.calls, engine.requests) == (1, len(keys))
        assert engine.bytes_read == sum(sizes) + gap
        assert (engine.staging_bytes > staging) == (gap > 0)
        engine.check_integrity()
    for key, buffer in zip(keys, buffers, strict=True):
        pack.check(key, buffer)


@pytest.mark.parametrize("name", ALL)
def test_a_run_is_refused_where_it_cannot_be_one_read(packs, name):
    with open_engine(name, packs["checkpoint"]) as engine:
        with pytest.raises(StoreError, match="layout checkpoint scatters an expert"):
            engine.submit_run([0, 1], dirty_buffers(engine.pack, 2), DEMAND)
        (alone,) = engine.submit_run([1], dirty_buffers(engine.pack, 1), DEMAND)
        assert alone.result(timeout=20)
    with open_engine(name, packs["packed"]) as engine:
        for keys, words in (([4, 3], "must ascend"), ([4, 4], "must ascend"), ([4, 12], "no expert 12")):
            with pytest.raises(StoreError, match=words):
                engine.submit_run(keys, dirty_buffers(engine.pack, 2), DEMAND)
        assert (engine.requests, engine.calls) == (0, 0)
        engine.check_integrity()


@pytest.mark.parametrize("name", ALL)
def test_a_run_goes_on_after_short_reads_and_fails_expert_by_expert(tmp_path, name):
    pack = write_pack(tmp_path / "p", SmallSource(), QuantSpec("int4"), PlainLayout())
    os.truncate(pack.file_path, pack.slot_bytes * 3 + PAGE)
    with open_engine(name if name != "mmap" else "pread", pack) as engine:  # a mapping of a file cut off is a SIGBUS
        futures = engine.submit_run([1, 2, 3], dirty_buffers(pack, 3), DEMAND)
        for key, future in zip((1, 2, 3), futures, strict=True):
            with pytest.raises(StoreError, match=rf"layer 0, expert {key}, offset {key * pack.slot_bytes}: short read"):
                future.result(timeout=20)
        engine.check_integrity()


@pytest.mark.parametrize("name", ALL)
def test_a_wrong_hash_fails_one_expert_of_a_run(tmp_path, name):
    pack = write_pack(tmp_path / "p", SmallSource(), QuantSpec("int4"), PlainLayout())
    data = bytearray(pack.file_path.read_bytes())
    data[2 * pack.slot_bytes + 17] ^= 1
    pack.file_path.write_bytes(data)
    with open_engine(name, pack) as engine:
        first, second, third = engine.submit_run([1, 2, 3], dirty_buffers(pack, 3), DEMAND)
        assert first.result(timeout=20) == third.result(timeout=20) == pack.slot_bytes
        with pytest.raises(StoreError, match=r"expert 2, .*wrong bytes"):
            second.result(timeout=20)


def test_an_expert_of_a_run_is_not_taken_back_and_promotes_all_of_it(pack):
    with open_engine("pread", pack, threads=1) as engine:
        gate, buffers = Gate(engine), dirty_buffers(pack)
        futures = [engine.submit(0, buffers[0], PREFETCH)]
        assert gate.started.acquire(timeout=20)
        futures.append(engine.submit(1, buffers[1], PREFETCH))
        futures += engine.submit_run([4, 5, 7], [buffers[key] for key in (4, 5, 7)], PREFETCH)
        assert not engine.cancel(5)
        engine.promote(7)
        engine.check_integrity()
        gate.open()
        for future in futures:
            future.result(timeout=20)
    assert [key for key, _ in gate.log] == [0, 4, 1]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", ["packed", "rans"])
def test_closing_in_the_middle_of_runs_leaves_no_future_open(packs, name, layout):
    pack = packs[layout]
    keys = run_of(pack, range(pack.keys))[0]
    for wait in range(8):
        buffers = dirty_buffers(pack)
        engine = open_engine(name, pack, threads=2)
        futures = engine.submit_run(keys[:6], buffers[:6], DEMAND) + engine.submit_run(keys[6:], buffers[6:], PREFETCH)
        if wait:
            with contextlib.suppress(StoreError):
                futures[wait].result(timeout=20)
        engine.close()
        engine.check_integrity()
        for key, buffer, future in zip(keys, buffers, futures, strict=True):
            assert future.done()
            if future.exception() is None:
                pack.check(key, buffer)
