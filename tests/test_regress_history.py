"""A history names the commit at which a metric changed, and says nothing of noise."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_fixtures import failed_row, make_row, measured, modeled

from moebench import cli
from moebench.evidence import steps
from moebench.history import find
from moebench.regress import Rules
from moebench.result import write


def series(make, values, **more):
    """A row per value, a commit each, shuffled: the order is that of time."""
    rows = [
        make_row(make(value), commit=f"c{at}", finished=f"2026-01-01T00:{at:02}", **more)
        for at, value in enumerate(values)
    ]
    random.Random(0).shuffle(rows)
    return rows


def found(rows, **rules):
    """(metric, commit before, commit after, verdict) of each change."""
    return [
        (step.metric, step.last.environment["commit"], step.first.environment["commit"], step.verdict)
        for step in find(rows, Rules(**rules))
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=8))
def test_a_modeled_value_steps_wherever_it_differs(values):
    rows = series(lambda value: modeled(ttft_s=value), values)
    expected = [
        ("ttft_s", f"c{at}", f"c{at + 1}", "worse" if b > a else "better")
        for at, (a, b) in enumerate(pairwise(values))
        if a != b
    ]
    assert found(rows) == expected


def test_a_planted_step_of_a_measured_value_is_found_at_its_commit():
    rng = random.Random(1)
    values = [[rng.gauss(10.0 if at < 6 else 11.0, 0.2) for _ in range(3)] for at in range(12)]
    rows = series(lambda samples: measured(ttft_s=samples), values, clock="wall", hw="host")
    assert found(rows) == [("ttft_s", "c5", "c6", "worse")]
    assert found(rows, least=0.2) == []  # smaller than what the user calls a change
    there_and_back = values + [[x - 1.0 for x in point] for point in values[6:]]
    rows = series(lambda samples: measured(ttft_s=samples), there_and_back, clock="wall", hw="host")
    assert found(rows) == [("ttft_s", "c5", "c6", "worse"), ("ttft_s", "c11", "c12", "better")]


def test_noise_has_no_steps_more_often_than_alpha_says():
    rng = random.Random(2)
    alarms = sum(bool(steps([[rng.gauss(10, 1)] for _ in range(12)], 0.05, 0.0)) for _ in range(200))
    assert alarms <= 20  # 10 expected at most


def test_cells_machines_and_workloads_have_histories_of_their_own():
    rows = [
        make_row(modeled(ttft_s=1.0), finished="1"),
        make_row(modeled(ttft_s=2.0), finished="2", options={"budget": "0.5"}),
        make_row(modeled(ttft_s=3.0), finished="3", workload={"kind": "synthetic", "seed": 0, "hash": "other"}),
        make_row(measured(ttft_s=[4.0]), finished="4", clock="wall", environment={"cpu": "a"}),
        make_row(measured(ttft_s=[5.0]), finished="5", clock="wall", environment={"cpu": "b"}),
    ]
    assert found(rows) == []


def test_a_failed_run_and_a_value_that_is_missing_are_no_level():
    rows = [
        make_row(modeled(ttft_s=1.0), commit="c0", finished="1"),
        failed_row(commit="c1", finished="2"),
        make_row(modeled(ttft_s=None), commit="c2", finished="3"),
        make_row(modeled(ttft_s=2.0), commit="c3", finished="4"),
    ]
    assert found(rows) == [("ttft_s", "c2", "c3", "worse")]


def test_runs_of_one_commit_are_one_point():
    rows = [make_row(modeled(ttft_s=1.0), commit="c0", finished=str(at)) for at in range(3)]
    rows.append(make_row(modeled(ttft_s=2.0), commit="c1", finished="4"))
    assert found(rows) == [("ttft_s", "c0", "c1", "worse")]


@pytest.mark.parametrize("form", ["table", "json", "markdown"])
def test_the_command_prints_commits_on_both_sides(tmp_path, capsys, form):
    for row in series(lambda value: modeled(ttft_s=value, hit_rate=value / 10), [1.0, 1.0, 2.0]):
        write(row, tmp_path)
    write(failed_row(finished="2026-02"), tmp_path)
    assert cli.main(["regress", f"history={tmp_path}", f"format={form}", "metric=ttft_s"]) == 0
    output = capsys.readouterr().out
    assert "hit_rate" not in output
    if form != "markdown":
        (step,) = json.loads(output.splitlines()[-1])["steps"]
        assert (step["last"], step["first"], step["before"], step["after"]) == ("c1", "c2", 1.0, 2.0)
    if form != "json":
        (line,) = [line for line in output.splitlines() if "ttft_s" in line and not line.startswith("{")]
        assert line.replace("|", " ").split() == ["ttft_s", "worse", "c1", "c2", "1", "2", "+100", "%"]
        assert "1 of them failed" in output
