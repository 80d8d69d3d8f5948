"""Whatever a system does and whichever prefetch fails: the bytes served are right, what was read is booked, and what a
wave needs is neither lost from the host tier nor computed from the wrong slot."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Adversary, Watch, costs, make_experts, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import replay
from moebench.engine.movement import Rules
from moebench.hookspecs import hookimpl
from moebench.residency.places import Places
from moebench.residency.tier import Tier
from moebench.store.block_queue import PREFETCH
from moebench.store.engines import StoreError, open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_random_pack
from moebench.timeline.filled import FilledTimeline
from moebench.timeline.wall import WallTimeline
from moebench.units import PAGE

SHAPE = (GEOMETRY.layers, GEOMETRY.experts, GEOMETRY.hidden, GEOMETRY.intermediate)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """By codec: a random pack, and the bytes of each of its experts."""
    found = {}
    for codec in ("none", "rans"):
        pack = write_random_pack(tmp_path_factory.mktemp(codec) / "p", *SHAPE, QuantSpec("none"), codec=codec)
        found[codec] = pack, [read(pack, key) for key in range(pack.keys)]
    return found


def read(pack, key):
    buffer = aligned_buffer(pack.slot_bytes)
    pack.read(key, buffer)
    return buffer[: pack.expert_bytes].copy()


class Wild(Adversary):
    """An adversary that groups reads only where told, and now and then takes back all that may be."""

    def __init__(self, seed, grouped) -> None:
        super().__init__(seed)
        self.grouped = grouped

    @hookimpl
    def plan_reads(self, keys, view):
        return super().plan_reads(keys, view) if self.grouped else None

    @hookimpl
    def cancel(self, view):
        return np.arange(view.geometry.keys) if self.rng.random() < 0.3 else None


def losing_prefetches(engine, rng):
    """Let some of the engine's prefetches fail."""
    begin = engine.submit

    def submit(key, buffer, priority):
        if priority != PREFETCH or rng.random() < 0.6:
            return begin(key, buffer, priority)
        future = Future()
        future.set_exception(StoreError("lost"))
        return future

    engine.submit = submit


def check_served(experts, truth):
    """Compare what each layer is served with the pack, each expert once."""
    serve = experts.serve

    def checked(layer, hidden, native):
        routing, served = serve(layer, hidden, native)
        seen = []
        for expert, data in served:
            wanted = truth[layer * GEOMETRY.experts + expert]
            assert np.array_equal(data[: len(wanted)], wanted), (layer, expert)
            seen.append(expert)
        assert sorted(seen) == routing.demand(experts.step.valid)
        return routing, iter(())

    experts.serve = checked


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    codec=st.sampled_from(["none", "rans"]),
    engine=st.sampled_from(["pread", "mmap"]),
    slots=st.sampled_from([3, 6, 16]),
    host=st.sampled_from([0, 3, 6, 20]),
    pool=st.sampled_from([0, 1, 2]),
    wave=st.sampled_from([0, 1]),
    late=st.booleans(),
    keeps=st.booleans(),
    scratch=st.sampled_from([0, 1, 3]),
    grouped=st.booleans(),
    lossy=st.booleans(),
    wall=st.booleans(),
)
def test_right_bytes_whatever_moves(packs, **options):
    check_run(packs, **options)


@pytest.mark.parametrize("host", [3, 6, 20])
@pytest.mark.parametrize("lossy", [False, True])
def test_a_host_that_keeps_nothing_computes_on_what_passes_through(packs, host, lossy):
    for seed in range(8):
        check_run(packs, seed, slots=16, host=host, keeps=False, scratch=3, lossy=lossy, wall=False)


def check_run(
    packs, seed, slots, host, codec="none", engine="pread", pool=0, wave=0, late=False, keeps=True, scratch=0,
    grouped=False, lossy=False, wall=True,
):  # fmt: skip
    """Replay a trace with these ways of moving experts, checking everything that is served."""
    pack, truth = packs[codec]
    reader = open_engine(engine, pack, threads=2, **({"coded": True} if host and pack.coded else {}))
    if lossy:
        losing_prefetches(reader, np.random.default_rng(seed))
    size = max(pack.slot_bytes, reader.buffer_bytes)

    def tier(name, count):
        arena = aligned_buffer(count * size).reshape(count, size)
        return Tier(name, count, size, GEOMETRY.layers, GEOMETRY.experts, "shared", arena)

    counts = {"device": slots, "host": host, "scratch": scratch if host and not pack.coded else 0}
    tiers = {name: tier(name, count) for name, count in counts.items() if count}

    def buffer(name, slot):
        return tiers[name].arena[slot]

    places = Places(pack.position(np.arange(pack.keys)))
    timeline = WallTimeline(reader, buffer) if wall else FilledTimeline(costs(), reader, buffer, places)
    watch, beside = Watch(), tiers.get("scratch")
    rules = Rules(bool(host) and keeps, keeps, late, pool, wave)
    moved = [tiers[name] for name in ("device", "host") if name in tiers]
    hooks = Hooks([Wild(seed, grouped), watch])
    experts = watch.experts = Experts(GEOMETRY, moved, timeline, hooks, rules, places, beside)
    check_served(experts, truth)
    try:
        replay(make_trace(16, seed=seed), experts, batch=1 + seed % 2, chunk=3)
    finally:
        timeline.close()
    assert all(record.lost == 0 or lossy for record in watch.records)


class Together:
    """Reads what is missing of a layer as one request."""

    @hookimpl
    def plan_reads(self, keys):
        return [tuple(keys)]


@pytest.mark.parametrize("codec", ["none", "rans"])
@pytest.mark.parametrize("plugins", [[], [Together()]])
def test_what_a_measured_run_books_is_what_was_read_in_whole_pages(packs, codec, plugins):
    pack, _ = packs[codec]
    reader = open_engine("pread", pack, threads=2, block_bytes=0)
    arena = aligned_buffer(6 * pack.slot_bytes).reshape(6, -1)
    device = Tier("device", 6, pack.slot_bytes, *SHAPE[:2], "shared", arena)
    timeline, watch = WallTimeline(reader, lambda name, slot: arena[slot]), Watch()
    places = Places(pack.position(np.arange(pack.keys)))
    replay(make_trace(16), Experts(GEOMETRY, [device], timeline, Hooks([*plugins, watch]), places=places), chunk=1)
    timeline.close()
    beyond = sum(record.read_bytes for record in watch.records) - reader.bytes_read
    assert 0 <= beyond < PAGE * reader.calls
    assert not plugins or reader.calls < reader.requests


class Random:
    """Evicts anything."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    @hookimpl
    def evict(self, need, candidates):
        return self.rng.permutation(candidates)[:need]


@pytest.mark.parametrize("pool", [0, 2])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_wave_needs_and_the_host_holds_is_not_read_again(pool, late):
    class Unread(Watch):
        needed = 0

        @hookimpl
        def acquired(self, keys, view):
            self.needed += int((~view.resident(keys) & ~view.resident(keys, "host")).sum())

    watch = Unread()
    experts = watch.experts = make_experts([Random(), watch], 8, host=16, pool=pool, late_eviction=late)
    replay(make_trace(80), experts, chunk=1)
    assert sum(record.read_bytes for record in watch.records) == watch.needed * GEOMETRY.slot_bytes
    assert watch.needed < sum(record.demand_reads for record in watch.records)
