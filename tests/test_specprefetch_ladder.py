"""SpecPrefetch in replay of tinymoe's committed trace: what each mode and each mechanism moves, and what none may."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from engine_fixtures import costs
from hypothesis import given, settings
from hypothesis import strategies as st
from specprefetch_fixtures import MODES, TINY, Run, held_out

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.step import DECODE, Step
from moebench.systems.specprefetch import SpecPrefetch, SpecPrefetchConfig
from moebench.systems.specprefetch.budget import chosen, of_batch, ranking
from moebench.timeline.base import PREFETCH
from moebench.timeline.virtual import VirtualTimeline

SLOW = {"read_s": (0.0, 8e-3, 4e-3, 3e-3, 2e-3)}  # a read takes four layers' time


@pytest.fixture(scope="module")
def ladder():
    return {mode: Run(mode=mode) for mode in MODES}


def test_the_ladder_ascends_in_hits_and_descends_in_stall(ladder):
    hits = {mode: run.hit_rate for mode, run in ladder.items()}
    stall = {mode: run.total("stall_s") for mode, run in ladder.items()}
    assert hits["adversarial"] < hits["off"] == hits["pred0"] < hits["gate_replay"] < hits["adapter"] < hits["oracle"]
    assert stall["oracle"] < stall["adapter"] < stall["gate_replay"] < stall["off"]
    assert abs(hits["naive_prev_token"] - hits["off"]) < 0.02  # what the last token asked for is still there


def test_a_predictor_that_reads_nothing_ahead_reads_what_none_reads(ladder):
    assert ladder["pred0"].all_bytes == ladder["off"].all_bytes  # S3
    assert ladder["pred0"].counts["issued"] == ladder["off"].counts["issued"] == 0
    assert ladder["off"].counts["predictions"] == 0 < ladder["pred0"].counts["predictions"]
    assert (
        ladder["pred0"].experts.timeline.now() == ladder["off"].experts.timeline.now()
    )  # weights stream for free here
    costly = [Run(mode=mode, change={"byte_s": 1e-9}).timeline.now() for mode in ("off", "pred0")]
    steps = sum(r.step.phase == DECODE for r in ladder["off"].watch.records)
    streamed = steps * sum(ladder["pred0"].system.content.streamed)
    assert costly[1] - costly[0] == pytest.approx(streamed * 1e-9)
    assert streamed == steps * 2 * 7 * (32 * (128 + 32) + 32 * 128)  # fp16 A, B and W of seven layers


def test_recall_is_what_each_predictor_says_it_is(ladder):
    recall = {m: [r.counts.get(f"recall_at_{n}") for n in (2, 4, 6)] for m, r in ladder.items() if m != "off"}
    assert recall["adapter"] == pytest.approx([0.4883, 0.8560, 0.9231], abs=0.01)
    assert recall["gate_replay"] == pytest.approx([0.4751, 0.8140, 0.8838], abs=0.01)
    assert recall["oracle"] == [0.5, 1.0, 1.0]
    assert ladder["oracle"].counts["exact_set"] == 1.0
    assert recall["pred0"] == recall["adapter"]
    assert max(recall["adversarial"]) < 0.05
    for values in recall.values():  # S6
        assert values == sorted(values)
        assert values[0] <= 0.5


def test_every_prefetch_has_one_fate_and_bytes_are_conserved(ladder):
    for mode, run in ladder.items():
        counts = run.counts
        fates = [counts[name] for name in ("useful", "late", "cancelled", "wasted")]
        assert min(fates) >= 0
        assert sum(fates) == counts["issued"] == run.total("prefetch_reads")
        reads = sum(r.demand_reads + r.prefetch_reads - r.cancelled for r in run.watch.records)
        assert reads * TINY.slot_bytes == run.all_bytes == run.timeline.storage_bytes  # S8
        assert counts["late"] == run.total("late")
        assert run.total("misses") == run.total("demand_reads")
        assert counts["wasted"] <= run.system.most * TINY.layers * len(run.watch.records)
        assert counts["wasted_bytes"] == counts["wasted"] * TINY.slot_bytes
        if mode == "oracle":
            assert counts["wasted"] == counts["cancelled"] == 0


class Checked(SpecPrefetch):
    """Looks at every request as it is made."""

    requests = 0

    @hookimpl
    def prefetch(self, step, point, view):
        keys = super().prefetch(step, point, view)
        if keys is None:
            return None
        assert len(keys) == len(set(keys.tolist())) <= self.most
        assert not view.resident(keys).any()
        assert not view.in_flight(keys).any()
        for layer in np.unique(keys // self.experts):
            scores = self.scores[layer, layer - point][keys[keys // self.experts == layer] % self.experts]
            assert (np.diff(scores) <= 0).all()
            assert (scores > 0).all()
        Checked.requests += len(keys)
        return keys


@pytest.mark.parametrize("options", [
    {}, {"horizon": 2}, {"m": 3}, {"m": 1, "window": False}, {"mode": "naive_prev_token"}, {"filter": False},
    {"mode": "adversarial"}, {"mode": "oracle", "horizon": 2}, {"score": "votes"},
])  # fmt: skip
@pytest.mark.parametrize(("slots", "scope", "host", "batch"), [
    (64, "shared", 0, 1), (64, "per_layer", 0, 1), (64, "shared", 40, 1), (40, "shared", 20, 3), (4, "shared", 0, 1),
])  # fmt: skip
def test_requests_are_few_ordered_and_never_for_what_is_there(options, slots, scope, host, batch):
    """S2, whatever the tiers, budgets and batches; a budget of one layer's demand runs too."""
    Checked.requests = 0
    run = Run(held_out(120), slots=slots, scope=scope, host=host, batch=batch, cls=Checked, **options)
    assert (Checked.requests > 0) == (slots < 32 or options.get("mode") != "naive_prev_token")  # else it is there still
    run.experts.check_integrity()


def test_recall_of_what_is_ready_grows_with_m():
    ready = [Run(m=m, window=False).counts["ready_recall"] for m in (1, 2, 4, 6)]
    assert ready == sorted(ready)
    assert Run(mode="off").counts["ready_recall"] < ready[0]  # S6


def test_the_window_bounds_what_is_asked_for():
    unbounded, bounded = (Run(window=w, change=SLOW) for w in (False, True))
    assert 0 < bounded.counts["issued"] < 0.5 * unbounded.counts["issued"]
    assert bounded.all_bytes < unbounded.all_bytes
    assert 0 < bounded.counts["window_holds"] < 6  # a few reads of 8 ms beside their own stalls
    assert "window_holds" not in unbounded.counts
    wide, plain = (Run(window=w, change={"read_s": (0.0, 1e-5)}) for w in (True, False))
    missed = plain.counts["issued"] - wide.counts["issued"]
    assert 0 <= missed <= plain.system.most * 7  # those of the first token, when nothing was measured yet


def test_cancelling_takes_stale_requests_off_a_slow_drive():
    kept, taken = (Run(window=False, cancel=c, change=SLOW) for c in (False, True))
    assert kept.counts["cancelled"] == 0 < taken.counts["cancelled"]
    assert taken.all_bytes < kept.all_bytes
    assert taken.timeline.now() < kept.timeline.now()


def test_without_the_filter_fewer_are_asked_for_and_fewer_are_ready():
    filtered, plain = (Run(filter=f) for f in (True, False))
    assert 0 < plain.counts["issued"] < filtered.counts["issued"]
    assert plain.counts["ready_recall"] < filtered.counts["ready_recall"]


def test_two_layers_ahead_is_worth_it_on_a_slow_drive_and_recalled_less():
    near, far = (Run(mode="oracle", horizon=h, change={"read_s": (0.0, 4e-3, 2e-3)}) for h in (1, 2))
    assert far.counts["ready_recall"] > near.counts["ready_recall"]
    counts = Run(horizon=2).counts
    assert counts["recall_at_4_lag2"] == pytest.approx(0.8560 * 61.5 / 67.2, abs=0.012)
    assert counts["recall_at_4_lag2"] < counts["recall_at_4"]


def test_waiting_once_more_for_the_prediction_costs_time_and_no_bytes():
    together, apart = (Run(mode="pred0", readback=r, change={"host_sync_s": 1e-4}) for r in ("with_router", "own"))
    steps = sum(r.step.phase == DECODE for r in apart.watch.records)
    assert 0 < apart.timeline.now() - together.timeline.now() <= 1e-4 * 7 * steps + 1e-9  # part of it beside reads
    assert apart.all_bytes == together.all_bytes
    assert apart.counts == together.counts


def test_summed_probability_finds_more_of_a_batch_than_votes():
    mass, votes = (Run(batch=6, score=s, slots=120).counts for s in ("mass", "votes"))
    assert mass["recall_at_4"] > votes["recall_at_4"]
    alone, also = (Run(score=s).counts["recall_at_4"] for s in ("mass", "votes"))
    assert alone == also  # of one row the best K are the best K


def test_what_is_read_ahead_is_kept_until_its_layer_comes():
    """A prefetch never takes the slot of what a layer to come waits for; a demand takes it last."""
    system = Run(held_out(60)).system
    candidates = np.arange(64, 74)
    system.held[66:74] = True
    ahead, demand = (SimpleNamespace(reading_ahead=flag, tiers=("device", "host")) for flag in (True, False))
    assert set(system.evict("device", 1, candidates, ahead)) <= {64, 65}
    assert set(system.evict("device", 5, candidates, ahead)) == {64, 65}
    assert set(system.evict("device", 5, candidates, demand)[:2]) == {64, 65}
    assert len(set(system.evict("device", 5, candidates, demand))) == 5
    assert len(system.evict("host", 5, candidates, ahead)) == 5  # what the device is to get may leave the host
    system.acquired(system_step(), 2, [64], [True], SimpleNamespace(in_flight=lambda keys: np.zeros(len(keys), bool)))
    assert len(system.evict("device", 5, candidates, ahead)) == 5  # layer 2 has come


def system_step():
    """A decode step of one row."""
    one = np.zeros(1, np.int32)
    return Step(0, DECODE, one, one, np.ones(1, bool), 1)


def test_a_prompt_is_not_read_ahead():
    class Seen(VirtualTimeline):
        ahead = 0

        def read(self, keys, slots, tier, priority, together=()):
            Seen.ahead += len(keys) * (priority == PREFETCH)
            return super().read(keys, slots, tier, priority, together)

    trace = held_out()
    prompt = int((trace.phase == DECODE).argmax())
    Run(trace.take(slice(0, prompt)), timeline=Seen(costs()))
    assert Seen.ahead == 0
    Run(trace.take(slice(0, prompt + 2)), timeline=Seen(costs()))
    assert Seen.ahead > 0


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), most=st.integers(0, 40), rows=st.integers(1, 5))
def test_a_choice_is_the_best_of_what_is_missing(seed, most, rows):
    rng = np.random.default_rng(seed)
    each = rng.random((rows, 32)) * (rng.random((rows, 32)) < 0.5)
    there = rng.random(32) < 0.4
    for how in ("mass", "votes"):
        scores = of_batch(each, how, 4)
        rank = ranking(scores)
        assert sorted(rank[scores > 0]) == list(range(int((scores > 0).sum())))
        assert (rank[scores <= 0] == 32).all()
        picked = chosen(scores, 64, most, there, True) - 64
        wanted = np.flatnonzero((scores > 0) & ~there)
        assert len(picked) == min(most, len(wanted))
        left = np.setdiff1d(wanted, picked)
        assert not len(left) or not len(picked) or scores[picked].min() >= scores[left].max()
        plain = chosen(scores, 64, most, there, False) - 64
        assert set(plain) == {e for e in np.flatnonzero((rank < most) & (scores > 0)) if not there[e]}
    assert of_batch(each, "mass", 4).sum() == pytest.approx(each.sum())
    assert of_batch(each, "votes", 4).max() <= rows


@pytest.mark.parametrize(("options", "name"), [
    ({"mode": "off", "m": 2}, "m"), ({"mode": "pred0", "window": False}, "window"),
    ({"mode": "off", "horizon": 2}, "horizon"),
    ({"mode": "oracle", "rank": 4}, "rank"), ({"mode": "oracle", "score": "votes"}, "score"),
    ({"mode": "gate_replay", "base": "none"}, "base"), ({"mode": "naive_prev_token", "readback": "own"}, "readback"),
    ({"mode": "pred0", "cancel": False}, "cancel"), ({"mode": "off", "filter": False}, "filter"),
    ({"mode": "oracle", "artefact": "x"}, "artefact"), ({"mode": "gate_replay", "adapters": "shared"}, "adapters"),
])  # fmt: skip
def test_an_option_that_would_change_nothing_is_refused(options, name):
    with pytest.raises(UsageError, match=rf"^system\.{name} has no effect with system\.mode={options['mode']}"):
        SpecPrefetchConfig(**options)


@pytest.mark.parametrize(("options", "words"), [
    ({"horizon": 3}, "must be 1 or 2"), ({"m": -1}, "0 or more"), ({"adapters": "shared"}, "nobody published"),
    ({"m": 7}, "hold 6 experts, system.m asks for 7"), ({"artefact": "x"}, "where nothing computes"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(options, words):
    with pytest.raises(UsageError, match=words):
        Run(held_out(60), **options)


def test_rank_changes_what_is_held_and_streamed():
    small, large = (Run(held_out(60), rank=r).equipment for r in (8, 32))
    assert large.held_bytes["predictor"] - small.held_bytes["predictor"] == 2 * 7 * 24 * (128 + 32)
    assert sum(small.content.streamed) < sum(large.content.streamed)
