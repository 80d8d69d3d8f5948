"""BigMoMo on tinymoe's committed trace: what a window loads, and what each mechanism moves when it is switched off."""

from __future__ import annotations

from functools import cache

import bigmomo_fixtures
import numpy as np
import pytest
from bigmomo_fixtures import TINY, Replayed, held_out
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.step import DECODE, VERIFY
from moebench.systems.bigmomo import BigMoMoConfig
from moebench.systems.bigmomo.equipment import equip
from moebench.systemspec import Target
from moebench.trace.format import Trace

STILL = {"reorganise": False}


@cache
def still(**options):
    """A replay in which nothing moves, run once for all tests."""
    return Replayed(**STILL, **options)


@settings(max_examples=3)
@given(
    slots=st.sampled_from([32, 64, 128, 256]), depth=st.integers(1, 4), branching=st.integers(1, 2),
    rho=st.sampled_from([0.5, 1.0]), acceptance=st.sampled_from([0.3, 0.9]),
)  # fmt: skip
def test_a_window_loads_its_union_less_what_is_resident(slots, depth, branching, rho, acceptance):
    run = Replayed(held_out(140), slots, depth=depth, branching=branching, rho=rho, acceptance=acceptance)
    for record in run.passes:
        assert sum(record.hits) + sum(record.late) + record.demand_reads == sum(record.requests)
        rows = int(record.step.valid.sum())
        assert max(record.requests) <= min(TINY.experts, rows * TINY.top_k)
    assert run.counts["demanded"] == run.total("requests")
    assert run.counts["emitted"] == run.emitted == int((held_out(140).phase == DECODE).sum())


def loads(depth, acceptance):
    """Distinct experts that a window demands, per row and per emitted token: what no cache would load."""
    counts = still(slots=256, depth=depth, branching=1, rho=1.0, acceptance=acceptance).counts
    return counts["demanded"] / counts["rows"], counts["demanded"] / counts["emitted"]


def test_loads_fall_with_the_window_per_verified_token_and_have_an_optimum_per_accepted_one():
    depths = (1, 2, 3, 5, 7)
    per_row, per_token = zip(*(loads(depth, 0.95) for depth in depths), strict=True)
    assert (np.diff(per_row) < 0).all()
    assert per_token[-1] < per_token[0]
    per_row, per_token = zip(*(loads(depth, 0.5) for depth in depths), strict=True)
    assert (np.diff(per_row) < 0).all()
    assert per_token[-1] > min(per_token) * 1.2
    assert np.argmin(per_token) < 2


def test_without_a_draft_every_pass_is_one_token():
    with_draft, without = still(), still(draft="none")
    assert {r.step.phase for r in without.passes} == {DECODE}
    assert VERIFY in {r.step.phase for r in with_draft.passes}
    assert len(with_draft.passes) < 0.7 * len(without.passes)
    assert with_draft.counts["right_at_1"] > with_draft.counts["right_at_2"] > 0


def test_less_rho_verifies_fewer_rows_and_takes_more_rounds():
    runs = [still(rho=rho).counts for rho in (1.0, 0.95, 0.6)]
    assert "nodes_drafted" not in runs[0]
    rows = [c["rows"] / c["rounds"] for c in runs]
    assert rows[0] > rows[1] > rows[2]
    assert runs[2]["rounds"] > runs[0]["rounds"]
    assert [c["emitted"] for c in runs] == [runs[0]["emitted"]] * 3


def test_tau_drops_experts_within_their_impact_and_0_changes_nothing():
    runs = [still(tau=tau) for tau in (0.0, 0.05, 0.3)]
    assert "experts_dropped" not in runs[0].counts
    assert 0 < runs[1].counts["experts_dropped"] < runs[2].counts["experts_dropped"]
    assert [0 < r.counts["impact_dropped"] <= tau for r, tau in zip(runs[1:], (0.05, 0.3), strict=True)] == [True, True]
    reads = [r.total("demand_reads") for r in runs]
    assert reads[0] > reads[1] > reads[2]


def test_neighbours_take_fewer_requests_at_equal_bytes_and_gaps_fewer_still_at_more():
    runs = [still(gap=gap) for gap in ("none", "0", "2")]
    demanded = {r.counts["demanded"] for r in runs}
    requests, storage = [r.counts["requests"] for r in runs], [r.timeline.storage_bytes for r in runs]
    assert len(demanded) == 1
    assert requests[0] == runs[0].counts["read"] > requests[1] > requests[2]
    assert storage[0] == storage[1] < storage[2]
    assert runs[2].counts["between"] > 0 == runs[1].counts["between"]


def test_a_small_request_bound_splits_runs():
    wide, narrow = (still(gap="0", request_mib=mib).counts for mib in (64.0, 0.03))
    assert narrow["requests"] > wide["requests"]


def test_the_automatic_gap_joins_where_that_is_quicker(monkeypatch):
    runs = [still(gap=gap) for gap in ("auto", "none")]
    assert runs[0].counts["requests"] < runs[1].counts["requests"]
    assert runs[0].counts["demanded"] == runs[1].counts["demanded"]
    monkeypatch.setattr(bigmomo_fixtures, "LATENCY_S", 5e-3)  # a request costs as much as many experts
    slow = [Replayed(gap=gap, **STILL) for gap in ("auto", "none")]
    assert slow[0].counts["between"] > runs[0].counts["between"]
    assert slow[0].timeline.now() < 0.8 * slow[1].timeline.now()


def test_reads_one_by_one_stall_longer():
    together, one = (still(reads=how) for how in ("window", "one"))
    assert one.total("stall_s") > 1.2 * together.total("stall_s")
    assert one.total("demand_reads") == together.total("demand_reads")


def test_waiting_for_all_is_slower_than_computing_in_stages():
    stages, wait = (still(schedule=mode) for mode in ("stages", "wait_all"))
    assert wait.timeline.now() > stages.timeline.now()
    assert wait.total("demand_reads") == stages.total("demand_reads")


PAIR = Geometry("pair", layers=2, experts=32, top_k=4, hidden=128, intermediate=64, other_parameters=1000)


def teams(tokens=300, seed=0):
    """A trace in which the experts of a token are one of eight fixed teams, scattered over each layer."""
    rng = np.random.default_rng(seed)
    team = np.stack([rng.permutation(PAIR.experts).reshape(-1, PAIR.top_k) for _ in range(PAIR.layers)])
    chosen = rng.integers(0, team.shape[1], (tokens, PAIR.layers))
    experts = team[np.arange(PAIR.layers), chosen].astype(np.int16)
    at = np.arange(tokens, dtype=np.int32)
    meta = {"model": "pair", "experts": PAIR.experts, "top_k": PAIR.top_k, "source": "test"}
    return Trace(experts, (at >= 16).astype(np.int8), 0 * at, at, metadata=meta)


def test_moving_what_is_read_together_saves_requests_within_the_budget():
    common = {"gap": "0", "branching": 1, "rho": 1.0, "acceptance": 0.9}
    fixed, moved = (
        Replayed(teams(), 32, geometry=PAIR, **common, **more).counts
        for more in (STILL, {"relocation_mib": 4.0, "history": 16})
    )
    assert moved["swaps"] > 10
    assert moved["relocated_mib"] <= 4.0
    assert moved["read"] == fixed["read"]
    assert moved["requests"] < 0.9 * fixed["requests"]
    assert "swaps" not in fixed


def test_on_the_committed_trace_places_change_and_nothing_else_does():
    fixed, moved = still(gap="0"), Replayed(gap="0", relocation_mib=1.0)
    assert 0 < moved.counts["relocated_mib"] <= 1.0
    assert (moved.experts.places.place != fixed.experts.places.place).any()
    assert moved.counts["requests"] != fixed.counts["requests"]
    assert moved.total("demand_reads") == fixed.total("demand_reads")


def test_a_demand_waits_at_most_one_unit_for_what_moves():
    fixed, moved = still(gap="0"), Replayed(gap="0")
    events = sum(any(r.requests) for r in moved.passes) * TINY.layers
    assert moved.total("stall_s") <= fixed.total("stall_s") + events * 1e-5


def test_a_replay_says_what_it_assumes():
    target = Target("tinymoe", TINY, trace=held_out())
    made = equip(BigMoMoConfig(depth=3, acceptance=0.5), target)
    assert made.acceptance.by_depth == pytest.approx([0.635, 0.635**2, 0.635**3])  # 0.5, and 0.27 of the rest
    assert made.acceptance.by_rank == pytest.approx([0.5 / 0.635, 0.135 / 0.635])
    assert made.content.by_depth == made.acceptance.by_depth
    assert made.held_bytes["draft"] > 0
    assert "draft model" in made.assumptions[0]
    chains = Target("state", TINY, trace=held_out(), trees=False)
    assert equip(BigMoMoConfig(), chains).acceptance.branching == 1
    assert equip(BigMoMoConfig(), target).acceptance.branching == 2
    with pytest.raises(UsageError, match="verifies chains"):
        equip(BigMoMoConfig(branching=2), chains)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft": "none", "depth": 3}, "depth has an effect with a draft only"),
        ({"draft": "none", "tau": 0.1}, "tau has an effect with a draft only"),
        ({"reads": "one", "gap": "2"}, "gap has an effect with system.reads=window only"),
        ({"gap": "none", "request_mib": 2.0}, "request_mib has an effect"),
        ({"reorganise": False, "history": 3}, "history has an effect"),
        ({"rho": 1.0, "artefact": "x"}, "artefact has an effect"),
        ({"rho": 0.0}, "more than 0 and at most 1"),
        ({"tau": 1.0}, "less than 1"),
        ({"gap": "-2"}, "is not one of auto, none"),
        ({"depth": 0}, "starts at 1"),
        ({"relocation_mib": 0.0}, "must be more than 0"),
    ],
)
def test_options_without_an_effect_or_a_meaning_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        BigMoMoConfig(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"draft": "lookup"}, "no text to draft from"), ({"artefact": "x"}, "where a model computes")],
)
def test_what_a_replay_cannot_do_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        equip(BigMoMoConfig(**options), Target("tinymoe", TINY, trace=held_out()))
