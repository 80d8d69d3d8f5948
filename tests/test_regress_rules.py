"""What counts as worse: direction, noise, what must be equal, what cannot be compared, and what is missing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_fixtures import answered, failed_row, make_row, measured, modeled

from moebench import regress
from moebench.errors import UsageError
from moebench.evidence import rank_p
from moebench.regress import Rules
from moebench.result import METRICS, metric

DIRECTED = [name for name, (_, higher) in METRICS.items() if higher is not None and name not in regress.ANSWERS]


def verdicts(old, new, rules=None):
    """Verdict by metric name, "" for the whole row, of one cell."""
    found = regress.compare([old], [new], rules or Rules())
    return {finding.metric: finding.verdict for finding in found}


@pytest.mark.parametrize("name", DIRECTED)
def test_direction_decides_and_the_smallest_change_of_a_modeled_value_counts(name):
    old, more = make_row(modeled(**{name: 1.0})), make_row(modeled(**{name: 1.0 + 2**-52}))
    higher = METRICS[name][1]
    assert verdicts(old, more) == {name: "better" if higher else "worse"}
    assert verdicts(more, old) == {name: "worse" if higher else "better"}
    assert verdicts(old, old) == {name: "same"}


def test_a_value_of_no_direction_is_only_reported():
    old, new = (make_row(modeled(effective_gb_s=value)) for value in (1.0, 2.0))
    assert verdicts(old, new) == {"effective_gb_s": "changed"}


def test_a_value_that_is_gone_is_missing_and_one_that_came_is_new():
    old, new = make_row(modeled(tpot_p99_ms=1.0, ttft_s=None)), make_row(modeled(tpot_p99_ms=None, ttft_s=1.0))
    assert verdicts(old, new) == {"tpot_p99_ms": "missing", "ttft_s": "new"}
    assert verdicts(make_row(modeled(ttft_s=None)), make_row(modeled(ttft_s=None))) == {"ttft_s": "same"}
    assert verdicts(make_row(modeled(ttft_s=1.0)), make_row({})) == {"ttft_s": "missing"}


BASE = [10.0, 10.1, 10.2]


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (BASE, "same"),
        ([12.0, 12.1, 12.2], "worse"),
        ([8.0, 8.1, 8.2], "better"),
        ([10.05, 12.1, 12.2], "same"),  # they overlap: three against three can say no more
        ([10.21, 10.3, 10.4], "same"),  # apart, but by less than 5 %
        ([12.0, 12.1], "not judged"),
        ([10.05, 12.1, 12.2, 12.1, 12.3, 12.2], "worse"),  # more repeats, less doubt
    ],
)
def test_measured_values_need_three_repeats_a_size_and_ranks_that_chance_does_not_give(after, verdict):
    rows = [make_row(measured(ttft_s=samples), hw="host", clock="wall") for samples in (BASE, after)]
    assert verdicts(*rows) == {"ttft_s": verdict}
    turned = {"worse": "better", "better": "worse"}
    rows = [make_row(measured(hit_rate=samples), hw="host", clock="wall") for samples in (BASE, after)]
    assert verdicts(*rows) == {"hit_rate": turned.get(verdict, verdict)}


def test_the_size_and_the_doubt_are_the_users():
    rows = [make_row(measured(ttft_s=samples), clock="wall") for samples in (BASE, [10.21, 10.3, 10.4])]
    assert verdicts(*rows, Rules(least=0.01)) == {"ttft_s": "worse"}
    assert verdicts(*rows, Rules(least=0.01, alpha=0.01)) == {"ttft_s": "same"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_the_rank_test_is_the_share_of_all_arrangements(low, high):
    contradicting = sum(a >= b for a in low for b in high)
    size, count, extreme = len(low) + len(high), 0, 0
    for places in combinations(range(size), len(low)):
        rest = [at for at in range(size) if at not in places]
        count += 1
        extreme += sum(a > b for a in places for b in rest) <= contradicting
    assert rank_p(low, high) == pytest.approx(extreme / count)


def test_many_samples_are_judged_by_the_normal_law_that_the_exact_one_nears(monkeypatch):
    low, high = list(range(0, 42, 2)), list(range(9, 51, 2))
    normal = rank_p(low, high)
    monkeypatch.setattr("moebench.evidence.EXACT", 100)
    assert rank_p(low, high) == pytest.approx(normal, rel=0.05)
    assert normal < 0.05 < rank_p(low, [x - 6 for x in high])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1, 1e6), min_size=3, max_size=6), st.lists(st.floats(1, 1e6), min_size=3, max_size=6))
def test_turned_round_a_comparison_says_the_opposite(one, other):
    rows = [make_row(measured(ttft_s=samples), clock="wall") for samples in (one, other)]
    (there,), (back,) = verdicts(*rows, Rules(0.0)).values(), verdicts(*rows[::-1], Rules(0.0)).values()
    assert {there, back} in ({"worse", "better"}, {"same"})


def test_answers_are_judged_by_intervals():
    def rows(name, *found):
        return [make_row(answered(name, *one)) for one in found]

    assert verdicts(*rows("quality_delta", (-1.0, 500, (-2.0, 0.0)), (-1.5, 500, (-2.5, -0.5)))) == {
        "quality_delta": "same"
    }
    assert verdicts(*rows("quality_delta", (-1.0, 500, (-2.0, 0.0)), (-9.0, 500, (-12.0, -6.0)))) == {
        "quality_delta": "worse"
    }
    assert verdicts(*rows("token_agreement", (0.90, 1000), (0.89, 1000))) == {"token_agreement": "same"}
    assert verdicts(*rows("token_agreement", (0.90, 1000), (0.80, 1000))) == {"token_agreement": "worse"}
    assert verdicts(*rows("token_agreement", (0.90, 20), (0.80, 20))) == {"token_agreement": "same"}
    assert verdicts(*rows("perplexity", (2.0, 20), (2.1, 20))) == {"perplexity": "not judged"}


def task(scores, version="ab12cd", mode="gen"):
    value = sum(scores) / len(scores)
    found = {"version": version, "mode": mode, "value": value, "n": len(scores), "scores": scores}
    return {"suite": "local", "tasks": {"copy": found}}


def test_tasks_are_paired_by_document():
    right, fewer = [100.0] * 20, [100.0] * 12 + [0.0] * 8

    def of(scores, **more):
        return make_row({}, quality=task(scores, **more))

    assert verdicts(of(right), of(fewer)) == {"quality.copy": "worse"}
    assert verdicts(of(fewer), of(right)) == {"quality.copy": "better"}
    assert verdicts(of(fewer), of(fewer[::-1])) == {"quality.copy": "same"}  # eight gained, eight lost
    assert verdicts(of(right, mode="ppl"), of(fewer, mode="ppl")) == {"quality.copy": "better"}  # nats: less is better
    assert verdicts(of(right), of(fewer, version="other1")) == {"quality.copy": "not judged"}
    assert verdicts(of(right), make_row({})) == {"quality.copy": "missing"}


PROMPTS = {"kind": "prompts", "seed": 0, "hash": "ab"}


@pytest.mark.parametrize("elsewhere", [{"isa": "avx512f"}, {"packages": {"torch": "3"}}, {"cpu": "another"}])
def test_times_of_a_model_that_computes_are_equal_on_one_kind_of_machine_only(elsewhere):
    old, new = (make_row(modeled(ttft_s=value), workload=PROMPTS) for value in (1.0, 1.1))
    assert verdicts(old, new) == {"ttft_s": "worse"}
    there = make_row(modeled(ttft_s=1.1), workload=PROMPTS, environment=elsewhere)
    assert verdicts(old, there) == {"ttft_s": "not judged"}
    replay = make_row(modeled(ttft_s=1.0)), make_row(modeled(ttft_s=1.1), environment=elsewhere)
    assert verdicts(*replay) == {"ttft_s": "worse"}  # a replay computes nothing: it is equal everywhere


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"protocol": {"profile": "p1"}}, "profile of m4pro"),
        ({"workload": {"kind": "synthetic", "seed": 0, "hash": "cd"}}, "workload hash"),
        ({"workload": {"kind": "synthetic", "seed": 1, "hash": "ab"}}, "workload seed"),
        ({"protocol": {"warmup_tokens": 8}}, "warmup_tokens"),
        ({"protocol": {"page_cache": "warm"}}, "page_cache"),
        ({"fidelity": "altered"}, "fidelity"),
        ({"schema": 0}, "schema"),
    ],
)
def test_what_differs_in_its_conditions_is_refused_and_says_in_what(changed, said):
    with pytest.raises(UsageError, match=said):
        regress.compare([make_row()], [make_row(**changed)], Rules())


def test_measured_rows_of_two_machines_are_refused_and_told_apart_where_both_have_both():
    one, two = (make_row(measured(ttft_s=BASE), hw="host", clock="wall", environment={"cpu": c}) for c in "ab")
    with pytest.raises(UsageError, match="machine of host"):
        regress.compare([one], [two], Rules())
    assert Counter(f.verdict for f in regress.compare([one, two], [two, one], Rules())) == {"same": 2}


def test_a_value_that_is_now_measured_is_refused():
    with pytest.raises(UsageError, match="ttft_s is modeled"):
        regress.compare([make_row(modeled(ttft_s=1.0))], [make_row(measured(ttft_s=BASE))], Rules())


def test_missing_new_and_failed_rows_are_named():
    ran, other, broken = make_row(), make_row(system="lfu"), failed_row()
    assert verdicts(ran, other) == {"": "new"}  # of two findings the last
    assert [f.verdict for f in regress.compare([ran], [other], Rules())] == ["missing", "new"]
    (finding,) = regress.compare([ran], [broken], Rules())
    assert (finding.verdict, finding.note) == ("failed", "out of memory")
    assert [f.verdict for f in regress.compare([broken], [ran], Rules())] == ["better"]
    assert [f.verdict for f in regress.compare([broken], [broken], Rules())] == ["same"]
    assert [f.verdict for f in regress.compare([], [broken], Rules())] == ["failed"]


def test_the_newest_of_several_runs_of_a_cell_counts():
    old = make_row(modeled(ttft_s=1.0), finished="2026-01-01")
    worse = make_row(modeled(ttft_s=2.0), finished="2026-01-02")
    mended = make_row(modeled(ttft_s=1.0), finished="2026-01-03")
    assert verdicts(old, worse) == {"ttft_s": "worse"}
    for order in ([worse, mended], [mended, worse]):
        assert [f.verdict for f in regress.compare([old], order, Rules())] == ["same"]
    assert [f.verdict for f in regress.compare([old], [failed_row(finished="2026-01-04"), mended], Rules())] == [
        "failed"
    ]


def test_options_make_cells_places_do_not_and_an_option_of_one_side_only_is_none():
    small, large = make_row(modeled(ttft_s=1.0)), make_row(modeled(ttft_s=2.0), options={"budget": "0.5"})
    assert [f.verdict for f in regress.compare([small, large], [large, small], Rules())] == ["same", "same"]
    moved = make_row(modeled(ttft_s=1.0), options={"workload": {"path": "elsewhere"}})
    assert verdicts(small, moved) == {"ttft_s": "same"}
    later = make_row(modeled(ttft_s=1.0), options={"an_option_of_tomorrow": 1})
    assert verdicts(small, later) == {"ttft_s": "same"}
    other = dataclasses.replace(later, config={**later.config, "an_option_of_tomorrow": 2})
    with pytest.raises(UsageError, match="an_option_of_tomorrow"):
        regress.compare([small], [later, other], Rules())


def test_a_metric_that_this_version_does_not_know_is_judged_by_its_own_direction():
    old, new = (make_row({"joule": dataclasses.replace(metric("ttft_s", v, "modeled"), unit="J")}) for v in (1.0, 2.0))
    assert verdicts(old, new) == {"joule": "worse"}
