"""Late eviction: reads go out before victims are asked for, the same experts leave, and time is won."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Adversary, Watch, costs, make_experts, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.engine.loop import replay
from moebench.hookspecs import hookimpl
from moebench.step import DECODE
from moebench.timeline.virtual import VirtualTimeline

SIZES = ((True, 20), (False, 20), (False, 16))


class Slow:
    """Evicts the lowest keys and takes a while to say so; writes down what happens in which order."""

    def __init__(self, syncs=1) -> None:
        self.syncs, self.log = syncs, []

    @hookimpl
    def acquired(self, step, layer, keys, ready):
        self.log.append(("need", step.phase, sum(not hit for hit in ready)))

    @hookimpl
    def evict(self, tier, need, candidates, view):
        if tier == "device":
            self.log.append(("evict", *sorted(candidates.tolist())[:need]))
            view.account(syncs=self.syncs)
        return np.sort(candidates)[:need]


class Spy(VirtualTimeline):
    """A clock that writes its reads into the system's log."""

    def __init__(self, log, **changes) -> None:
        super().__init__(costs(**changes))
        self.log = log

    def read(self, keys, slots, tier, priority, together=()):
        self.log.append(("read", *keys))
        return super().read(keys, slots, tier, priority, together)


def run(late, host, scope="per_layer", slots=20, syncs=1, chunk=4, sync_s=2e-4, keep=False):
    plugin, watch = Slow(syncs), Watch()
    timeline = Spy(plugin.log, host_sync_s=sync_s)
    experts = make_experts([plugin, watch], slots, scope, host, timeline, keep_evicted=keep)
    experts.rules, watch.experts = replace(experts.rules, late_eviction=late), experts
    replay(make_trace(60), experts, chunk=chunk)
    return plugin.log, watch


def seconds(watch):
    return sum(r.duration_s for r in watch.records if r.step.phase == DECODE)


def between_demands(log):
    """Kinds of what happened in each demand of a decode step that missed something."""
    found, decode = [], False
    for kind, *rest in log:
        if kind == "need":
            decode = rest[0] == DECODE and rest[1] > 0
            if decode:
                found.append([])
        elif decode:
            found[-1].append(kind)
    return found


@pytest.mark.parametrize("scope", ["per_layer", "shared"])
@pytest.mark.parametrize("host", [0, 12])
def test_reads_go_out_before_victims_are_asked_for(scope, host):
    both = {"read", "evict"}  # what the host tier still holds is copied up without a read
    early, late = (between_demands(run(on, host, scope)[0]) for on in (False, True))
    assert {d[0] for d in early if both <= set(d)} == {"evict"}
    first = [d[0] for d in late if both <= set(d)]
    assert first.count("read") >= 0.98 * len(first)  # one memory: the last demand may have taken the spare


def test_with_a_host_tier_the_same_experts_leave_and_the_choice_is_overlapped():
    (early, slow), (late, fast) = (run(on, 12) for on in (False, True))
    for kind in ("evict", "need"):
        assert [e for e in early if e[0] == kind] == [e for e in late if e[0] == kind]
    choices = sum({"read", "evict"} <= set(d) for d in between_demands(early))
    assert seconds(fast) < seconds(slow) - 0.8 * choices * 2e-4, "a choice of 0.2 ms hides behind reads of 1 ms"
    free = [seconds(run(on, 12, syncs=0)[1]) for on in (False, True)]
    assert free[0] == pytest.approx(free[1], rel=0.02), "a choice that takes no time has nothing to hide"
    kept = [seconds(run(on, 12, syncs=0, keep=True)[1]) for on in (False, True)]
    assert kept[1] < kept[0], "copies down to a host cache are overlapped as well"


def test_on_one_memory_a_slot_of_each_layer_stays_free():
    _, watch = run(True, 0, chunk=1)
    held = watch.experts.device
    assert [held.free_slots(layer) for layer in range(GEOMETRY.layers)] == [1] * GEOMETRY.layers
    misses = [sum(r.misses for r in run(on, 0, slots=n, chunk=1)[1].records) for on, n in SIZES]
    assert misses[1] < misses[0] == misses[2], "which costs the misses of a cache smaller by it"
    fast, _, slow = (seconds(run(on, 0, slots=n, sync_s=5e-4)[1]) for on, n in SIZES)
    assert fast < slow


@settings(max_examples=25)
@given(
    seed=st.integers(0, 999), host=st.sampled_from([0, 4, 9, 30]), slots=st.integers(12, 40),
    scope=st.sampled_from(["per_layer", "shared"]), chunk=st.integers(1, 6),
)  # fmt: skip
def test_an_adversary_breaks_nothing(seed, host, slots, scope, chunk):
    watch = Watch()
    experts = make_experts([Adversary(seed), watch], slots, scope, host)
    experts.rules, watch.experts = replace(experts.rules, late_eviction=True), experts
    trace = make_trace(30, seed=seed)
    replay(trace, experts, batch=2, chunk=chunk)
    experts.check_integrity()
    if not host:
        reads = sum(r.demand_reads + r.prefetch_reads for r in watch.records)
        assert sum(r.read_bytes for r in watch.records) == reads * GEOMETRY.slot_bytes
    other = Watch()
    replay(trace, make_experts([Adversary(seed), other], slots, scope, host), batch=2, chunk=chunk)
    assert [r.requests for r in watch.records] == [r.requests for r in other.records]


@pytest.mark.parametrize("late", [False, True])
def test_where_every_expert_has_a_slot_nothing_is_evicted(late):
    _, watch = run(late, 0, slots=GEOMETRY.keys, chunk=1)
    assert sum(r.evictions for r in watch.records) == 0
    assert sum(r.demand_reads for r in watch.records) == len(
        watch.experts.device.resident(range(GEOMETRY.keys)).nonzero()[0]
    )
