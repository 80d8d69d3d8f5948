"""Cache replay: counts add up, slots are never exceeded, events in progress are safe, and wrong use is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moebench.residency.policies import POLICIES, make_policy
from moebench.residency.replay import events, hit_rates, replay
from moebench.trace.format import Trace
from moebench.trace.synthetic import SyntheticSpec, synthesize

TRACE = synthesize(SyntheticSpec(layers=3, experts=24, top_k=3, sequences=3, prefill=20, decode=40))


@pytest.mark.parametrize("scope", ["shared", "per_layer"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("slots", [9, 30])  # 9: prefill chunks need waves
def test_counts_add_up_and_slots_are_never_exceeded(name, scope, slots):
    todo = events(TRACE, chunk=8)
    result = replay(TRACE, name, slots, scope, chunk=8, victims=True)
    room = slots // (TRACE.layers if scope == "per_layer" else 1)
    assert result.requests == sum(map(len, todo.keys)) == result.hits + result.misses
    assert result.decode_requests == 3 * 40 * 3 * 3
    assert sum(map(len, result.victims)) == result.evictions
    held: set[int] = set()
    misses = 0
    for keys, layer, gone in zip(todo.keys, todo.layer, result.victims, strict=True):
        event = set(keys.tolist())
        misses += len(event - held)
        assert set(gone) <= held | event, "only what was there leaves"
        if len(event) <= room and not POLICIES[name].bypass:
            assert not set(gone) & event, "an event in progress is no victim"
        held = (held | event) - set(gone)
        pool = {key for key in held if scope == "shared" or key // 24 == layer}
        assert len(pool) <= room
    assert misses == result.misses, "replaying the victims reproduces the misses"


def test_a_policy_driven_by_hand_chooses_the_same_victims():
    for name in ("lru", "decayed_lfu", "slru", "belady"):
        todo = events(TRACE)
        options = {"future": todo.keys} if name == "belady" else {}
        policy = make_policy(name, 72, 63, 3, pools=3, **options)
        held: set[int] = set()
        for keys, layer, gone in zip(
            todo.keys, todo.layer, replay(TRACE, name, 65, "per_layer", victims=True).victims, strict=True
        ):
            event = keys.tolist()
            policy.access(event, [key in held for key in event])
            others = np.array([key for key in held if key // 24 == layer and key not in event][::-1], np.int64)
            short = len(others) + len(event) - 21  # 65 slots split three ways
            mine = policy.victims(others, short).tolist() if short > 0 else []
            assert mine == gone
            held = (held | set(event)) - set(mine)


def test_one_seed_one_result_and_events_may_be_reused():
    todo = events(TRACE)
    for name in POLICIES:
        first, second = (replay(source, name, 20, victims=True) for source in (TRACE, todo))
        assert first.victims == second.victims


def test_prefill_chunks_share_their_demand():
    whole, rows = (replay(TRACE, "lru", 72, chunk=n) for n in (128, 1))
    assert whole.requests < rows.requests
    assert whole.misses == rows.misses, "with room for all, each expert is loaded once however it is asked for"
    assert whole.decode_requests == rows.decode_requests
    assert len(events(TRACE, 20).keys) == len(events(TRACE, 128).keys), "a chunk never spans two sequences"
    with pytest.raises(ValueError, match="chunk"):
        events(TRACE, 0)


def test_absent_experts_demand_nothing():
    ids = np.array([[[0, 1]], [[-1, -1]], [[1, -1]]], np.int16)
    trace = Trace(
        experts=ids,
        phase=np.ones(3, np.int8),
        sequence=np.zeros(3, np.int32),
        position=np.arange(3, dtype=np.int32),
        metadata={"model": "toy", "source": "test", "experts": 2, "top_k": 2},
    )
    result = replay(trace, "lru", 2)
    assert (result.requests, result.hits) == (3, 1)
    assert events(trace).step.tolist() == [0, 2]
    empty = replay(replace(trace, experts=np.full_like(ids, -1)), "belady", 2)
    assert (empty.requests, empty.hit_rate) == (0, None)


def test_refetches_are_misses_soon_after_leaving():
    def of(order):
        ids = np.array(order, np.int16)[:, None, None]
        n = len(order)
        meta = {"model": "toy", "source": "test", "experts": 9, "top_k": 1}
        rows = (np.ones(n, np.int8), np.zeros(n, np.int32), np.arange(n, dtype=np.int32))
        return replay(Trace(ids, *rows, metadata=meta), "lru", 1)

    assert of([0, 1, 0]).refetches == 1
    assert of([0, 1, 1, 1, 1, 1, 0]).refetches == 1  # left in step 1, back in step 6
    assert of([0, 1, 1, 1, 1, 1, 1, 0]).refetches == 0


def test_too_few_slots_and_unknown_words_are_refused():
    with pytest.raises(ValueError, match="smallest legal number is 3"):
        replay(TRACE, "lru", 2)
    with pytest.raises(ValueError, match="smallest legal number is 9"):
        replay(TRACE, "lru", 8, "per_layer")
    with pytest.raises(ValueError, match="shared, per_layer"):
        replay(TRACE, "lru", 9, "layer")
    for call in (lambda: replay(TRACE, "mru", 9), lambda: hit_rates(TRACE, policies=("mru",))):
        with pytest.raises(ValueError, match="'mru' is not one of lru"):
            call()
