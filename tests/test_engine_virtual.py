"""The modeled clock: never backwards, demand before prefetch, throughput bounded by the device, stalls bounded by
reads.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Watch, costs, make_experts, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.engine.loop import replay
from moebench.timeline.base import DEMAND, PREFETCH
from moebench.timeline.virtual import VirtualTimeline

ACTION = st.tuples(st.sampled_from(["demand", "prefetch", "compute", "wait", "poll"]), st.integers(1, 6))


def issue(timeline, count, priority, first=0):
    return timeline.read(list(range(first, first + count)), list(range(count)), "device", priority)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTION, max_size=40))
def test_time_never_goes_back_and_the_device_never_exceeds_its_best_throughput(actions):
    timeline, tickets, then, issued = VirtualTimeline(costs()), [], 0.0, 0
    for name, size in actions:
        if name in ("demand", "prefetch"):
            tickets += issue(timeline, size, DEMAND if name == "demand" else PREFETCH, issued)
            issued += size
        elif name == "compute":
            timeline.compute_experts(size, size)
        elif name == "wait" and tickets:
            ticket = tickets[size % len(tickets)]
            assert timeline.wait(ticket) >= 0
            assert timeline.is_ready(ticket)
            assert ticket.done_s <= timeline.now()
            assert timeline.wait(ticket) == 0
        elif name == "poll" and tickets:
            timeline.is_ready(tickets[size % len(tickets)])
        assert timeline.now() >= then
        then = timeline.now()
    for ticket in tickets:
        timeline.wait(ticket)
    best = timeline.costs.read_s[-1]
    assert timeline.now() + 1e-12 >= issued * best  # no schedule beats the device at full depth
    done = sorted(t.done_s for t in tickets)
    assert all(t.done_s >= t.issued_s + best - 1e-12 for t in tickets)
    assert len(done) == issued


def test_a_lone_read_takes_the_latency_of_depth_one_and_a_batch_the_throughput_of_its_depth():
    timeline = VirtualTimeline(costs())
    (one,) = issue(timeline, 1, DEMAND)
    assert timeline.wait(one) == pytest.approx(1e-3)
    start = timeline.now()
    many = issue(timeline, 8, DEMAND, 10)
    for ticket in many:
        timeline.wait(ticket)
    assert timeline.now() - start == pytest.approx(8 * 1e-3 / 4)


def test_demand_waits_at_most_one_block_for_prefetch_that_was_there_first():
    alone, behind = VirtualTimeline(costs()), VirtualTimeline(costs())
    issue(behind, 30, PREFETCH, 100)
    stalls = [timeline.wait(issue(timeline, 1, DEMAND)[0]) for timeline in (alone, behind)]
    assert stalls[0] <= stalls[1] <= stalls[0] + behind.costs.block_s + 1e-12


def test_a_promoted_prefetch_overtakes_the_queue():
    timeline = VirtualTimeline(costs())
    tickets = issue(timeline, 20, PREFETCH)
    timeline.promote(tickets[-1])
    timeline.wait(tickets[-1])
    assert not timeline.is_ready(tickets[10])


def test_prefetch_is_free_when_compute_covers_it():
    timeline = VirtualTimeline(costs())
    tickets = issue(timeline, 4, PREFETCH)
    timeline.compute_experts(100, 100)  # 10 ms, the reads need 4
    assert [timeline.wait(t) for t in tickets] == [0.0] * 4


def test_the_page_cache_serves_what_it_holds_and_forgets_the_oldest():
    slots = 3
    timeline = VirtualTimeline(costs(page_cache_bytes=slots * GEOMETRY.slot_bytes))
    for key in (0, 1, 2):
        timeline.wait(issue(timeline, 1, DEMAND, key)[0])
    read = timeline.storage_bytes
    assert timeline.wait(issue(timeline, 1, DEMAND, 0)[0]) == pytest.approx(1e-5)
    assert timeline.storage_bytes == read
    timeline.wait(issue(timeline, 1, DEMAND, 3)[0])  # pushes out 1, the oldest
    timeline.wait(issue(timeline, 1, DEMAND, 1)[0])
    assert timeline.storage_bytes == read + 2 * timeline.costs.read_bytes


def test_a_copy_starts_after_its_read_and_copies_share_the_link():
    timeline = VirtualTimeline(costs())
    reads = issue(timeline, 3, DEMAND)
    copies = [timeline.copy(t.key, ("host", 0), ("device", 0), t) for t in reads]
    for ticket in copies:
        timeline.wait(ticket)
    for read, copy in zip(reads, copies, strict=True):
        assert copy.done_s >= read.done_s + timeline.costs.copy_s
    done = sorted(c.done_s for c in copies)
    assert np.diff(done).min() >= timeline.costs.copy_s - 1e-12


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), slots=st.integers(3, 48), factor=st.floats(1.1, 8.0))
def test_a_faster_disk_never_makes_a_run_slower_and_never_saves_more_than_its_read_time(seed, slots, factor):
    trace, slow, fast = make_trace(24, 2, 4, seed), costs(), costs()
    fast = dataclasses.replace(slow, read_s=(0.0, *[r / factor for r in slow.read_s[1:]]))
    took = []
    for chosen in (slow, fast):
        watch = Watch()
        experts = make_experts([watch], slots, timeline=VirtualTimeline(chosen))
        replay(trace, experts, chunk=4)
        took.append((experts.timeline.now(), sum(r.stall_s for r in watch.records)))
    assert took[1][0] <= took[0][0] + 1e-12
    assert took[0][0] - took[1][0] <= took[0][1] + 1e-12  # saving is bounded by the stall there was


def test_a_replay_gives_the_same_times_twice():
    def once():
        watch = Watch()
        experts = make_experts([watch], 17)
        replay(make_trace(40, 2, 6, 3), experts, batch=2, chunk=4)
        return [(r.started_s, r.ended_s, r.stall_s, r.read_bytes) for r in watch.records]

    assert once() == once()
