"""Figures are valid plotly, show the numbers of the tables, and draw the right fronts, curves and tails."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import ROLES, comparison, details, failed, published, row

from moebench.report import tables, times, trade
from moebench.report.figure import Figure, Looks
from moebench.report.groups import groups, newest, one_budget
from moebench.report.pareto import front
from moebench.report.tail import rank, tail


@pytest.fixture(scope="module")
def group():
    return next(group for group in groups(comparison(), ROLES) if group.model == "tinymoe")


@pytest.fixture(scope="module")
def rows(group):
    (picture,) = group.pictures.values()
    return picture


@pytest.fixture(scope="module")
def looks(rows):
    return Looks([named.row.system for named in rows])


def test_all_figures_are_valid_plotly(rows, looks):
    from plotly import graph_objects

    found = [trade.pareto(rows, "a", looks), trade.quality(rows, "a", looks), *trade.curves(rows, "a", looks)]
    found += [times.split(rows, "a"), times.spread(rows, "a"), times.by_misses(rows, "a", looks)]
    found += [times.timeline(rows[0], "a")]
    assert len(found) == 8
    for figure in found:
        text = re.sub(r"var\(--\w+\)", "#123456", json.dumps({"data": figure.data, "layout": figure.layout}))
        assert graph_objects.Figure(json.loads(text)).data
        assert figure.caption
        assert figure.alt


def test_the_picture_shows_the_numbers_of_the_table(group, rows, looks):
    sheet = tables.results(group, "x").sheet
    at = {name: place for place, name in enumerate(sheet.header)}
    told = {line[0]: (float(line[at["peak active GiB"]]), float(line[at["decode tok/s"]])) for line in sheet.rows
            if line[at["decode tok/s"]] and "published" not in line[0]}  # fmt: skip
    figure = trade.pareto(rows, "a", looks)
    drawn = [pair for trace in figure.data if "text" in trace for pair in zip(trace["x"], trace["y"], strict=True)]
    assert sorted(drawn) == sorted(told.values())
    split = tables.split(group, "x").sheet
    bars = times.split(rows, "a")
    drawn = {trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in bars.data}
    for line in split.rows:
        parts = [drawn[name][line[0]] for name in tables.PARTS]
        assert [float(cell) for cell in line[2:-2]] == parts
        assert float(line[-2]) == pytest.approx(sum(parts))


def test_what_hooks_took_is_a_column(group):
    sheet = tables.split(group, "x").sheet
    assert {line[-1] for line in sheet.rows} == {"12.5"}


def test_the_oracle_and_what_did_not_run_here_are_on_no_front(rows, looks):
    figure = trade.pareto(rows, "a", looks)
    line = next(trace for trace in figure.data if trace["name"] == "front")
    oracle = next(named for named in rows if named.name == "belady budget=0.25").row.metrics
    assert oracle["peak_active_gib"].value in [x for trace in figure.data for x in trace["x"]]
    assert oracle["decode_tok_s"].value not in line["y"]
    assert not any(named.published or named.row.status == "failed" for named in rows)
    assert "resident" in figure.caption.rsplit("too:", 1)[1]  # slower and larger than edge0, but not worse in quality


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_a_front_is_what_nothing_beats_and_beats_all_else(points):
    named = list(enumerate(points))
    best = set(front(named))

    def beats(a, b):
        return all(x >= y for x, y in zip(a, b, strict=True)) and a != b

    for at, point in named:
        assert (at in best) == (not any(beats(other, point) for other in points))
    assert all(at in best or any(beats(points[top], point) for top in best) for at, point in named)


def test_curves_join_rows_of_one_system_by_budget_and_need_two(rows, looks):
    hits, moved = trade.curves(rows, "a", looks)
    lines = {trace["name"]: trace for trace in hits.data}
    assert lines["lru"]["x"] == [0.05, 0.1, 0.25, 0.5]
    assert len(lines["edge0"]["x"]) == 1
    assert lines["belady"]["line"]["dash"] == "dash"
    assert len(moved.data) == len(hits.data)
    assert trade.curves(one_budget(rows), "a", looks) == []


def test_a_sweep_in_bytes_is_a_picture_of_its_own(looks):
    found = [row("lru", budget) for budget in ("0.1", "0.5")]
    for gib in (1, 2):
        base = row("lru")
        found.append(row("lru", config={**base.config, "budget": f"{gib}GiB"}))
    (group,) = groups(found, ROLES)
    (picture,) = group.pictures.values()
    drawn = trade.curves(picture, "a", looks)
    assert [figure.data[0]["x"] for figure in drawn] == [[0.1, 0.5]] * 2 + [[1.0, 2.0]] * 2
    assert len({figure.slug for figure in drawn}) == 4


def test_workloads_do_not_share_a_picture():
    other = row("lru", workload={"kind": "prompts", "seed": 1, "hash": "ffffffffff"})
    (group,) = groups([row("lru"), other, row("slru")], ROLES)
    assert {name: len(rows) for name, rows in group.pictures.items()} == {"prompts ab12cd": 2, "prompts ffffff": 1}


# --- the tail ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.integers(0, 300)), min_size=1, max_size=300))
def test_the_tail_is_a_partition_of_the_steps(pairs):
    found = tail({"ms": [ms for ms, _ in pairs], "misses": [missed for _, missed in pairs]})
    assert sum(bucket.n for bucket in found.buckets) == found.whole.n == len(pairs)
    for bucket in found.buckets:
        inside = [ms for ms, missed in pairs if bucket.low <= missed <= bucket.high]
        assert (bucket.n, bucket.p50, bucket.p95) == (len(inside), rank(inside, 0.5), rank(inside, 0.95))
        assert (bucket.p99 is None) == (bucket.n < 100)
    missed = [ms for ms, count in pairs if count]
    assert (found.given_miss is None) == (not missed)
    assert found.given_miss is None or found.given_miss.n == len(missed)
    assert (found.slow is None) == (len(pairs) < 100)


def test_a_tail_made_of_misses_says_so():
    steps = {"ms": [1.0] * 198 + [9.0, 9.0], "misses": [0] * 198 + [3, 4]}
    found = tail(steps)
    assert (found.slow, found.slow_missed) == (200, 2)  # the 99th of 200 is the 198th: still a step without a miss
    found = tail({"ms": [1.0] * 196 + [9.0] * 4, "misses": [0] * 196 + [1, 2, 3, 0]})
    assert (found.slow, found.slow_missed, found.whole.p99) == (4, 3, 9.0)
    assert [bucket.label for bucket in found.buckets] == ["0", "1", "2", "3-4"]


def test_rows_without_steps_have_no_tail():
    assert tail({}) is None
    (group,) = groups([row("lru", details={}), failed()], ROLES)
    assert tables.steps(group, "x") is None
    assert tables.by_misses(group, "x") is None


# --- groups ------------------------------------------------------------------------------------------------------


def test_the_table_goes_from_floor_to_ceiling_with_published_rows_beside_their_system():
    (group,) = groups([row("resident"), row("belady"), published(), row("edge0"), row("lru"), row("ondemand")], ROLES)
    assert [named.name for named in group.rows] == [
        "ondemand", "lru", "edge0", "edge0 (published)", "belady", "resident",
    ]  # fmt: skip
    cells = tables.results(group, "x").rows[3]
    assert cells[1].text == "published"
    assert any(cell.text == "20.4 †" and "arXiv 2609.18063" in cell.note for cell in cells)


def test_rows_of_one_system_are_told_apart_and_no_two_share_a_name(group):
    names = [named.name for named in group.rows]
    assert len(names) == len(set(names))
    twin = row("lru", workload={"kind": "prompts", "seed": 1, "hash": "ffffffffff"})
    (both,) = groups([row("lru"), twin], ROLES)
    assert [named.name for named in both.rows] == ["lru", "lru"]  # their workloads tell them apart
    assert len({named.workload for named in both.rows}) == 2
    assert "lru budget=0.05" in names
    assert "slru" in names


def test_of_a_cell_the_last_run_is_shown_and_older_ones_are_named():
    old, new = (
        row("lru", volatile={"finished": "2026-01-01"}),
        row("lru", metrics={}, volatile={"finished": "2026-02-01"}),
    )
    again = row("lru", volatile={"finished": "2026-01-02"})  # the same row run twice
    gone = failed("lru", volatile={"finished": "2025-01-01"})
    kept, left = newest([new, old, again, gone])
    assert kept == [new]
    assert len(left) == 2
    assert old.id in left[1]
    assert "failed" in left[0]
    late = failed("lru", volatile={"finished": "2026-03-01"})
    kept, left = newest([new, late])
    assert kept == [late]  # a failure is not hidden behind an older success
    assert new.id in left[0]


def test_steps_of_the_fixture_add_up():
    found = details(10.0)
    assert sum(found["split_ms_per_token"].values()) == pytest.approx(sum(found["steps"]["ms"]) / 120)


def test_nothing_in_a_figure_ends_the_script_that_holds_it():
    figure = Figure("a", "", "", "", [{"name": "</script><!--&", "x": [1]}], {})
    assert not set("<>&") & set(figure.json)
    assert json.loads(figure.json)["data"] == list(figure.data)
