"""Neighbours read together, few buffers, experts computed on the host: what changes is requests and time, not bytes."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Adversary, Watch, costs, make_experts, make_trace, run_context
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.engine.loop import replay
from moebench.errors import PluginError
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.residency.places import Places
from moebench.step import DECODE
from moebench.timeline.base import DEMAND, PREFETCH
from moebench.timeline.virtual import VirtualTimeline


class Coalesce:
    """Reads whatever of a layer is missing by one request, gaps included."""

    @hookimpl
    def plan_reads(self, keys, view):
        return [tuple(np.asarray(keys)[view.position(keys).argsort()].tolist())]


class OneByOne:
    """Waits for the whole layer, then computes."""

    @hookimpl
    def order_compute(self, ready, pending):
        return pending[0] if pending else list(ready)


class OnHost:
    """Computes the last ``count`` experts of a layer on the host."""

    def __init__(self, count) -> None:
        self.count = count

    @hookimpl
    def place(self, keys):
        return [i >= len(keys) - self.count for i in range(len(keys))]


class Residents:
    """Writes down what each tier holds after every step."""

    def __init__(self) -> None:
        self.seen = []

    @hookimpl
    def end_step(self, view):
        keys = np.arange(view.geometry.keys)
        self.seen.append([view.resident(keys, tier).tolist() for tier in view.tiers])


def lru(slots):
    """Victims that depend on no order of arrival."""
    spec = load_plugins().system("lru")
    return spec.make(spec.config(), run_context(slots))


def run(plugins, timeline=None, **options):
    watch = Watch()
    timeline = timeline or VirtualTimeline(costs(), Places.in_order(GEOMETRY.keys))
    slots = options.pop("slots", 16)
    experts = watch.experts = make_experts([*plugins, lru(slots), watch], slots, timeline=timeline, **options)
    replay(make_trace(60), experts, chunk=4)
    return experts, watch


@pytest.mark.parametrize("host", [0, 8])
def test_one_request_reads_neighbours_and_the_gaps_between_them(host):
    apart, together = (run(plugins, slots=16, host=host) for plugins in ([], [Coalesce()]))
    (one, _), (many, _) = together, apart
    assert many.timeline.storage_requests * GEOMETRY.slot_bytes == many.timeline.storage_bytes
    assert one.timeline.storage_requests < many.timeline.storage_requests
    assert one.timeline.storage_bytes > many.timeline.storage_bytes
    hits = [[(r.requests, r.hits) for r in watch.records] for _, watch in (apart, together)]
    assert hits[0] == hits[1]


def test_bytes_of_a_run_are_those_from_its_first_expert_to_its_last():
    timeline = VirtualTimeline(costs(), Places.in_order(48))
    tickets = timeline.read([3, 5, 9, 20], range(4), "device", DEMAND, (3, 1))
    assert sum(t.nbytes for t in tickets) == timeline.storage_bytes == 8 * GEOMETRY.slot_bytes
    assert timeline.storage_requests == 2
    assert tickets[0].done_s == tickets[1].done_s == tickets[2].done_s <= tickets[3].done_s


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from([DEMAND, PREFETCH]))
def test_reading_together_is_never_faster_than_its_bytes_allow(lengths, priority):
    timeline = VirtualTimeline(costs(), Places.in_order(48))
    count = sum(lengths)
    tickets = timeline.read(range(count), range(count), "device", priority, lengths)
    for ticket in tickets:
        timeline.wait(ticket)
    assert timeline.now() >= count * 1e-3 / 4 * (1 - 1e-9)
    assert timeline.storage_bytes == count * GEOMETRY.slot_bytes


def test_a_plan_may_only_reorder_and_group_ascending():
    class Wrong:
        def __init__(self, plan):
            self.plan = plan

        @hookimpl
        def plan_reads(self, keys):
            return self.plan(keys)

    for plan in (lambda keys: keys[:-1], lambda keys: [tuple(keys), keys[0]], lambda keys: [tuple(keys[::-1])]):
        with pytest.raises(PluginError, match="plan_reads"):
            run([Wrong(plan)])


@pytest.mark.parametrize("host", [0, 8])
@settings(max_examples=12)
@given(pool=st.integers(1, 6), seed=st.integers(0, 99))
def test_never_more_transfers_than_buffers(host, pool, seed):
    class Count(VirtualTimeline):
        most = 0

    timeline = Count(costs(), Places.in_order(GEOMETRY.keys))

    class Buffers:
        @hookimpl
        def acquired(self):
            timeline.most = max(timeline.most, len(experts.in_flight))

        @hookimpl
        def order_compute(self):
            timeline.most = max(timeline.most, len(experts.in_flight))

    watch = Watch()
    experts = watch.experts = make_experts(
        [Adversary(seed), Buffers(), watch], 16, host=host, timeline=timeline, pool=pool
    )
    replay(make_trace(30, seed=seed), experts, chunk=4)
    assert 0 < timeline.most <= pool


def test_fewer_buffers_take_longer_and_read_the_same():
    runs = [run([], slots=16, pool=pool) for pool in (1, 2, 4, 0)]
    seconds = [experts.timeline.now() for experts, _ in runs]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]
    assert len({experts.timeline.storage_bytes for experts, _ in runs}) == 1
    assert sum(r.pool_waits for r in runs[0][1].records) > sum(r.pool_waits for r in runs[-1][1].records) == 0


def test_landing_places_keep_nothing():
    (kept, _), (landing, watch) = (
        run([], slots=16, host=14, keep_landed=keep, keep_evicted=keep) for keep in (True, False)
    )
    assert landing.timeline.storage_bytes > kept.timeline.storage_bytes
    assert not (landing.host.state == 1).any()  # everything was copied up and let go
    assert landing.timeline.storage_bytes == sum(r.read_bytes for r in watch.records)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_where_experts_run_leaves_residency_alone(count):
    seen = []
    for plugins in ([], [OnHost(count)]):
        residents = Residents()
        experts, watch = run([*plugins, residents], slots=16, host=14, scratch=3)
        seen.append(residents.seen)
        on_host = sum(r.on_host for r in watch.records)
        assert (on_host > 0) == bool(plugins)
        assert experts.scratch.free_slots(0) == 3
    assert seen[0] == seen[1]


def test_the_host_computes_beside_the_device():
    def seconds(plugins, **changes):
        timeline = VirtualTimeline(costs(expert_s=5e-4, **changes), Places.in_order(GEOMETRY.keys))
        _, watch = run(plugins, slots=40, host=14, scratch=3, timeline=timeline)
        return sum(r.duration_s for r in watch.records if r.step.phase == DECODE)

    device, fast, slow = seconds([]), seconds([OnHost(1)], host_expert_s=5e-4), seconds([OnHost(1)], host_expert_s=9e-3)
    assert fast < device < slow
    assert seconds([OnHost(1)], host_expert_s=5e-4, host_trip_s=1e-3) > fast


def test_stages_overlap_only_across_what_is_handed_over():
    chip = costs(on_chip_s=1e-3, expert_row_s=1e-3 / 32, tile_rows=32)
    apart, together, overlapped = (VirtualTimeline(chip) for _ in range(3))
    for _ in range(4):
        apart.compute_experts(1, 1)
        overlapped.compute_experts(1, 1, overlap=True)
    together.compute_experts(4, 4)
    assert overlapped.busy_s() == pytest.approx(1e-3)
    overlapped.join()
    assert apart.now() == pytest.approx(8e-3)  # copy, compute, copy, compute
    assert together.now() == overlapped.now() == pytest.approx(5e-3)  # the next copy runs beside the compute


def test_an_expert_is_mapped_when_it_has_arrived():
    plain, mapped = VirtualTimeline(costs()), VirtualTimeline(costs(map_s=4e-4))
    ends = [[x.done_s for x in t.read(range(3), range(3), "device", DEMAND)] for t in (plain, mapped)]
    assert all(late - early >= 4e-4 * (1 - 1e-9) for early, late in zip(*ends, strict=True))


def test_grouped_compute_counts_once_and_waits_for_all():
    apart, together = (run(plugins, slots=16)[0] for plugins in ([], [OneByOne()]))
    assert together.timeline.now() >= apart.timeline.now()
    assert together.timeline.storage_bytes == apart.timeline.storage_bytes
