"""Bounds that hold for every trace: Belady is optimal, uniform routing gives C/N, LRU never loses by more slots."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.residency.policies import CAUSAL, POLICIES
from moebench.residency.replay import events, hit_rates, replay
from moebench.trace.format import Trace
from moebench.trace.synthetic import SyntheticSpec, synthesize, uniform


def decode_trace(ids, experts):
    """A trace of one sequence, all decode, from ids [T, L, k]."""
    ids = np.asarray(ids, np.int16)
    return Trace(
        experts=ids,
        phase=np.ones(len(ids), np.int8),
        sequence=np.zeros(len(ids), np.int32),
        position=np.arange(len(ids), dtype=np.int32),
        metadata={"model": "toy", "source": "test", "experts": experts, "top_k": ids.shape[2]},
    )


@st.composite
def traces(draw, max_tokens=40, max_experts=12, max_layers=3):
    """Random small decode traces with some skew, so that there is something to cache."""
    experts = draw(st.integers(2, max_experts))
    k = draw(st.integers(1, min(3, experts)))
    layers, tokens = draw(st.integers(1, max_layers)), draw(st.integers(1, max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    appeal = rng.random((1, layers, experts)) * draw(st.sampled_from([0.0, 1.0, 3.0]))
    ids = np.argsort(rng.random((tokens, layers, experts)) + appeal, axis=-1)[..., :k]
    return decode_trace(ids, experts)


def slots_for(trace, draw_share, scope):
    least = trace.top_k * (trace.layers if scope == "per_layer" else 1)
    return least + int(draw_share * (trace.layers * trace.expert_count - least))


@settings(max_examples=60, deadline=None)
@given(trace=traces(), share=st.floats(0, 1), scope=st.sampled_from(["shared", "per_layer"]))
def test_belady_bounds_every_demand_policy(trace, share, scope):
    slots = slots_for(trace, share, scope)
    misses = {name: replay(trace, name, slots, scope).misses for name in POLICIES}
    assert all(misses["belady"] <= misses[name] for name in CAUSAL), misses
    assert misses["belady_bypass"] <= misses["belady"]


def exhaustive(todo, slots, bypass):
    """Fewest misses of any schedule: every choice of what to keep, tried out."""
    states = {frozenset(): 0}
    for keys in todo.keys:
        event, following = frozenset(keys.tolist()), {}
        pinned = frozenset() if bypass else event
        for held, before in states.items():
            loose = (held | event) - pinned
            misses = before + len(event - held)
            room = min(len(loose), slots - len(pinned))
            for kept in combinations(sorted(loose), room):
                after = pinned | frozenset(kept)
                following[after] = min(misses, following.get(after, misses))
        states = following
    return min(states.values())


@settings(max_examples=40, deadline=None)
@given(trace=traces(max_tokens=12, max_experts=6, max_layers=1), spare=st.integers(0, 3))
def test_belady_is_the_exhaustive_optimum(trace, spare):
    slots = trace.top_k + spare
    todo = events(trace)
    assert replay(trace, "belady", slots).misses == exhaustive(todo, slots, bypass=False)
    assert replay(trace, "belady_bypass", slots).misses == exhaustive(todo, slots, bypass=True)


@settings(max_examples=15, deadline=None)
@given(trace=traces(max_tokens=6, max_experts=3, max_layers=2), spare=st.integers(0, 2))
def test_belady_is_the_exhaustive_optimum_over_layers(trace, spare):
    slots = trace.top_k + spare
    assert replay(trace, "belady", slots).misses == exhaustive(events(trace), slots, bypass=False)


def test_bypass_gains_somewhere():
    results = [replay(TRACE, name, 40, "per_layer").misses for name in ("belady_bypass", "belady")]
    assert results[0] < results[1]


UNIFORM = uniform(SyntheticSpec(layers=2, experts=32, top_k=4, sequences=1, prefill=0, decode=2000))
TRACE = synthesize(SyntheticSpec(layers=8, experts=32, top_k=4, sequences=2, prefill=0, decode=150))


@pytest.mark.parametrize("slots", [8, 20])
def test_uniform_routing_gives_every_causal_policy_its_share(slots):
    for name in CAUSAL:
        assert replay(UNIFORM, name, 2 * slots, "per_layer").hit_rate == pytest.approx(slots / 32, abs=0.02), name
    foresight = replay(UNIFORM, "belady", 2 * slots, "per_layer").hit_rate
    assert foresight > slots / 32 + 0.1, "the control tells foresight from luck"


@settings(max_examples=30, deadline=None)
@given(trace=traces(), scope=st.sampled_from(["shared", "per_layer"]))
def test_lru_and_belady_never_lose_by_more_slots(trace, scope):
    pools = trace.layers if scope == "per_layer" else 1
    for name in ("lru", "belady"):
        hits = [replay(trace, name, pools * n, scope).hits for n in range(trace.top_k, trace.expert_count + 1)]
        assert all(a <= b for a, b in pairwise(hits)), name


def test_a_shared_lru_below_one_cycle_never_hits():
    cycle = TRACE.layers * TRACE.top_k
    cliff = (TRACE.layers - 1) * TRACE.top_k
    assert replay(TRACE, "lru", cliff).hits == 0
    assert replay(TRACE, "lru", 2 * cycle).hits > 0
    assert replay(TRACE, "lru", cycle, "per_layer").hits > 0, "the same slots split by layer do hit"
    assert replay(TRACE, "belady", cliff).hits > 0


def test_hit_rates_rank_as_they_must():
    rates = hit_rates(TRACE, fractions=(0.25, 0.5))
    assert set(rates) == set(POLICIES)
    for share in ("0.25", "0.5"):
        best = max(rates[name][share] for name in CAUSAL)
        assert rates["random"][share] < best < rates["belady"][share] <= rates["belady_bypass"][share]
