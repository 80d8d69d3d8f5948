"""The ladder's arithmetic: steps add up along every way, a repair's share is what it says, a failure keeps the rest."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quality_fixtures import answered, task
from test_result_files import make_row

from moebench.quality.paired import exact_p, paid_back
from moebench.report.ladder import MEAN, Climbed, Ladder, data, sheet, tables
from moebench.report.plain import show, to_csv

RIGHT = st.integers(0, 1).map(float)
BELOW = (None, 0, 1, 2, 1)  # a ladder with a branch: the last rung stands beside the third


def scored(arm: dict[str, list[float]], reference: dict[str, list[float]]):
    return answered(tasks={name: task(arm[name], reference[name]) for name in arm})


def climbed(rows, repairs: int | None = 3) -> Ladder:
    names = ("stored", "smaller", "replaced", "adapter", "control")
    return Ladder(
        [
            Climbed(name, f"what {name} does", after, position == repairs, row, f"moebench run {name}")
            for position, (name, after, row) in enumerate(zip(names, BELOW, rows, strict=True))
        ]
    )


@st.composite
def ladders(draw):
    """Five rungs and a reference on two tasks of different sizes."""
    sizes = {"chain": draw(st.integers(1, 6)), "world": draw(st.integers(1, 6))}
    arms = [{name: draw(st.lists(RIGHT, min_size=n, max_size=n)) for name, n in sizes.items()} for _ in range(6)]
    return climbed([scored(arm, arms[5]) for arm in arms[:5]])


@given(ladders())
@settings(max_examples=20, deadline=None)
def test_steps_add_up_to_the_difference_to_the_unmodified_model_on_every_way(ladder):
    for position, rung in enumerate(ladder.rungs):
        below = 0.0 if rung.after is None else ladder.total(rung.after).delta.points
        assert below + ladder.step(position).delta.points == pytest.approx(ladder.total(position).delta.points)


@given(ladders())
@settings(max_examples=20, deadline=None)
def test_a_difference_is_that_of_the_means_over_tasks_and_counts_all_items(ladder):
    entries = data(ladder)
    for position, entry in enumerate(entries):
        reference = {name: np.mean(scores) for name, scores in ladder.reference.items()}
        mean = np.mean([entry["scores"][name] - 100 * reference[name] for name in reference])
        assert entry["total"]["points"] == pytest.approx(mean)
        assert entry["total"]["n"] == sum(map(len, ladder.reference.values()))
        low, high = ladder.total(position).delta.ci
        assert low - 1e-9 <= entry["total"]["points"] <= high + 1e-9


@given(st.lists(st.tuples(RIGHT, RIGHT, RIGHT), min_size=1, max_size=12), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_what_is_paid_back_is_a_share_of_the_loss(items, groups):
    lossy, repaired, reference = map(list, zip(*items, strict=True))
    names = [str(number % groups) for number in range(len(items))]
    share = paid_back(repaired, lossy, reference, names)
    means = [np.mean([np.mean([s for s, g in zip(arm, names, strict=True) if g == name]) for name in set(names)])
             for arm in (lossy, repaired, reference)]  # fmt: skip
    if means[2] <= means[0] + 1e-12:
        assert share.value is None
        assert share.reason
    else:
        assert share.value == pytest.approx((means[1] - means[0]) / (means[2] - means[0]))
        assert paid_back(reference, lossy, reference, names).value == pytest.approx(1)
        assert paid_back(lossy, lossy, reference, names).value == pytest.approx(0)
        assert (share.ci is None) == bool(share.reason)


def test_the_interval_of_a_share_narrows_around_it_with_more_items():
    rng = np.random.default_rng(0)
    reference = np.ones(1000)
    lossy, repaired = (rng.random(1000) < 0.5).astype(float), (rng.random(1000) < 0.9).astype(float)
    widths = []
    for n in (50, 1000):
        share = paid_back(repaired[:n], lossy[:n], reference[:n], ["t"] * n)
        low, high = share.ci
        assert low < share.value < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
    assert (
        paid_back([1.0] * 100, [1.0] * 99 + [0.0], [1.0] * 100, ["t"] * 100).ci is None
    )  # one item is no loss to go by


@given(st.integers(0, 9), st.integers(0, 9))
@settings(deadline=None)
def test_the_exact_test_counts_all_outcomes_that_are_as_far_from_even(gained, lost):
    count = gained + lost
    heads = [bin(outcome).count("1") for outcome in range(2**count)] if count <= 12 else []
    p = exact_p(gained, lost)
    if heads:
        assert p == pytest.approx(sum(abs(2 * h - count) >= abs(gained - lost) for h in heads) / 2**count)
    assert p == exact_p(lost, gained)
    assert 0 < p <= 1


def test_a_rung_that_failed_keeps_its_line_and_the_others_their_numbers():
    right, wrong = [1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]
    rows = [scored({"chain": arm}, {"chain": right}) for arm in (right, wrong, wrong, right, wrong)]
    whole = climbed(rows)
    broken = climbed([*rows[:2], make_row(status="failed", error="no <heads> | here"), *rows[3:]])
    for position in (0, 1, 3, 4):
        assert broken.total(position) == whole.total(position)
    assert broken.step(2).delta is None
    assert broken.step(3).reason == "replaced failed"
    assert broken.step(4) == whole.step(4)
    assert broken.paid_back(3)[MEAN].value is None
    assert whole.paid_back(3)[MEAN].value == 1
    stream = io.StringIO()
    show(tables(broken, "ladder"), stream, 200)
    assert "failed replaced: no <heads> | here" in stream.getvalue()
    assert [entry["error"] is None for entry in data(broken)] == [True, True, False, True, True]


def test_the_table_has_the_scores_the_steps_and_the_share(tmp_path):
    right = {"chain": [1.0] * 4, "world": [1.0, 1.0, 0.0, 0.0]}
    half = {"chain": [1.0, 1.0, 0.0, 0.0], "world": [1.0, 1.0, 0.0, 0.0]}
    most = {"chain": [1.0, 1.0, 1.0, 0.0], "world": [1.0, 1.0, 1.0, 0.0]}
    scores, steps, shares = tables(climbed([scored(arm, right) for arm in (right, right, half, most, half)]), "t")
    assert scores.rows[0][2:5] == ("100.00", "50.00", "75.00")
    assert scores.rows[3][2:5] == ("50.00", "50.00", "50.00")
    assert [row[2] for row in steps.rows] == ["+0.00", "+0.00", "-25.00", "+25.00", "-25.00"]
    assert [row[5] for row in steps.rows] == ["+0.00", "+0.00", "-25.00", "+0.00", "-25.00"]
    assert [row[1] for row in steps.rows] == ["unmodified", "stored", "smaller", "replaced", "smaller"]
    assert {row[0]: row[4] for row in shares.rows} == {"chain": "0.50", "world": "-", "mean": "1.00"}
    assert "- world: no loss to pay back" in shares.notes
    stream = io.StringIO()
    show([scores, steps, shares], stream, 80)
    rules = [line for line in stream.getvalue().splitlines() if line.startswith("─")]
    assert max(map(len, rules)) <= 80
    assert len(rules) <= 6


def test_the_sheet_reads_back_and_says_what_the_tables_say(tmp_path):
    pandas = pytest.importorskip("pandas")
    right = {"chain": [1.0] * 4, "world": [1.0, 1.0, 0.0, 0.0]}
    half = {"chain": [1.0, 1.0, 0.0, 0.0], "world": [1.0, 1.0, 0.0, 0.0]}
    failed = make_row(status="failed", error="x")
    ladder = climbed([*(scored(arm, right) for arm in (right, half, half, right)), failed])
    found = pandas.read_csv(io.StringIO(to_csv(sheet(ladder)))).set_index(["rung", "dataset"])
    assert len(found) == 5 * 3
    assert found.loc[("smaller", "mean"), "step delta"] == -25
    assert found.loc[("smaller", "chain"), "step delta"] == -50
    assert found.loc[("adapter", "chain"), "total delta"] == 0
    assert found.loc[("control", "chain")].isna()["score"]
    assert found.loc[("control", "chain"), "unmodified"] == 100
