"""The compiled replay against the policies as the loop drives them, and LRU against stack distances."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.residency import kernels
from moebench.residency.policies import POLICIES, PolicyError, make_policy
from moebench.residency.replay import events, replay
from moebench.trace.format import Trace
from moebench.trace.synthetic import SyntheticSpec, synthesize

LONG = synthesize(SyntheticSpec(layers=3, experts=24, top_k=3, sequences=3, prefill=20, decode=120))


@st.composite
def traces(draw):
    """Small traces of several sequences with prompts, absent experts and some skew."""
    experts, layers = draw(st.integers(2, 40)), draw(st.integers(1, 4))
    k, tokens = draw(st.integers(1, min(8, experts))), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    appeal = rng.random((1, layers, experts)) * draw(st.sampled_from([0.0, 1.0, 3.0]))
    ids = np.argsort(rng.random((tokens, layers, experts)) + appeal, axis=-1)[..., :k].astype(np.int16)
    ids[rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.2]))] = -1
    return Trace(
        experts=ids,
        phase=(rng.random(tokens) < draw(st.sampled_from([0.3, 0.8, 1.0]))).astype(np.int8),
        sequence=np.sort(rng.integers(0, 3, tokens)).astype(np.int32),
        position=np.arange(tokens, dtype=np.int32),
        metadata={"model": "toy", "source": "test", "experts": experts, "top_k": k},
    )


def interpreted(todo, name, slots, scope, seed=0, **options):
    """The replay of a policy that only Python may run: what makes it is not a name."""
    future = {"future": todo.keys} if name.startswith("belady") else {}
    return replay(todo, partial(make_policy, name, **future, **options), slots, scope, seed=seed, victims=True)


def same(one, other):
    return {k: v for k, v in vars(one).items() if k != "policy"} == {
        k: v for k, v in vars(other).items() if k != "policy"
    }


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(
    trace=traces(),
    share=st.floats(0, 1),
    scope=st.sampled_from(["shared", "per_layer"]),
    chunk=st.sampled_from([1, 4, 128]),
    seed=st.integers(0, 3),
)
def test_compiled_and_interpreted_choose_the_same_victims(name, trace, share, scope, chunk, seed):
    todo = events(trace, chunk)
    least = trace.top_k * (trace.layers if scope == "per_layer" else 1)
    slots = least + int(share * (trace.layers * trace.expert_count - least))
    fast = replay(todo, name, slots, scope, seed=seed, victims=True)
    assert same(fast, interpreted(todo, name, slots, scope, seed=seed))


@pytest.mark.parametrize("options", [{"half_life": 0.05}, {"half_life": 2.0}])
def test_they_agree_when_decayed_scores_are_scaled_down(options):
    """At a half-life of a twentieth of a step weights pass 2^512 every 77 events, and all ranks are rewritten."""
    for scope in ("shared", "per_layer"):
        fast = replay(LONG, "decayed_lfu", 40, scope, chunk=8, victims=True, **options)
        assert same(fast, interpreted(events(LONG, 8), "decayed_lfu", 40, scope, **options))


@pytest.mark.parametrize("protected", [0.01, 0.3, 0.95])
def test_they_agree_when_the_protected_ring_is_cleared(protected):
    """Stale entries fill the ring many times over; what is protected stays as it was."""
    fast = replay(LONG, "slru", 45, chunk=8, victims=True, protected=protected)
    assert same(fast, interpreted(events(LONG, 8), "slru", 45, "shared", protected=protected))
    policy = make_policy("slru", 72, 45, 3, protected=protected)
    for keys in events(LONG, 8).keys:
        policy.access(keys, np.ones(len(keys), bool))
        policy.check_integrity()


def test_slru_is_segmented_lru_by_its_definition():
    """Against a list of protected keys, oldest first."""
    rng, limit = np.random.default_rng(0), 4
    policy = make_policy("slru", 12, 8, 1, protected=0.5)
    protected: list[int] = []
    recent: dict[int, int] = {}
    for event in range(400):
        keys = np.sort(rng.choice(12, 3, replace=False))
        hits = rng.random(3) < 0.6
        policy.access(keys, hits)
        protected = [k for k in protected if k not in keys] + keys[hits].tolist()
        recent |= dict.fromkeys(keys.tolist(), event)
        while len(protected) > limit:
            recent[protected.pop(0)] = event
        order = sorted(recent, key=lambda k: (k in protected, recent[k], k))
        victims = policy.victims(np.array(sorted(recent)), len(recent)).tolist()
        assert victims == order


def test_one_pass_of_stack_distances_gives_the_whole_curve_of_lru():
    """Mattson et al. 1970: a request hits if fewer distinct keys than slots were used since; ties go by key."""
    trace = synthesize(SyntheticSpec(layers=2, experts=16, top_k=3, sequences=2, prefill=0, decode=150))
    todo = events(trace)
    stack: list[int] = []
    distances = []
    for keys in map(np.ndarray.tolist, todo.keys):
        distances += [stack.index(key) if key in stack else 10**9 for key in keys]
        stack = keys[::-1] + [key for key in stack if key not in keys]
    for slots in range(3, 33):
        assert replay(todo, "lru", slots).hits == sum(d < slots for d in distances)


def test_events_hold_what_a_set_would():
    for chunk in (1, 7, 128):
        todo = events(LONG, chunk)
        wanted: dict[tuple[int, int], set[int]] = {}
        place = 0
        for low in range(0, LONG.tokens, 140):
            prompt = [(low + i, min(low + i + chunk, low + 20)) for i in range(0, 20, chunk)]
            for begin, end in [*prompt, *((i, i + 1) for i in range(low + 20, low + 140))]:
                for layer in range(3):
                    wanted[place, layer] = set((LONG.experts[begin:end, layer].ravel() + 24 * layer).tolist())
                place += 1
        assert [sorted(keys) for keys in wanted.values()] == [keys.tolist() for keys in todo.keys]
        assert list(wanted) == list(zip(todo.step.tolist(), todo.layer.tolist(), strict=True))


def test_a_law_that_is_not_run_changes_the_victims():
    """Switched off, LRU's law leaves the lowest key to go: the comparison above would notice."""

    class Idle(POLICIES["lru"]):
        def _access(self, keys, hits):
            kernels.lru(keys[:0], hits, self.events, self.rank, self.whole, self.real)

    todo = events(LONG)
    assert replay(todo, Idle, 40, victims=True).victims != replay(todo, "lru", 40, victims=True).victims


def test_the_future_is_the_traces_own():
    with pytest.raises(PolicyError, match="unknown option future"):
        replay(LONG, "lru", 40, future=[])
