"""Acquisition keeps its promises under any legal plugin: every demanded expert once, budgets, leases, bytes
conserved.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Adversary, Watch, make_experts, make_trace, run_context
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.engine.loop import replay, replay_steps
from moebench.errors import PluginError
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.residency.replay import replay as cache_replay
from moebench.residency.tier import IN_FLIGHT, LEASED
from moebench.step import Routing


def served(experts, trace, batch=1, chunk=4):
    """Run a trace; returns per event the experts that were yielded, checking leases while each is in use."""
    out = []
    for step, rows, _ in replay_steps(trace, batch, chunk):
        experts.begin(step)
        for layer in range(GEOMETRY.layers):
            routing, items = experts.serve(layer, None, Routing(trace.experts[rows][:, layer], None))
            got = []
            for expert, _ in items:
                slot = experts.device.slot(GEOMETRY.key(layer, expert))
                assert experts.device.state[slot] == LEASED
                assert int((experts.device.state != 0).sum()) <= experts.device.slots
                got.append(expert)
            out.append((routing.demand(step.valid), got))
            assert LEASED not in experts.device.state
        experts.end()
    experts.drain()
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(3, 60),
    scope=st.sampled_from(["shared", "per_layer"]),
    host=st.sampled_from([0, 3, 7, 30]),
    batch=st.integers(1, 3),
)
def test_every_demanded_expert_is_served_once_whatever_the_plugin_does(seed, slots, scope, host, batch):
    if scope == "per_layer":
        slots = max(slots, 3 * GEOMETRY.layers)
    watch = Watch()
    experts = make_experts([Adversary(seed), watch], slots, scope, host)
    watch.experts = experts
    for demand, got in served(experts, make_trace(24, 2, 4, seed), batch):
        assert sorted(got) == demand
    experts.check_integrity()
    assert not experts.in_flight
    assert not experts.loading
    assert IN_FLIGHT not in experts.device.state


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(4, 48), host=st.sampled_from([0, 9]))
def test_bytes_read_are_demand_plus_prefetch_and_a_joined_read_counts_once(seed, slots, host):
    watch = Watch()
    experts = make_experts([Adversary(seed), watch], slots, host=host)
    served(experts, make_trace(24, 2, 4, seed))
    reads = sum(r.demand_reads + r.prefetch_reads for r in watch.records)
    booked = sum(r.read_bytes for r in watch.records)
    assert booked == experts.timeline.storage_bytes
    if not host:  # with a host tier a read may be answered there
        assert booked == reads * GEOMETRY.slot_bytes
    misses = sum(r.misses for r in watch.records)
    late = sum(sum(r.late) for r in watch.records)
    assert misses + late <= sum(sum(r.requests) for r in watch.records)


@pytest.mark.parametrize("scope", ["shared", "per_layer"])
@pytest.mark.parametrize("system", ["lru", "lfu", "decayed_lfu", "slru", "random", "belady"])
def test_the_loop_and_the_cache_replay_evict_the_same_victims_one_by_one(system, scope):
    trace, slots, log = make_trace(60, 3, 5, 7), 20, []
    spec = load_plugins().system(system)
    future = [(e[0], e[1]) for e in demand_events(trace)] if spec.oracle else None
    plugin = spec.make(spec.config(), run_context(slots, scope, future))

    class Log:
        @hookimpl
        def acquired(self, layer):
            log.append([])

    evict = plugin.policy.victims
    plugin.policy.victims = lambda candidates, need: (
        log[-1].extend(v := evict(candidates, need).tolist()) or np.array(v)
    )
    experts = make_experts(
        [Log(), plugin], slots, scope
    )  # bound last first: Log opens the event before the policy acts
    replay(trace, experts, chunk=4)
    expected = cache_replay(trace, system, slots, scope, chunk=4, victims=True).victims
    assert [sorted(v) for v in log] == [sorted(v) for v in expected]
    assert sum(map(len, log)) > 50


def demand_events(trace):
    """All events of a trace as (layer, keys)."""
    watch = Watch()
    served(make_experts([watch], 48), trace)
    return [(layer, keys) for layer, keys, _ in watch.events]


def test_a_demand_larger_than_the_budget_runs_in_waves_and_loads_each_expert_once():
    watch = Watch()
    experts = make_experts([watch], slots=3)
    trace = make_trace(12, 1, 12, 3)  # one prompt, so that chunks demand many experts at once
    for demand, got in served(experts, trace, chunk=12):
        assert sorted(got) == demand
    assert sum(r.demand_reads for r in watch.records) == sum(r.misses for r in watch.records)
    assert max(r.waves for r in watch.records) > GEOMETRY.layers


def test_resident_slots_hit_always_and_ondemand_never():
    registry, trace = load_plugins(), make_trace(30, 1, 4, 5)
    for system, slots, expected in (("resident", GEOMETRY.keys, 1.0), ("ondemand", GEOMETRY.top_k, 0.0)):
        spec, watch = registry.system(system), Watch()
        experts = make_experts([spec.make(spec.config(), run_context(slots)), watch], slots)
        if spec.sizing == "full":
            experts.preload()
        served(experts, trace)
        ready = [r for _, _, event in watch.events for r in event]
        assert np.mean(ready) == expected


def test_a_plugin_that_breaks_a_hook_is_named_at_once():
    class Greedy:
        @hookimpl
        def evict(self, candidates):
            return [10**6]

    class Forgetful:
        @hookimpl
        def plan_reads(self, keys):
            return keys[:-1]

    for plugin, word in ((Greedy(), "evict"), (Forgetful(), "plan_reads")):
        with pytest.raises(PluginError, match=word):
            served(make_experts([plugin], 4), make_trace())


def test_prefetched_experts_turn_misses_into_hits_and_joins():
    trace = make_trace(40, 1, 2, 9)
    upcoming = iter([keys for _, keys in demand_events(trace)][1:])

    class Prophet:
        @hookimpl
        def prefetch(self, point):
            return next(upcoming, None) if isinstance(point, int) else None

    plain, told = Watch(), Watch()
    served(make_experts([plain], 12), trace)
    served(make_experts([Prophet(), told], 12), trace)

    def total(watch, name):
        return sum(getattr(r, name) if name in ("stall_s", "misses") else sum(getattr(r, name)) for r in watch.records)

    assert total(told, "misses") < 0.2 * total(plain, "misses")
    assert total(told, "stall_s") < 0.8 * total(plain, "stall_s")
    assert total(told, "late") > 0


def test_a_host_tier_serves_what_the_device_dropped_without_reading_again():
    trace = make_trace(40, 1, 2, 11)
    one, two = Watch(), Watch()
    alone = make_experts([one], 12)
    backed = make_experts([two], 12, host=GEOMETRY.keys)
    served(alone, trace)
    served(backed, trace)
    distinct = len({k for _, keys, _ in one.events for k in keys})
    assert backed.timeline.storage_bytes == distinct * GEOMETRY.slot_bytes < alone.timeline.storage_bytes
