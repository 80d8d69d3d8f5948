"""Bytes that cannot be read in place land in a fixed pool of buffers, which a request waits for and never for ever;
what is stored coded is decoded, or left as it is for whoever decodes it."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from engine_fixtures import costs
from hypothesis import given, settings
from hypothesis import strategies as st
from read_fixtures import ALL, WHOLE, Gate, dirty_buffers, make_packs, needs_uring, run_of

from moebench.store.block_queue import DEMAND, PREFETCH, Block, BlockQueue, Part, ReadRequest
from moebench.store.engine_queued import ReadFailed
from moebench.store.engines import StoreError, open_engine
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer
from moebench.timeline.filled import FilledTimeline
from moebench.timeline.wall import WallTimeline
from moebench.units import PAGE, align_up


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return make_packs(tmp_path_factory)


@pytest.mark.parametrize("block_bytes", [PAGE, 1 << 20])
def test_direct_reads_need_landing_buffers_only_where_extents_are_unaligned(packs, block_bytes):
    options = {"threads": 3, "block_bytes": block_bytes}
    with open_engine("direct", packs["packed"], **options) as engine:
        assert engine.staging_bytes == 0
        assert engine.submit(0, dirty_buffers(engine.pack, 1)[0], DEMAND).result() == engine.pack.slot_bytes
    with open_engine("direct", packs["checkpoint"], **options) as engine:
        pieces, stored = engine.pack.segments(0), engine.pack.manifest.lengths[0]
        assert 6 * stored < engine.staging_bytes <= 6 * (stored + 2 * PAGE * len(pieces))
    with open_engine("direct", packs["checkpoint"], pool=1, **options) as engine:
        assert stored < engine.staging_bytes <= stored + 2 * PAGE * len(pieces)
    for name, layout in (("direct", "packed"), ("pread", "checkpoint")):
        with pytest.raises(StoreError, match=r"pool counts the buffers .* here they land in place"):
            open_engine(name, packs[layout], pool=1)


def test_a_prefetch_that_holds_the_last_landing_buffer_is_finished_before_the_demand_that_waits_for_it(packs):
    pack = packs["checkpoint"]
    with open_engine("direct", pack, threads=1, block_bytes=PAGE, pool=1) as engine:
        gate, buffers = Gate(engine), dirty_buffers(pack)
        futures = [engine.submit(0, buffers[0], PREFETCH)]
        assert gate.started.acquire(timeout=20)
        futures += [engine.submit(key, buffers[key], DEMAND) for key in (5, 6)]
        futures.append(engine.submit(1, buffers[1], PREFETCH))
        engine.check_integrity()
        gate.open()
        for key, future in zip((0, 5, 6, 1), futures, strict=True):
            future.result(timeout=20)
            pack.check(key, buffers[key])
        engine.check_integrity()


@settings(max_examples=50)
@given(data=st.data(), pool=st.integers(1, 3))
def test_whatever_comes_in_between_every_request_gets_its_buffers_and_gives_them_back(data, pool):
    queue, made, reading, ended = BlockQueue([np.zeros(1, np.uint8) for _ in range(pool)]), [], [], []

    def put():
        parts = [Part(len(made) + i, np.zeros(1, np.uint8), None) for i in range(data.draw(st.integers(1, pool)))]
        blocks = deque(Block(0, ()) for _ in range(1 if len(parts) > 1 else data.draw(st.integers(1, 4))))
        made.append(ReadRequest(parts, data.draw(st.sampled_from([DEMAND, PREFETCH])), blocks))
        assert queue.put([made[-1]])

    def poll():
        if (taken := queue.poll()) is not None:
            assert all(part.target is not None for part in taken[0].parts)
            reading.append(taken[0])

    def settle():
        if reading:
            request = reading.pop(data.draw(st.integers(0, len(reading) - 1)))
            if queue.settle(request, data.draw(st.sampled_from([None, ReadFailed("x")]))):
                ended.append(request)

    def release():
        if waiting := [part for request in ended for part in request.parts if part.target is not None]:
            queue.release(data.draw(st.sampled_from(waiting)))

    def promote():
        queue.promote(data.draw(st.integers(0, len(made))))

    def cancel():
        if (request := queue.cancel(data.draw(st.integers(0, len(made))), ReadFailed("x"))) is not None:
            assert request.parts[0].target is None
            ended.append(request)

    for _ in range(data.draw(st.integers(1, 30))):
        data.draw(st.sampled_from([put, put, poll, poll, settle, release, promote, cancel]))()
        queue.check_integrity()
    while len(ended) < len(made):
        before = sum(len(request.waiting) + request.reading for request in made)
        for request in ended:
            for part in request.parts:
                queue.release(part)
        poll()
        while reading:
            settle()
        queue.check_integrity()
        assert sum(len(request.waiting) + request.reading for request in made) < before, "nothing can be taken any more"


def test_a_run_that_waits_for_its_buffers_is_not_overtaken_by_smaller_requests(packs):
    pack = packs["rans"]
    with open_engine("pread", pack, threads=2, pool=3) as engine:
        gate, buffers = Gate(engine), dirty_buffers(pack)
        keys = run_of(pack, range(pack.keys))[0]
        futures = [engine.submit(keys[0], buffers[keys[0]], DEMAND)]
        assert gate.started.acquire(timeout=20)
        futures += engine.submit_run(keys[1:4], [buffers[key] for key in keys[1:4]], DEMAND)
        futures += [engine.submit(key, buffers[key], DEMAND) for key in keys[4:8]]
        engine.check_integrity()
        assert not gate.started.acquire(timeout=0.05)
        gate.open()
        for future in futures:
            future.result(timeout=20)
    first, second = (pack.segments(key)[0].offset for key in keys[:2])
    assert gate.offsets[:2] == [first, second]


@pytest.mark.parametrize("name", ["direct", pytest.param("uring", marks=needs_uring)])
@pytest.mark.parametrize("pool", [1, 3])
def test_bytes_that_cannot_land_in_place_use_no_more_buffers_than_the_pool_has(packs, name, pool):
    pack, used = packs["checkpoint"], set()
    with open_engine(name, pack, pool=pool, **WHOLE[name]) as engine:
        first = min(buffer.ctypes.data for buffer in engine._queue._free)

        def note(views, offset, read):
            used.update((view.ctypes.data - first) // engine._landing_bytes for view in views)
            return read()

        engine.inject, buffers = note, dirty_buffers(pack)
        for future in [engine.submit(key, buffers[key], key % 2) for key in range(pack.keys)]:
            future.result(timeout=20)
        engine.check_integrity()
        assert engine.staging_bytes == pool * engine._landing_bytes
    assert used
    assert used <= set(range(pool))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("pool", [1, 2, 5])
def test_coded_experts_land_in_the_pool_and_a_run_longer_than_it_is_read_in_parts(packs, name, pool):
    pack = packs["rans"]
    keys, buffers = run_of(pack, range(pack.keys))[0], dirty_buffers(pack)
    with open_engine(name, pack, pool=pool, **WHOLE[name]) as engine:
        assert engine.staging_bytes == pool * pack.landing_bytes
        futures = engine.submit_run(keys, [buffers[key] for key in keys], PREFETCH)
        for future in futures:
            future.result(timeout=20)
        assert engine.calls == -(-pack.keys // pool)
        mixed = [engine.submit(key, dirty_buffers(pack, 1)[0], key % 2) for key in range(pack.keys)]
        mixed += engine.submit_run(keys[2:5], dirty_buffers(pack, 3), DEMAND)
        for future in mixed:
            future.result(timeout=20)
        engine.check_integrity()
        assert engine.staging_bytes == pool * pack.landing_bytes
    for key, buffer in enumerate(buffers):
        pack.check(key, buffer)


@pytest.mark.parametrize("name", ALL)
def test_an_engine_may_leave_experts_coded(packs, name):
    pack = packs["rans"]
    landed = [aligned_buffer(pack.landing_bytes) for _ in range(pack.keys)]
    with open_engine(name, pack, **({"threads": 2, "coded": True} | WHOLE[name])) as engine:
        assert engine.coded
        assert engine.buffer_bytes == pack.landing_bytes
        assert engine.staging_bytes == 0
        futures = [engine.submit(key, landed[key], DEMAND) for key in range(pack.keys)]
        for key, future in enumerate(futures):
            assert align_up(future.result(timeout=20)) == align_up(pack.manifest.lengths[key])
        with pytest.raises(StoreError, match=f"must hold {pack.landing_bytes} bytes"):
            engine.submit(0, aligned_buffer(pack.landing_bytes - PAGE), DEMAND)
    raw = pack.file_path.read_bytes()
    for key, buffer in enumerate(landed):
        (stored,) = pack.segments(key)
        assert buffer[: stored.nbytes].tobytes() == raw[stored.offset : stored.offset + stored.nbytes]
        pack.decode(key, buffer, aligned_buffer(pack.slot_bytes))


@pytest.mark.parametrize("name", ALL)
def test_a_damaged_coded_expert_is_named_and_its_landing_buffer_used_again(packs, tmp_path, name):
    good = packs["rans"]
    pack = Pack(tmp_path, good.manifest)
    data = bytearray(good.file_path.read_bytes())
    (stored,) = good.segments(5)
    data[stored.offset + stored.nbytes // 2] ^= 0x40
    pack.file_path.write_bytes(data)
    with open_engine(name, pack, pool=1) as engine:
        for _ in range(3):
            buffers = dirty_buffers(pack, 2)
            bad, right = engine.submit(5, buffers[0], PREFETCH), engine.submit(6, buffers[1], PREFETCH)
            with pytest.raises(StoreError, match=rf"layer 1, expert 1, offset {stored.offset}: "):
                bad.result(timeout=20)
            right.result(timeout=20)
            pack.check(6, buffers[1])
        engine.check_integrity()


@pytest.mark.parametrize("make", [WallTimeline, lambda engine, buffer: FilledTimeline(costs(), engine, buffer)])
def test_a_copy_out_of_a_tier_that_keeps_what_is_stored_decodes(packs, make):
    pack = packs["rans"]
    slots = {"host": [aligned_buffer(pack.landing_bytes) for _ in range(3)], "device": dirty_buffers(pack, 3)}
    timeline = make(open_engine("pread", pack, coded=True), lambda tier, slot: slots[tier][slot])
    try:
        for key, read in zip((4, 8, 2), timeline.read([4, 8, 2], [0, 1, 2], "host", DEMAND), strict=True):
            timeline.wait(timeline.copy(key, ("host", read.slot), ("device", read.slot), read))
            pack.check(key, slots["device"][read.slot])
    finally:
        timeline.close()
