"""The score, what an expert must show for a lasting slot, and the choice of a split: each on its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ssd_llama_fixtures import TINY, options

from moebench.errors import UsageError
from moebench.plugins import load_plugins
from moebench.systems.ssd_llama import SsdLlama, SsdLlamaConfig, handling
from moebench.systems.ssd_llama.placement import HOLD, ROUNDS, Placement, best
from moebench.systems.ssd_llama.score import Admission, make_score
from moebench.systemspec import RunContext

KEYS = 16
EVENTS = st.lists(st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4, unique=True), min_size=1, max_size=60)


@given(events=EVENTS, half_life=st.sampled_from([0.5, 3.0, 40.0]))
def test_the_order_is_that_of_uses_halved_by_idle_time(events, half_life):
    policy = make_score("frequency_recency", KEYS, 4, 2, half_life)
    uses, last = np.zeros(KEYS), np.zeros(KEYS)
    for at, keys in enumerate(events, 1):
        policy.access(keys, [False] * len(keys))
        uses[keys] += 1
        last[keys] = at
    policy.check_integrity()
    seen = np.flatnonzero(uses)
    worth = np.log2(uses[seen]) - (len(events) - last[seen]) / (2 * half_life)  # two events, one of each layer, a token
    order = policy.victims(seen, len(seen))
    ranked = worth[np.searchsorted(seen, order)]
    assert (np.diff(ranked) > -1e-5).all()


@given(events=EVENTS)
def test_frequency_and_recency_alone_are_the_classic_orders(events):
    frequency, recency = (make_score(name, KEYS, 4, 2, 64.0) for name in ("frequency", "recency"))
    uses, last = np.zeros(KEYS, int), np.zeros(KEYS, int)
    for at, keys in enumerate(events, 1):
        for policy in (frequency, recency):
            policy.access(keys, [False] * len(keys))
        uses[keys] += 1
        last[keys] = at
    for policy, law in ((frequency, uses), (recency, last)):
        assert (np.diff(law[policy.victims(np.arange(KEYS), KEYS)]) >= 0).all()


class Fixed:
    """A policy whose ranks are given."""

    def __init__(self, rank):
        self.rank, self.keys = np.asarray(rank), len(rank)


def admission(rank, slots=4, temporary=1, promote_after=2, lasting=None):
    return Admission(
        Fixed(rank), slots, temporary, promote_after, np.ones(len(rank), bool) if lasting is None else lasting
    )


def test_free_slots_take_the_best_and_a_full_tier_takes_who_beats_its_worst():
    found = admission([10, 20, 30, 40, 25, 5])
    assert found.earned([0, 1, 2]) == [True] * 3  # three lasting slots were free
    found.used([3, 4, 5])
    assert found.earned([3, 4, 5]) == [False] * 3  # used once
    found.used([3, 4, 5])
    assert found.earned([3, 4, 5]) == [True, True, False]  # 40 beats 10, 25 beats 20, 5 beats nobody
    found.left([0, 1])
    assert np.flatnonzero(found.kept).tolist() == [2, 3, 4]


def test_what_may_not_stay_never_does():
    lasting = np.arange(6) % 3 < 1
    found = admission([1, 2, 3, 4, 5, 6], slots=6, temporary=0, lasting=lasting)
    assert found.earned(range(6)) == lasting.tolist()


@given(data=st.data())
def test_nobody_is_pushed_out_by_a_lower_score(data):
    rank = np.array(data.draw(st.permutations(range(KEYS))))
    found = admission(rank, slots=6, temporary=2, promote_after=1)
    for _ in range(12):
        missing = np.array(data.draw(st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4, unique=True)))
        missing = missing[~found.kept[missing]]
        if not len(missing):
            continue
        found.used(missing)
        before = np.flatnonzero(found.kept)
        keep = np.array(found.earned(missing.tolist()))
        over = len(before) + int(keep.sum()) - found.capacity
        if over > 0:
            pushed = before[rank[before].argsort()][:over]
            assert rank[missing[keep]].max() > rank[pushed].min()
            found.left(pushed)
        assert found.kept.sum() <= found.capacity


def plainly(found, missing):
    """Who earns a slot, by sorting everything: which of ``missing`` stay."""
    kept = found.kept.copy()
    kept[missing] = False
    ranks = found.policy.rank
    held, keep = sorted(ranks[kept].tolist()), np.zeros(len(missing), bool)
    order = sorted((i for i, key in enumerate(missing) if found.lasting[key]), key=lambda i: -ranks[missing[i]])
    room = found.capacity - len(held)
    keep[order[: max(0, room)]] = True
    rest = [i for i in order[max(0, room) :] if found.uses[missing[i]] >= found.promote_after]
    for i, worst in zip(rest, held[max(0, -room) :], strict=False):
        keep[i] = ranks[missing[i]] > worst
    return keep.tolist()


@pytest.mark.parametrize("score", ["frequency_recency", "frequency", "recency"])
@given(events=EVENTS, promote_after=st.integers(1, 3), all_last=st.booleans())
def test_the_worst_kept_are_those_that_sorting_would_find(score, events, promote_after, all_last):
    policy = make_score(score, KEYS, 8, 1, 4.0)
    lasting = np.ones(KEYS, bool) if all_last else np.arange(KEYS) % 3 > 0
    found = Admission(policy, 8, 2, promote_after, lasting)
    for event in events:
        keys = np.array(event)
        policy.access(keys, found.kept[keys])
        found.used(keys)
        missing = keys[~found.kept[keys]]
        if not len(missing):
            continue
        expected = plainly(found, missing)
        assert found.earned(missing.tolist()) == expected
        over = int(found.kept.sum()) - found.capacity
        if over > 0:
            others = np.setdiff1d(np.flatnonzero(found.kept), keys)
            found.left(others[policy.rank[others].argsort()][:over])


# --- placement ---------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1000), right=st.integers(0, 4))
def test_the_best_split_is_found_under_unequal_loads(seed, right):
    """Each token's load differs by far more than the splits do: the load is taken out before they are compared."""
    rng = np.random.default_rng(seed)
    splits = np.tile(np.arange(5), ROUNDS)
    loads = rng.integers(0, 100, len(splits)) * 10**6
    seconds = 0.5 + loads * 1e-8 + 0.02 * np.abs(splits - right) + rng.normal(0, 1e-4, len(splits))
    assert best(tuple(splits), tuple(seconds), tuple(loads)) == right


def test_auto_tries_all_in_turn_then_holds_the_best_and_tries_again():
    placement, seen = Placement("auto", 3), []
    for _ in range(2 * (4 * ROUNDS + HOLD)):
        seen.append(placement.count)
        placement.observe(1.0 - 0.1 * (placement.count == 2), 0)
    trying, period = 4 * ROUNDS, 4 * ROUNDS + HOLD
    assert seen[:trying] == [0, 1, 2, 3] * ROUNDS
    assert set(seen[trying:period]) == {2}
    assert seen[period : period + trying] == [0, 1, 2, 3] * ROUNDS
    assert placement.trials == 2


def test_the_host_gets_the_last_of_a_demand_wherever_they_live():
    assert Placement("2", 4).host_share([3, 5, 8, 9]) == {8, 9}
    assert Placement("3", 4).host_share([3, 5]) == {3, 5}
    assert Placement("device", 4).host_share([3, 5]) == set()
    assert Placement("1", 2, units=3).host_share([3, 4, 5, 6, 7, 8]) == {6, 7, 8}


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"placement": "gpu"}, "not one of device, auto, or a number"),
        ({"placement": "0"}, "is placement=device"),
        ({"placement": "-1"}, "not one of device, auto, or a number"),
        ({"temporary": -1}, "system.temporary must be at least 0"),
        ({"promote_after": 0}, "system.promote_after must be at least 1"),
        ({"pool": -1}, "system.pool must be at least 0"),
        ({"half_life": 0.0}, "system.half_life must lie between"),
        ({"score": "recency", "half_life": 8.0}, "system.half_life has an effect with system.score=frequency_recency"),
        ({"temporary": 0, "promote_after": 3}, "system.promote_after has an effect with system.temporary above 0"),
        ({"granularity": "none", "score": "recency"}, "system.score has an effect with a granularity that keeps"),
    ],
)
def test_an_option_that_cannot_be_or_changes_nothing_is_refused(changes, word):
    with pytest.raises(UsageError, match=word):
        options(**changes)


def test_what_depends_on_the_model_is_refused_when_it_is_known():
    with pytest.raises(UsageError, match="placement=5: tinymoe has 4 active experts"):
        SsdLlama(options(placement="5"), RunContext(TINY, 40, "shared"))
    with pytest.raises(UsageError, match="scope=shared"):
        SsdLlama(options(), RunContext(TINY, 40, "per_layer"))


def test_handling_follows_the_options():
    assert handling(options(pool=2, temporary=5)).pool == 2
    split = handling(options(granularity="gate", pool=2, temporary=5))
    assert (split.pool, split.wave, split.matrices) == (6, 15, True)
    assert handling(options(placement="1")).on_host
    assert not handling(options(tiers="two")).host_cache
    assert handling(SsdLlamaConfig()).whole_reads


def test_published_figures_stand_beside_runs_of_their_own_setting_only():
    from moebench.config import RunConfig

    spec = load_plugins().system("ssd_llama")
    assert spec.fidelity(spec.config()) == "exact"
    right, other = RunConfig("ssd_llama", "rtx5090_32gb"), RunConfig("ssd_llama", "rtx5090_32gb", layout="scattered")
    settings = {"kimi-k2.7-code": options(), "deepseek-v4-flash": options(tiers="two", granularity="none")}
    for found in spec.published:
        own = settings.pop(found.model)
        assert found.where(own, right)
        assert not found.where(own, other)
        assert not found.where(replace(own, placement="auto"), right)
        assert not any(found.where(knobs, right) for knobs in settings.values())
        settings[found.model] = own
