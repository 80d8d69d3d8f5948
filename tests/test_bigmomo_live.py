"""BigMoMo on a model that computes: plain greedy answers, bit for bit, whatever is drafted, pruned, read, moved and
scheduled; only expert pruning changes them.
"""

from __future__ import annotations

import numpy as np
import pytest
from bigmomo_fixtures import TINY, Live, Replayed
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.commands.record import RecordOptions, record
from moebench.draft import Draft
from moebench.errors import UsageError
from moebench.plugins import load_plugins
from moebench.step import VERIFY
from moebench.systems.bigmomo import BigMoMoConfig
from moebench.systems.bigmomo.equipment import equip
from moebench.systemspec import Target


@pytest.fixture(scope="module")
def live():
    return Live()


@pytest.fixture(scope="module")
def plain(live):
    return live.plain()


def check_same(one, two):
    assert one[0] == two[0]
    for a, b in zip(one[1], two[1], strict=True):
        assert np.array_equal(a, b)


KNOBS = st.fixed_dictionaries(
    {
        "draft": st.sampled_from(["auto", "lookup"]),
        "depth": st.integers(1, 3),
        "branching": st.integers(1, 3),
        "rho": st.sampled_from([0.4, 0.8, 0.95, 1.0]),
        "gap": st.sampled_from(["auto", "none", "0", "3"]),
        "schedule": st.sampled_from(["stages", "arrival", "wait_all"]),
        "reorganise": st.just(False),
    }
)


@settings(max_examples=6)
@given(knobs=KNOBS, slots=st.sampled_from([32, 48, 96, 256]), scope=st.sampled_from(["per_layer", "shared"]))
def test_answers_are_those_of_plain_greedy_decoding(live, plain, knobs, slots, scope):
    check_same(live.bigmomo(slots, scope, **knobs), plain)


def test_answers_with_reads_one_by_one_and_without_a_draft(live, plain):
    check_same(live.bigmomo(48, reads="one"), plain)
    check_same(live.bigmomo(48, draft="none"), plain)
    assert not [s for s in live.watch.records if s.step.phase == VERIFY]


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_experts_change_places_during_a_run_and_no_bit_changes(live, plain, tmp_path, clock):
    check_same(live.bigmomo(64, clock=clock, folder=tmp_path, history=2), plain)
    assert live.relayout.left_bytes < 1024 * 2**20  # some moved
    assert not list(tmp_path.glob("*/experts.bin"))  # the private copy is gone


class Guesser:
    """A draft model that draws its tokens: almost always wrong."""

    bytes_per_level = 1000

    def __init__(self, vocabulary):
        self.rng, self.vocabulary = np.random.default_rng(0), vocabulary

    def reset(self, sequences):
        pass

    def propose(self, tokens, depth, branching=1):
        nodes = sum(branching**d for d in range(1, depth + 1))
        parents = [(n - branching) // branching if n >= branching else -1 for n in range(nodes)]
        return Draft(self.rng.integers(0, self.vocabulary, nodes), parents, self.rng.random(nodes))


def test_a_draft_that_is_nearly_always_wrong_costs_reads_and_changes_nothing(live, plain):
    check_same(live.bigmomo(64, drafter=Guesser(384), reorganise=False), plain)
    wrong = live.system.report()
    check_same(live.bigmomo(64, reorganise=False), plain)
    right = live.system.report()
    assert wrong["emitted"] == right["emitted"]
    assert wrong["rounds"] > right["rounds"]
    assert wrong["demanded"] > right["demanded"]
    assert wrong["right_at_1"] < 0.2 < right["right_at_1"]


def test_expert_pruning_drops_more_with_tau_and_reads_less(live):
    dropped, demanded = [], []
    for tau in (0.0, 0.02, 0.3):
        live.bigmomo(48, tau=tau, reorganise=False, tokens=16)
        counts = live.system.report()
        dropped.append(counts.get("experts_dropped", 0))
        demanded.append(counts["demanded"] / counts["rows"])
        assert counts.get("impact_dropped", 0) <= tau
    assert dropped[0] == 0 < dropped[1] < dropped[2]
    assert demanded[2] < demanded[0]


def test_what_has_no_meaning_for_a_model_that_computes_is_one_line(live):
    for options, words in (
        ({"acceptance": 0.5}, "in a replay only"),
        ({"draft": "nowhere"}, "folder of a dense model"),
        ({"depth": 9, "branching": 1}, "counted to depth"),
        ({"depth": 99}, "more than 512 nodes"),
    ):
        with pytest.raises(UsageError, match=words):
            live.bigmomo(64, **options)


def test_a_recorded_run_replays_with_its_own_drafts(live):
    knobs = BigMoMoConfig(reorganise=False)
    spec = load_plugins().system("bigmomo")
    trace = record(RecordOptions("", requests=2, new_tokens=16), spec, knobs, lambda: None)
    assert equip(knobs, Target("tinymoe", TINY, trace=trace)).assumptions[1].startswith("assumed: nodes valued")
    run = Replayed(trace, 96, reorganise=False)
    assert run.counts["rounds"] > 0
    assert run.counts["right_at_1"] > 0.6
    with pytest.raises(UsageError, match="recorded with drafts"):
        equip(BigMoMoConfig(acceptance=0.5), Target("tinymoe", TINY, trace=trace))
