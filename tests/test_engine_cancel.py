"""Stale prefetches leave the queue and are never read, what has begun goes on, and neither cancelling nor a failing
prefetch ever changes an output or fails a step.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Adversary, Watch, costs, make_experts, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from read_fixtures import READERS, Gate, dirty_buffers
from store_fixtures import SmallSource
from test_engine_acquire import served
from test_live_identity import Lab, check_same

from moebench.hookspecs import hookimpl
from moebench.store.block_queue import DEMAND, PREFETCH
from moebench.store.engine_threads import PreadEngine
from moebench.store.engines import ReadEngine, StoreError, open_engine
from moebench.store.layout import QuantSpec
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack
from moebench.timeline.filled import FilledTimeline
from moebench.timeline.virtual import VirtualTimeline
from moebench.timeline.wall import WallTimeline
from moebench.units import PAGE


class Fickle(Adversary):
    """Takes back a random part of what is in flight, at every layer."""

    @hookimpl
    def cancel(self, view):
        keys = np.arange(view.geometry.keys)
        flying = keys[view.in_flight(keys)]
        return flying[self.rng.random(len(flying)) < 0.7]


class Wasteful:
    """Reads ahead at every layer what nobody needs there; ``stale`` says whether it takes that back at the next."""

    def __init__(self, stale=True):
        self.stale, self.asked = stale, []

    @hookimpl
    def prefetch(self, step, point, view):
        if not isinstance(point, int) or point + 1 >= view.geometry.layers:
            return None
        self.asked = (point + 1) * view.geometry.experts + np.arange(view.geometry.experts)
        return self.asked

    @hookimpl
    def cancel(self):
        return self.asked if self.stale else None


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return write_pack(tmp_path_factory.mktemp("pack") / "p", SmallSource(), QuantSpec("int4"), PlainLayout())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(4, 48), host=st.sampled_from([0, 7, 30]), batch=st.integers(1, 2))
def test_whatever_is_cancelled_every_demand_is_served_once_and_bytes_are_conserved(seed, slots, host, batch):
    watch = Watch()
    experts = make_experts([Fickle(seed), watch], slots, host=host)
    watch.experts = experts
    for demand, got in served(experts, make_trace(24, 2, 4, seed), batch):
        assert sorted(got) == demand
    experts.check_integrity()
    assert not experts.in_flight
    assert not experts.loading
    assert sum(r.read_bytes for r in watch.records) == experts.timeline.storage_bytes
    if not host:
        reads = sum(r.demand_reads + r.prefetch_reads - r.cancelled for r in watch.records)
        assert reads * GEOMETRY.slot_bytes == experts.timeline.storage_bytes


@pytest.mark.parametrize("host", [0, 14])
def test_cancelling_what_is_stale_saves_bytes_and_time(host):
    trace, kept, taken = make_trace(40, 1, 4, 3), Watch(), Watch()
    for plugin, watch in ((Wasteful(stale=False), kept), (Wasteful(), taken)):
        served(make_experts([plugin, watch], 16, host=host, keep_evicted=False), trace)
    total = {
        name: [sum(getattr(r, name) for r in w.records) for w in (kept, taken)] for name in ("cancelled", "read_bytes")
    }
    assert total["cancelled"][0] == 0 < total["cancelled"][1]
    assert total["read_bytes"][1] < total["read_bytes"][0]
    assert taken.records[-1].ended_s < kept.records[-1].ended_s


def test_the_modeled_clock_cancels_what_waits_and_not_what_was_served_in_part():
    timeline = VirtualTimeline(costs())
    tickets = timeline.read(range(4), range(4), "device", PREFETCH)
    each = timeline.costs.read_s[4]
    timeline.compute_dense(1, 1, 0, False)  # 0.3 ms: the first is complete, the second under way
    assert timeline.is_ready(tickets[0])
    assert [timeline.cancel(t, None) for t in tickets] == [False, False, True, True]
    assert [timeline.cancel(t, None) for t in tickets] == [False] * 4
    assert (timeline.storage_bytes, timeline.storage_requests) == (2 * timeline.costs.read_bytes, 2)
    timeline.wait(tickets[1])
    assert timeline.now() == pytest.approx(2 * each)
    demand, promoted = timeline.read([8], [4], "device", DEMAND)[0], timeline.read([9], [5], "device", PREFETCH)[0]
    timeline.promote(promoted)
    assert not timeline.cancel(demand, None)
    assert not timeline.cancel(promoted, None)


def test_a_cancelled_read_goes_to_storage_when_it_is_wanted_again():
    timeline = VirtualTimeline(costs(page_cache_bytes=10 * GEOMETRY.expert_bytes))
    (ahead,) = timeline.read([1], [0], "device", PREFETCH)
    assert timeline.cancel(ahead, None)
    (demand,) = timeline.read([1], [0], "device", DEMAND)
    assert timeline.wait(demand) == pytest.approx(1e-3)  # the page cache did not learn of it


@pytest.mark.parametrize("name", [*READERS, "faulty"])
def test_an_engine_gives_back_only_what_no_thread_has_begun(pack, name):
    with open_engine(name, pack, threads=1, block_bytes=PAGE) as engine:
        inner, buffers = getattr(engine, "_inner", engine), dirty_buffers(pack)
        gate = Gate(inner)
        futures = {key: engine.submit(key, buffers[key], PREFETCH) for key in (0, 1, 2, 3)}
        assert gate.started.acquire(timeout=20)
        engine.promote(3)
        assert [engine.cancel(key) for key in (0, 1, 3, 7)] == [False, True, False, False]
        engine.check_integrity()
        with pytest.raises(StoreError, match=r"expert 1\b.*cancelled before it began"):
            futures.pop(1).result(timeout=20)
        gate.open()
        read = sum(future.result(timeout=20) for future in futures.values())
        engine.check_integrity()
        assert engine.bytes_read == read
        assert not any(engine.cancel(key) for key in range(4))
    assert {key for key, _ in gate.log} == {0, 2, 3}
    assert (buffers[1] == 0xAA).all()


def test_a_slot_whose_modeled_read_is_taken_back_is_free_when_the_real_one_has_ended(pack):
    """The modeled clock cancels what the disk has begun already."""
    (buffer,) = dirty_buffers(pack, 1)
    timeline = FilledTimeline(costs(), PreadEngine(pack, threads=1), lambda tier, slot: buffer)
    gate = Gate(timeline.engine)
    try:
        (ahead,) = timeline.read([0], [0], "device", PREFETCH)
        assert gate.started.acquire(timeout=20)
        threading.Timer(0.05, gate.open).start()
        assert timeline.cancel(ahead, None)
        pack.check(0, buffer)
    finally:
        gate.open()
        timeline.close()


@pytest.mark.parametrize("held", [0, 1])
def test_the_measured_clock_cancels_a_queued_read_and_the_copy_behind_it(pack, held):
    """The copy stands at the head of its thread, where it waits for the read, or behind another."""
    buffers = {name: dirty_buffers(pack, 4) for name in ("host", "device")}
    timeline = WallTimeline(PreadEngine(pack, threads=1), lambda tier, slot: buffers[tier][slot])
    gate = Gate(timeline.engine)
    try:
        reads = timeline.read([0, 1], [0, 1], "host", PREFETCH)
        assert gate.started.acquire(timeout=20)
        copies = [timeline.copy(k, ("host", k), ("device", k), reads[k]) for k in (0, 1)[1 - held :]]
        assert not timeline.cancel(reads[0], None)
        assert timeline.cancel(reads[1], copies[-1])
        assert timeline.is_ready(copies[-1])  # nothing writes into its slot any more
        gate.open()
        for ticket in (reads[0], *copies[:-1]):
            timeline.wait(ticket)
    finally:
        gate.open()
        timeline.close()
    assert (buffers["device"][1] == 0xAA).all()
    assert timeline.storage_bytes == pack.manifest.lengths[0]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), "int4")


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("host", [0, 6])
def test_cancelling_changes_no_bit(lab, clock, host):
    check_same(lab.run([Fickle(host)], 7, host=host, clock=clock, threads=1), lab.run(full=True))


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("host", [0, 6])
def test_a_prefetch_that_fails_harms_nobody(lab, clock, host, monkeypatch):
    reference, watch = lab.run(full=True), Watch()

    def broken(self, key, buffer, priority):
        if priority == DEMAND:
            return submit(self, key, buffer, priority)
        failed: Future[int] = Future()
        failed.set_exception(StoreError("expert unreadable"))
        return failed

    submit = PreadEngine.submit
    monkeypatch.setattr(PreadEngine, "submit", broken)
    monkeypatch.setattr(PreadEngine, "submit_all", ReadEngine.submit_all)
    check_same(lab.run([Adversary(3), watch], 7, host=host, clock=clock), reference)
    assert sum(r.lost for r in watch.records) > 10


def test_a_demand_that_fails_still_fails_the_step(lab, monkeypatch):
    def broken(self, key, buffer, priority):
        raise_later: Future[int] = Future()
        raise_later.set_exception(StoreError("expert unreadable"))
        return raise_later

    monkeypatch.setattr(PreadEngine, "submit", broken)
    monkeypatch.setattr(PreadEngine, "submit_all", ReadEngine.submit_all)
    with pytest.raises(StoreError, match="unreadable"):
        lab.run([], 7)
