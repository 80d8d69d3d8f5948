"""Policy kernels: victims are a pure, order-free choice, ranks stay unique, and options change what leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.residency.policies import CAUSAL, POLICIES, PolicyError, make_policy
from moebench.residency.replay import events, replay
from moebench.trace.synthetic import SyntheticSpec, synthesize

KEYS, LAYERS = 24, 2
EVENTS = st.lists(
    st.tuples(st.integers(0, 1), st.sets(st.integers(0, 11), min_size=1, max_size=4)), min_size=1, max_size=30
)
TRACE = synthesize(SyntheticSpec(layers=4, experts=32, top_k=4, sequences=2, prefill=6, decode=80))


def built(name, future, **options):
    return make_policy(name, KEYS, 8, LAYERS, **({"future": future} if name.startswith("belady") else {}), **options)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None)
@given(events=EVENTS, seed=st.integers(0, 99), need=st.integers(0, 24))
def test_victims_are_pure_and_blind_to_order(name, events, seed, need):
    future = [np.array(sorted(layer * 12 + e for e in ids)) for layer, ids in events]
    policy = built(name, future)
    rng = np.random.default_rng(seed)
    for keys in future:
        policy.access(keys.tolist(), rng.random(len(keys)) < 0.5)
        policy.check_integrity()
    candidates = np.arange(KEYS)
    first = policy.victims(candidates, need)
    shuffled = rng.permutation(candidates)
    assert policy.victims(shuffled, need).tolist() == first.tolist()
    assert len(set(first.tolist())) == need
    assert policy.victims(candidates, KEYS).tolist()[:need] == first.tolist(), "fewer victims are the worst of more"
    policy.check_integrity()
    policy.reset()
    fresh = built(name, future)
    for each in (policy, fresh):
        each.access(future[0], [True] * len(future[0]))
    assert policy.victims(candidates, KEYS).tolist() == fresh.victims(candidates, KEYS).tolist(), "reset forgets all"


def test_an_empty_event_is_no_event():
    one, two = (make_policy("decayed_lfu", KEYS, 8, LAYERS) for _ in range(2))
    one.access([3], [False])
    two.access([], [])
    two.access([3], [False])
    assert one.rank.tolist() == two.rank.tolist()


@pytest.mark.parametrize("name", ["lru", "lfu", "decayed_lfu", "slru"])
def test_ties_go_to_the_lowest_key(name):
    policy = built(name, [])
    policy.access([9, 4, 7], [False] * 3)
    assert policy.victims(np.array([9, 7, 4]), 3).tolist() == [4, 7, 9]


def test_what_each_policy_remembers():
    seen = [[0], [0], [0], [1], [2], [2]]
    expected = {"lru": [0, 1, 2], "lfu": [1, 2, 0], "slru": [1, 0, 2]}  # slru: 0 and 2 were hit, 1 never was
    for name, order in expected.items():
        policy = make_policy(name, 12, 6, 1)
        for i, keys in enumerate(seen):
            policy.access(keys, [keys in seen[:i]])
        assert policy.victims(np.array([0, 1, 2]), 3).tolist() == order, name


def test_decayed_frequency_equals_its_definition():
    half_life, rng = 1.5, np.random.default_rng(3)
    policy = make_policy("decayed_lfu", 12, 6, 1, half_life=half_life)
    score = np.zeros(12)
    for _ in range(2000):  # far enough for the weights to be scaled down twice
        keys = np.sort(rng.choice(12, 3, replace=False, p=np.arange(1, 13) / 78))
        policy.access(keys, [False] * 3)
        score *= 0.5 ** (1 / half_life)
        score[keys] += 1
        ranked = score[policy.victims(np.arange(12), 12)]
        assert (ranked[1:] >= ranked[:-1] * (1 - 1e-6)).all()
    policy.check_integrity()


def test_decay_lies_between_recency_and_frequency():
    def gone(name, **options):
        return replay(TRACE, name, 48, victims=True, **options).victims

    assert gone("decayed_lfu", half_life=1e15) == gone("lfu")
    assert gone("decayed_lfu", half_life=8.0) not in (gone("lfu"), gone("lru"), gone("decayed_lfu", half_life=64.0))


def test_a_scan_does_not_wash_out_what_slru_protects():
    hot, cold = [0, 1, 2, 3], list(range(4, 24))
    left = {}
    for name in ("lru", "slru"):
        policy = make_policy(name, KEYS, 8, 1)
        for hit in (False, True):
            for key in hot:
                policy.access([key], [hit])
        for key in cold:
            policy.access([key], [False])
        left[name] = set(policy.victims(np.array(hot + cold[-4:]), 4).tolist())
    assert left == {"lru": set(hot), "slru": set(cold[-4:])}
    results = [replay(TRACE, "slru", 48, victims=True, protected=p).victims for p in (0.2, 0.8)]
    assert results[0] != results[1]


def test_random_is_seeded_and_even():
    policy = make_policy("random", 64, 8, 1, seed=5)
    candidates = np.arange(20, 36)
    counts = np.zeros(64)
    for _ in range(3200):
        policy.access([0], [True])
        counts[policy.victims(candidates, 1)] += 1
    assert counts[candidates].sum() == 3200
    assert ((counts[candidates] - 200) ** 2 / 200).sum() < 15 + 5 * np.sqrt(30)
    same, other = (replay(TRACE, "random", 48, seed=s, victims=True).victims for s in (0, 1))
    assert same == replay(TRACE, "random", 48, victims=True).victims != other


def test_belady_refuses_a_future_that_did_not_come():
    policy = built("belady", [np.array([1, 2]), np.array([3])])
    policy.access([1, 2], [False, False])
    with pytest.raises(PolicyError, match="event 2 is not the one"):
        policy.access([4], [False])
    policy.reset()
    for keys in ([1, 2], [3]):
        policy.access(keys, [False] * len(keys))
    with pytest.raises(PolicyError, match="event 3"):
        policy.access([3], [True])
    with pytest.raises(PolicyError, match=r"outside 0\.\.23"):
        built("belady", [np.array([24])])


def test_wrong_names_and_options_list_the_valid_ones():
    with pytest.raises(PolicyError, match="'lfru' is not one of lru, lfu, decayed_lfu, slru, random, belady"):
        make_policy("lfru", KEYS, 8, LAYERS)
    with pytest.raises(PolicyError, match="unknown option halflife; valid: half_life"):
        make_policy("decayed_lfu", KEYS, 8, LAYERS, halflife=3)
    with pytest.raises(PolicyError, match="valid: none"):
        make_policy("lru", KEYS, 8, LAYERS, half_life=3)
    with pytest.raises(PolicyError, match="needs the future"):
        make_policy("belady", KEYS, 8, LAYERS)
    for name, option in (("slru", {"protected": 1.0}), ("decayed_lfu", {"half_life": 0})):
        with pytest.raises(PolicyError, match=next(iter(option))):
            make_policy(name, KEYS, 8, LAYERS, **option)
    with pytest.raises(PolicyError, match="5 victims wanted of 2"):
        make_policy("lru", KEYS, 8, LAYERS).victims(np.arange(2), 5)
    assert set(CAUSAL) < set(POLICIES)


def test_broken_state_is_noticed():
    policy = make_policy("lru", KEYS, 8, LAYERS)
    policy.rank[3] = policy.rank[4]
    with pytest.raises(PolicyError, match="share a rank"):
        policy.check_integrity()
    policy = make_policy("slru", KEYS, 8, LAYERS)
    policy.whole[3 + 7] = 0  # key 7 is said to stand in the protected segment
    with pytest.raises(PolicyError, match="disagree"):
        policy.check_integrity()


def test_events_hold_distinct_ascending_keys_of_one_layer():
    for chunk, steps in ((1, 2 * 86), (4, 2 * 82), (128, 2 * 81)):
        todo = events(TRACE, chunk)
        assert todo.step[-1] + 1 == steps
        assert len(todo.keys) == steps * TRACE.layers
        for keys, layer in zip(todo.keys, todo.layer.tolist(), strict=True):
            assert (np.diff(keys) > 0).all()
            assert set(keys // 32) == {layer}
