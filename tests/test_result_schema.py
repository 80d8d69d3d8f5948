"""The schema file says of every result what the reader does: committed ones, fresh ones, those of later versions."""

from __future__ import annotations

import copy
import dataclasses
import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from harness_fixtures import SHORT
from result_fixtures import failed_row, make_row, measured

import moebench
from moebench.plugins import load_plugins
from moebench.result import OPTIONAL, SCHEMA, Metric, Row, from_json, to_json
from moebench.results import files, read

COMMITTED = Path(__file__).parent.parent / "results" / "baseline"
DOCUMENT = json.loads(resources.files("moebench").joinpath("result.schema.json").read_text())
VALID = jsonschema.Draft202012Validator(DOCUMENT)


def test_the_schema_is_one_and_lists_the_fields_of_a_row():
    VALID.check_schema(DOCUMENT)
    assert DOCUMENT["properties"]["schema"] == {"const": SCHEMA}
    assert set(DOCUMENT["properties"]) == {field.name for field in dataclasses.fields(Row)} | {"id"}
    assert set(DOCUMENT["properties"]) - set(DOCUMENT["required"]) == set(OPTIONAL)
    assert set(DOCUMENT["$defs"]["metric"]["properties"]) == {field.name for field in dataclasses.fields(Metric)}


@pytest.mark.parametrize("path", files([COMMITTED]), ids=lambda path: "/".join(path.parts[-3:]))
def test_committed_results_are_valid(path):
    VALID.validate(json.loads(path.read_text()))


def test_the_baseline_reads_whole_and_holds_every_system_that_ships(monkeypatch):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    rows = read(COMMITTED / "replay", strict=True)
    assert {row.system for row in rows} == set(load_plugins().systems)
    assert all(row.status == "ok" for row in rows)
    channels = {row.system: row.assumptions for row in rows if row.workload_name == f"tinymoe-{row.system}"}
    assert set(channels) == {"edge0", "bigmomo"}  # what they predict and draft was recorded, not made up
    assert not any("surrogate" in line for lines in channels.values() for line in lines)


def test_fresh_rows_are_valid(plugin_free):
    (row,) = moebench.run(system="lru", hw="m4pro", model="olmoe-1b-7b", quality="none", **SHORT)
    for one in (row, failed_row(), make_row(measured(ttft_s=[1.0, 2.0, 3.0]), clock="wall")):
        VALID.validate(json.loads(to_json(one)))


@pytest.fixture
def plugin_free(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))


BROKEN = {
    "status": "unknown",
    "schema": 2,
    "error": "an error of a row that did not fail",
    "metrics": {"ttft_s": {"value": 1.0}},
    "workload": {"kind": "synthetic"},
    "id": "not hex",
    "details": {"timeline": {"events": [["lane", "read", 0, 1]]}},
}


@pytest.mark.parametrize("field", BROKEN)
def test_what_is_broken_is_not_valid(field):
    data = json.loads(to_json(make_row()))
    VALID.validate(data)
    with pytest.raises(jsonschema.ValidationError):
        VALID.validate({**data, field: BROKEN[field]})


def test_a_null_without_reason_and_a_value_without_provenance_are_not_valid():
    data = json.loads(to_json(make_row()))
    for change in ({"value": None, "reason": ""}, {"provenance": None}):
        broken = copy.deepcopy(data)
        broken["metrics"]["hit_rate"] |= change
        with pytest.raises(jsonschema.ValidationError):
            VALID.validate(broken)


def test_a_new_metric_and_a_new_optional_field_need_no_new_schema():
    row = make_row()
    later = dataclasses.replace(row, metrics={**row.metrics, "joule_per_token": row.metrics["hit_rate"]})
    text = to_json(later)
    assert from_json(text) == later
    VALID.validate({**json.loads(text), "energy": {"meter": "none"}})
