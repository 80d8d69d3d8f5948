"""Learned eviction: scores are exact, the loop and the cache replay choose the same victims, and what the nets learned
shows in hits, refetches and agreement with Belady.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, make_trace
from flashmoe_fixtures import random_nets, run, system
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.errors import UsageError
from moebench.residency.agreement import judge
from moebench.residency.policies import PolicyError, make_policy
from moebench.residency.replay import Events, events, replay
from moebench.systems.flashmoe import FlashMoeConfig
from moebench.systems.flashmoe.artefact import load
from moebench.systems.flashmoe.nets import KINDS, Nets, silu
from moebench.systems.flashmoe.policy import Learned
from moebench.trace import format as trace_format

ROOT = Path(__file__).parents[1]
NETS = {kind: random_nets(kind) for kind in KINDS}
SHAPE = (GEOMETRY.keys, 24, GEOMETRY.layers)


def learned(nets):
    return partial(Learned, nets=nets)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(seed=st.integers(0, 999), count=st.integers(1, 12))
def test_scores_are_the_same_for_one_candidate_or_many_in_any_order(kind, seed, count):
    rng, nets = np.random.default_rng(seed), NETS[kind]
    recency, frequency = rng.random((2, 12))
    experts = rng.permutation(12)[:count]
    together = nets.scores(1, recency, frequency, experts)
    alone = [nets.scores(1, recency, frequency, experts[i : i + 1])[0] for i in range(count)]
    assert together.tolist() == alone
    wide = [[float(v) for v in part.ravel()] for pair in nets._parts[1] for part in pair]
    x = np.concatenate([recency, frequency]) if kind == "joint" else np.stack([recency, frequency])[:, experts[0]]
    x = np.rint(x * 4096) / 4096
    for n in range(3):  # summed one by one from the far end: exact whatever the order
        matrix, bias = np.reshape(wide[2 * n], (len(x), -1)), wide[2 * n + 1]
        x = np.array([sum((x * column)[::-1].tolist()) + b for column, b in zip(matrix.T, bias, strict=True)])
        x = silu(x) if n < 2 else x
    assert together[0] == (x[experts[0]] if kind == "joint" else x[0])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(seed=st.integers(0, 99), need=st.integers(0, 12))
def test_victims_are_pure_and_blind_to_order(kind, seed, need):
    rng, policy = np.random.default_rng(seed), Learned(*SHAPE, seed=0, pools=4, nets=NETS[kind])
    for _ in range(9):
        layer = int(rng.integers(4))
        policy.access(np.sort(rng.permutation(12)[:3]) + 12 * layer, [False] * 3)
    policy.check_integrity()
    candidates = np.arange(12, 24)
    first = policy.victims(candidates, need).tolist()
    assert policy.victims(rng.permutation(candidates), need).tolist() == first
    assert policy.victims(candidates, 12).tolist()[:need] == first
    policy.reset()
    fresh = Learned(*SHAPE, seed=0, pools=4, nets=NETS[kind])
    assert policy.victims(candidates, 12).tolist() == fresh.victims(candidates, 12).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_predicted_distance_leaves_first(kind):
    policy = Learned(*SHAPE, seed=0, pools=4, nets=NETS[kind])
    for keys in ([12, 13, 14], [13, 15, 20], [12, 13, 21]):
        policy.access(keys, [False] * 3)
    candidates = np.array([12, 14, 15, 20, 21])
    scores = NETS[kind].scores(1, *policy.features(1), candidates - 12)
    assert policy.victims(candidates, 5).tolist() == candidates[np.argsort(-scores, kind="stable")].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("late", "host"), [(False, 0), (True, 0), (True, 12), (False, 12)])
def test_the_loop_and_the_cache_replay_choose_the_same_victims_one_by_one(kind, late, host):
    trace, slots = make_trace(60, sequences=3), 24
    spare = late and not host  # on one memory each layer keeps a slot free for the next read
    chunk = 1 if spare else 3  # a demand of more than 5 experts would run in waves of 6
    plugin, watch, _ = run(NETS[kind], trace, slots, host, late, chunk=chunk)
    held = slots - GEOMETRY.layers * spare
    twin = replay(trace, learned(NETS[kind]), held, "per_layer", chunk=chunk, victims=True)
    assert [sorted(gone) for gone in twin.victims] == [sorted(gone) for gone in plugin.gone]
    assert plugin.report()["evictions"] == twin.evictions
    assert plugin.report()["refetched_within_5"] == twin.refetches
    assert sum(sum(r.hits) + sum(r.late) for r in watch.records) == twin.hits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_belady_is_a_bound_for_any_nets(kind, seed):
    todo, nets = events(make_trace(60, seed=seed), 4), random_nets(kind, seed=seed)
    for slots in (12, 20, 32):
        best, mine = (judge(todo, p, slots) for p in ("belady", learned(nets)))
        assert best.misses <= mine.misses
        assert best.agreement == 1.0
        assert mine.agreement < 1.0


def hand(*demands) -> Events:
    flat, cuts = np.array(demands, np.int32).ravel(), np.arange(len(demands) + 1)
    zeros, decode = np.zeros(len(demands), np.int64), np.ones(len(demands), bool)
    return Events(flat, cuts, zeros, cuts[:-1], decode, zeros, layers=1, experts=9, top_k=1)


def test_agreement_counts_ties():
    # 0 and 1 never come back: whoever of them leaves, and in whatever order, it is optimal; 2 comes back at once.
    todo = hand([0], [1], [2], [3], [2], [4], [2])
    assert judge(todo, "lru", 3).agreement == 1.0
    worst = judge(todo, Newest, 3)
    # 2 leaves for 3, which is wrong; 3 for 2, as good as any; 2 for 4, wrong; 4 for 2
    assert (worst.evictions, worst.agreement, worst.refetch) == (4, 1 / 2, 1 / 2)


class Newest(type(make_policy("lru", 9, 3, 1))):
    """Evicts what was used last."""

    def _ranks(self, candidates):
        return -self.rank[candidates]


def test_counts_start_anew_with_a_request_and_residency_does_not():
    policy = Learned(*SHAPE, seed=0, pools=4, nets=NETS["joint"])
    policy.access([0, 1], [False] * 2)
    policy.begin_request()
    recency, frequency = policy.features(0)
    assert recency[:3].tolist() == [1, 1, 0]
    assert not frequency.any()
    other = Learned(*SHAPE, seed=0, pools=4, nets=NETS["joint"])
    other.access([0, 1], [False] * 2)
    assert policy.victims(np.arange(12), 12).tolist() != other.victims(np.arange(12), 12).tolist()


@pytest.fixture(scope="module")
def held_out():
    """tinymoe's held-out prompts, and its shipped nets."""
    trace = trace_format.load(ROOT / "models" / "tinymoe" / "traces" / "held_out.safetensors")
    return events(trace, 32), load(ROOT / "systems" / "flashmoe" / "artefacts" / "tinymoe").nets


@pytest.mark.parametrize("share", [0.375, 0.5])  # at least three times top-k
def test_the_joint_nets_beat_the_classics_on_held_out_prompts(held_out, share):
    todo, nets = held_out
    slots = round(share * 32) * 8
    mine = judge(todo, learned(nets["joint"]), slots)
    classics = {name: judge(todo, name, slots) for name in ("lru", "lfu", "slru", "decayed_lfu")}
    best = judge(todo, "belady", slots)
    assert mine.hit_rate > max(c.hit_rate for c in classics.values())
    assert mine.agreement > max(c.agreement for c in classics.values())
    assert best.refetch < mine.refetch < classics["lru"].refetch
    assert mine.hit_rate < best.hit_rate


def test_the_shared_nets_lie_between_lru_and_the_joint_ones(held_out):
    todo, nets = held_out
    rates = [judge(todo, p, 96).hit_rate for p in ("lru", learned(nets["shared"]), learned(nets["joint"]))]
    assert rates == sorted(rates)
    assert rates[0] < rates[2]


def test_wrong_shapes_are_refused():
    with pytest.raises(PolicyError, match="scope per_layer"):
        Learned(*SHAPE, seed=0, pools=1, nets=NETS["joint"])
    with pytest.raises(PolicyError, match="do not fit 2, 24 keys"):
        Learned(24, 8, 2, seed=0, pools=2, nets=NETS["joint"])
    with pytest.raises(UsageError, match="'deep' is not one of joint, shared"):
        Nets("deep", 12, 8, NETS["joint"].weights)
    with pytest.raises(UsageError, match=r"shared nets are int16 \(4, 380\), expected int16 \(layers, 105\)"):
        Nets("shared", 12, 8, NETS["joint"].weights)
    with pytest.raises(UsageError, match="scope=per_layer or scope=auto"):
        system(FlashMoeConfig(), NETS["joint"], scope="shared")
    for wrong in ({"late": False}, {"artefact": "x"}):
        with pytest.raises(UsageError, match=r"not with system\.net=none"):
            FlashMoeConfig(net="none", **wrong)
