"""A result survives writing and reading, is the same bytes for the same content, and never lies by omission."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.result import (
    METRICS,
    Metric,
    ResultError,
    Row,
    from_json,
    load,
    metric,
    stdout_document,
    to_json,
    write,
)

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)
metrics = st.builds(
    Metric,
    value=numbers,
    unit=st.just("ms"),
    higher_is_better=st.sampled_from([True, False, None]),
    n=st.integers(0, 10**6),
    samples=st.lists(numbers, max_size=3),
    ci=st.none() | st.tuples(numbers, numbers).map(lambda pair: tuple(sorted(pair))),
    provenance=st.sampled_from(["measured", "modeled"]),
) | st.builds(Metric, value=st.none(), unit=st.just("s"), higher_is_better=st.none(), reason=st.text(min_size=1))
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.text(), lambda inner: st.lists(inner, max_size=2), max_leaves=4
)


def make_row(**changes) -> Row:
    row = Row(
        system="lru",
        fidelity="exact",
        hw="m4pro",
        model="tinymoe",
        workload_name="synthetic",
        config={"budget": "0.15", "system": {"id": "lru"}},
        environment={"python": "3.11"},
        workload={"kind": "synthetic", "seed": 0, "hash": "ab"},
        protocol={"warmup_tokens": 16},
        metrics={"ttft_s": metric("ttft_s", 1.5, "measured", samples=(1.5, 1.25))},
        volatile={"timestamp": "2026-01-01"},
    )
    return dataclasses.replace(row, **changes)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1), metrics, max_size=4), st.dictionaries(st.text(), plain, max_size=3))
def test_every_row_survives_writing_and_reading(found, config):
    row = make_row(metrics=found, config=config)
    text = to_json(row)
    again = from_json(text)
    assert to_json(again) == text
    assert again.metrics == found
    assert again.id == row.id


def test_only_the_volatile_block_may_differ_between_equal_runs():
    one, two = make_row(), make_row(volatile={"timestamp": "2027-07-07", "seconds": 3.5})
    texts = [{key: value for key, value in json.loads(to_json(row)).items() if key != "volatile"} for row in (one, two)]
    assert texts[0] == texts[1]
    assert one.id == two.id
    assert make_row(config={"budget": "0.2"}).id != one.id


def test_a_second_run_gets_its_own_file_and_leaves_the_first_alone(tmp_path):
    first = write(make_row(), tmp_path)
    before = first.read_bytes()
    second = write(make_row(volatile={"timestamp": "later"}), tmp_path)
    assert first != second
    assert first.read_bytes() == before
    assert first.parent == tmp_path / "m4pro" / "lru__tinymoe__synthetic"
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, second.name])  # no leftovers
    assert load(second).volatile == {"timestamp": "later"}


def test_names_cannot_leave_the_results_folder(tmp_path):
    path = write(make_row(model="/home/someone/../model", hw="../../etc"), tmp_path)
    assert path.resolve().is_relative_to(tmp_path.resolve())
    assert len(path.relative_to(tmp_path).parts) == 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"value": None}, "reason"),
        ({"value": 1.0}, "provenance"),
        ({"value": 1.0, "provenance": "guessed"}, "measured, modeled, published"),
        ({"value": 1.0, "provenance": "published"}, "source"),
        ({"value": float("nan"), "provenance": "measured"}, "finite"),
        ({"value": float("inf"), "provenance": "measured"}, "finite"),
        ({"value": True, "provenance": "measured"}, "not a number"),
        ({"value": "3", "provenance": "measured"}, "not a number"),
        ({"value": 1.0, "provenance": "measured", "ci": (2.0, 1.0)}, "low, high"),
        ({"value": 1.0, "provenance": "measured", "n": -1}, "negative"),
        ({"value": 1.0, "provenance": "measured", "samples": (float("nan"),)}, "finite"),
    ],
)
def test_a_dishonest_metric_is_refused(arguments, word):
    with pytest.raises(ResultError, match=word):
        Metric(unit="s", higher_is_better=False, **arguments)


@pytest.mark.parametrize(
    "changes", [{"status": "failed"}, {"error": "boom"}, {"status": "odd"}, {"workload": {"kind": "synthetic"}}]
)
def test_a_row_that_contradicts_itself_is_refused(changes):
    with pytest.raises(ResultError):
        make_row(**changes)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda text: text[: len(text) // 2], "not a result file"),
        (lambda text: "[]", "schema"),
        (lambda text: text.replace('"schema": 1', '"schema": 99'), "newer"),
        (lambda text: text.replace('"value": 1.5', '"value": 1.6'), "changed after"),
        (lambda text: text.replace('"value": 1.5', '"value": null'), "reason"),
        (lambda text: text.replace('"hw"', '"hardware"'), "not a valid result"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path, damage, word):
    path = write(make_row(), tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ResultError, match=word) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ResultError, match="nowhere"):
        load(tmp_path / "nowhere.json")


def test_the_document_is_one_line_with_everything_but_samples_and_details():
    row = make_row(details={"steps": {"ms": [1.0]}})
    text = stdout_document([row, make_row(system="lfu")])
    assert "\n" not in text
    document = json.loads(text)
    full = json.loads(to_json(row))
    del full["details"]
    for entry in full["metrics"].values():
        del entry["samples"]
    assert document["schema"] == 1
    assert document["rows"][0] == full
    assert [row["system"] for row in document["rows"]] == ["lru", "lfu"]


def test_a_missing_value_keeps_no_provenance():
    gone = metric("hit_rate", None, "measured", reason="no expert was requested")
    assert gone.provenance is None
    assert (gone.unit, gone.higher_is_better) == METRICS["hit_rate"]
