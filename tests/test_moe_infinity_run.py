"""MoE-Infinity in replay: what is read ahead and what leaves keep their rules, and no byte is lost."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Watch, make_experts, make_trace
from moe_infinity_fixtures import Logged, options, run, total

from moebench.engine.loop import replay
from moebench.hookspecs import hookimpl
from moebench.residency.policies import make_policy
from moebench.step import DECODE, PREFILL
from moebench.systems.moe_infinity import MoeInfinityConfig
from moebench.systems.moe_infinity.matrices import Activity
from moebench.systems.moe_infinity.replacement import FEW, Replacement

LAWS = ("activation", "incache", "incache_decayed", "lru")


@pytest.mark.parametrize(("scope", "host"), [("shared", 0), ("per_layer", 0), ("shared", 8)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("match", ["observed", "masked", "off"])
def test_only_later_layers_are_read_ahead_and_nothing_twice(scope, host, batch, match):
    slots = 24 if scope == "shared" else 28
    system, watch, _ = run(options(match=match), scope=scope, slots=slots, host=host, batch=batch)
    assert len(system.reads) > 50
    for _, point, keys, at_hand in system.reads:
        assert not at_hand
        assert len(set(keys)) == len(keys)
        assert all(key // GEOMETRY.experts > point for key in keys)
    counted = system.report()
    assert counted["prefetched"] == total(watch, "prefetch_reads") - total(watch, "cancelled") > 0
    assert counted["hits"] + counted["late"] + counted["left_unused"] <= counted["prefetched"]


def test_reads_ahead_follow_the_priorities():
    seen = []

    class Checked(Logged):
        @hookimpl
        def prefetch(self, step, point, view):
            keys = super().prefetch(step, point, view)
            if keys is not None and len(keys):
                layer = keys // GEOMETRY.experts
                score = (self.expected.ravel()[keys] + 1e-8) * (1 - (layer - point) / GEOMETRY.layers)
                seen.append((np.diff(score) <= 1e-15).all())
            return keys

    run(options(ahead=6), slots=30, cls=Checked)
    assert len(seen) > 50
    assert all(seen)


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_are_on_their_way_than_asked_for(ahead):
    flying = []

    class Checked(Logged):
        @hookimpl
        def begin_step(self):
            super().begin_step()

        @hookimpl
        def evict(self, tier, need, candidates, view):
            flying.append(int(view.in_flight(np.flatnonzero(self.fresh)).sum()))
            return super().evict(tier, need, candidates, view)

    system, *_ = run(options(ahead=ahead), slots=20, cls=Checked)
    assert max(len(keys) for *_, keys, _ in system.reads) == ahead
    assert max(flying) <= ahead


def test_a_longer_window_lets_more_through():
    """Reads do not get faster; the time between layers grows."""
    most = {}
    for dense in (1e-4, 3e-3, 3e-2):
        system, *_ = run(MoeInfinityConfig(), make_trace(80, 2), dense_layer_s=dense)
        most[dense] = max(len(keys) for step, _, keys, _ in system.reads if step.phase == DECODE)
    assert most[1e-4] < most[3e-3] < most[3e-2]


def test_a_read_that_costs_more_to_start_than_it_may_save_is_left():
    """The host's time per load rises: fewer reads ahead, then none; a fixed number goes on at any cost."""
    reads = {}
    for host_s in (0.0, 4e-4, 3e-3):
        _, watch, _ = run(MoeInfinityConfig(), make_trace(80, 2), dense_layer_s=3e-3, load_host_s=host_s)
        reads[host_s] = total(watch, "prefetch_reads")
    assert reads[0.0] > reads[4e-4] > reads[3e-3] == 0
    _, watch, _ = run(options(ahead=2), make_trace(80, 2), dense_layer_s=3e-3, load_host_s=3e-3)
    assert total(watch, "prefetch_reads") > 0


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("host", [0, 8])
def test_what_was_read_ahead_leaves_for_a_demand_only_and_then_last(law, host):
    system, *_ = run(options(replace=law, ahead=4), slots=14, host=host)
    ahead = [v for v in system.victims if v[0] == "device" and v[2]]
    demand = [v for v in system.victims if v[0] == "device" and not v[2]]
    assert ahead
    assert demand
    for _, victims, _, fresh, _ in ahead:
        assert not any(fresh[key] for key in victims)
    for _, victims, _, fresh, candidates in demand:
        lost = [key for key in victims if fresh[key]]
        if lost:
            plain = [key for key in candidates if not fresh[key]]
            assert set(plain) <= set(victims)


def test_victims_of_the_papers_law_are_known():
    """Equal ratios: the deeper layer leaves; within a layer the lower ratio; what was never used before all."""
    activity = Activity(2, 4)
    activity.ratio = np.array([[0.5, 0.25, 0.25, 0.0], [0.5, 0.25, 0.25, 0.0]])
    law = Replacement("activation", activity)
    nobody = np.zeros(8, bool)
    order = law.worst(np.arange(8), 8, nobody).tolist()
    assert order[:2] == [7, 3]  # epsilon, deep before shallow
    assert order[2:4] == [5, 6]  # 0.125, the lower key first
    assert order[4:] == [4, 1, 2, 0]  # 0.25 thrice, epsilon telling the deeper one apart, then 0.5
    protected = np.isin(np.arange(8), [7, 3])
    assert law.worst(np.arange(8), 3, protected).tolist() == [5, 6, 4]
    assert law.worst(np.arange(8), 8, protected).tolist()[-2:] == [7, 3]


@pytest.mark.parametrize("law", LAWS)
def test_a_few_victims_are_those_of_the_whole_order(law):
    rng = np.random.default_rng(3)
    activity = Activity(6, 8)
    activity.ratio = rng.integers(0, 3, (6, 8)) / 3
    replacement = Replacement(law, activity)
    for _ in range(30):
        replacement.begin_step()
        replacement.access(rng.choice(48, 3, replace=False))
    keys, protected = rng.permutation(48)[:30], rng.random(30) < 0.2
    whole = replacement.worst(keys, 30, protected).tolist()
    for need in range(1, FEW + 4):
        assert replacement.worst(keys, need, protected).tolist() == whole[:need]


@pytest.mark.parametrize(("law", "policy"), [("lru", "lru"), ("incache", "lfu")])
def test_without_prefetch_two_laws_are_classic_caches(law, policy):
    """Dispatches that are never forgotten are plain frequency, whatever the name says."""

    class Classic:
        def __init__(self):
            self.policy = make_policy(policy, GEOMETRY.keys, 20, GEOMETRY.layers)

        @hookimpl
        def acquired(self, keys, ready):
            self.policy.access(keys, ready)

        @hookimpl
        def evict(self, need, candidates):
            return self.policy.victims(candidates, need)

    watch = Watch()
    trace = make_trace(160, 2)
    replay(trace, make_experts([Classic(), watch], slots=20), chunk=4)
    _, own, _ = run(options(prefetch=False, replace=law), trace)
    assert total(own, "demand_reads") == total(watch, "demand_reads") > 100


@pytest.mark.parametrize("law", LAWS)
def test_no_law_misses_less_than_belady(law):
    trace = make_trace(160, 2)
    events = []

    class Recorded:
        @hookimpl
        def acquired(self, keys):
            events.append(np.array(keys))

    replay(trace, make_experts([Recorded()], slots=48), chunk=4)
    best = make_policy("belady", GEOMETRY.keys, 20, GEOMETRY.layers, future=list(events))

    class Oracle:
        @hookimpl
        def acquired(self, keys, ready):
            best.access(keys, ready)

        @hookimpl
        def evict(self, need, candidates):
            return best.victims(candidates, need)

    bound, watch = Watch(), None
    replay(trace, make_experts([Oracle(), bound], slots=20), chunk=4)
    _, watch, _ = run(options(prefetch=False, replace=law), trace)
    misses = [sum(total(w, "demand_reads", phase) for phase in (PREFILL, DECODE)) for w in (bound, watch)]
    assert misses[0] <= misses[1]
