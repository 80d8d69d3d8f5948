"""The reader loses nothing silently: every result is a row, everything else is named."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_fixtures import failed_row, make_row, measured, modeled

import moebench
from moebench.api import frame
from moebench.errors import UsageError
from moebench.result import METRICS, from_json, load, to_json, write
from moebench.results import read

FOREIGN = {
    "half.json": lambda text: text[: len(text) // 2],
    "list.json": lambda text: "[1, 2]",
    "other.json": lambda text: '{"name": "package"}',
    "deep.json": lambda text: "[" * 100_000,
    "newer.json": lambda text: text.replace('"schema": 1', '"schema": 2'),
    "edited.json": lambda text: text.replace("20.0", "40.0"),
    "nan.json": lambda text: text.replace("20.0", "NaN"),
    "binary.json": lambda text: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_result_is_named_and_skipped_or_refused(tmp_path, capsys, name):
    good = write(make_row(), tmp_path)
    content = FOREIGN[name](good.read_text())
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read(tmp_path) == [make_row()]
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert "skipped" in line
    with pytest.raises(UsageError, match=name):
        read(tmp_path, strict=True)


def test_what_is_skipped_is_said_to_who_asks(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    write(make_row(), tmp_path)
    said = []
    read(tmp_path, warn=said.append)
    assert len(said) == 1
    assert not capsys.readouterr().err


@pytest.mark.parametrize("content", [{}, {"other.json": "{}"}])
def test_no_results_says_how_to_make_some(tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="moebench run"):
        read(tmp_path)
    with pytest.raises(UsageError, match="moebench run"):
        read(tmp_path / "nowhere")


def test_files_and_folders_are_read_once_and_a_baseline_below_only_when_asked_for(tmp_path):
    one, two = make_row(), make_row(system="lfu")
    first = write(one, tmp_path)
    write(two, tmp_path / "baseline")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.json").write_text("{}")
    assert read(tmp_path) == [one]
    assert read([first, tmp_path]) == [one]
    assert read(tmp_path / "baseline") == [two]
    assert read([tmp_path, tmp_path / "baseline"]) == [one, two]


def test_a_failed_run_is_a_row_with_its_error(tmp_path):
    write(failed_row(error="no room"), tmp_path)
    table = moebench.load_results(tmp_path)
    assert set(table.status) == {"failed"}
    assert set(table.error) == {"no room"}
    assert table.value.isna().all()
    assert len(table) == len(METRICS)


def test_folders_of_two_machines_merge_without_collisions(tmp_path):
    rows = [make_row(measured(ttft_s=[1.0, 2.0, 3.0]), hw="host", clock="wall", environment={"cpu": cpu})
            for cpu in ("one", "two")]  # fmt: skip
    paths = [write(row, tmp_path / row.environment["cpu"]) for row in rows]
    merged = tmp_path / "merged"
    for path in paths:
        target = merged / path.relative_to(tmp_path / path.parts[len(tmp_path.parts)])
        assert not target.exists()
        target.parent.mkdir(parents=True)
        target.write_bytes(path.read_bytes())
    assert sorted(row.environment["cpu"] for row in read(merged)) == ["one", "two"]
    assert len({path.parents[1].name for path in paths}) == 2
    assert {row.machine for row in rows} == set(moebench.load_results(merged).machine)
    assert make_row(environment={"cpu": "two"}).folder == make_row().folder  # a modeled row is of no machine


def test_a_machine_is_told_by_its_kind_and_not_by_its_name():
    rows = [make_row({}, clock="wall", environment=more) for more in ({"ram_gib": 15.8}, {"platform": "Linux 6"})]
    assert rows[0].machine == rows[1].machine != ""


def test_a_file_of_before_an_optional_block_and_of_after_another_one_reads():
    row = make_row()
    data = json.loads(to_json(row))
    assert not {"quality", "details"} & set(data)
    assert from_json(to_json(row)) == row
    later = make_row(quality={"suite": "local"}, details={"steps": {"ms": [1.0, 2.0]}})
    text = to_json(later)
    assert from_json(text) == later
    assert '"ms":[1.0,2.0]' in text


def test_fields_and_metrics_of_a_later_moebench_do_not_stop_an_older_one(tmp_path):
    data = json.loads(to_json(make_row()))
    del data["id"]
    data["energy"], data["metrics"]["decode_tok_s"]["unit_note"] = {"joule": 3}, "later"
    fixed = json.dumps({k: v for k, v in data.items() if k != "volatile"}, sort_keys=True, separators=(",", ":"))
    data["id"] = hashlib.sha256(fixed.encode()).hexdigest()[:12]
    (tmp_path / "later.json").write_text(json.dumps(data))
    assert load(tmp_path / "later.json") == make_row()


values = st.none() | st.floats(-1e9, 1e9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(list(METRICS)), values, max_size=4), min_size=1, max_size=4))
def test_the_table_holds_every_metric_of_every_row_and_the_wide_one_the_same(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("results")
    rows = [make_row(modeled(**one), system=f"s{i}") for i, one in enumerate(found)]
    for row in rows:
        write(row, folder)
    table, wide = moebench.load_results(folder), frame(rows)
    assert len(table) == sum(max(1, len(one)) for one in found)
    for row, one in zip(rows, found, strict=True):
        lines = table[table.system == row.system]
        told = {m: v for m, v in zip(lines.metric, lines.value, strict=True) if isinstance(m, str)}
        assert {m: None if math.isnan(v) else v for m, v in told.items()} == one
        assert set(lines.id) == {row.id}
    labels = list(table.columns)[: list(table.columns).index("metric")]
    assert list(wide.columns)[: len(labels)] == labels


def test_the_package_offers_the_reader_without_importing_pandas():
    code = "import sys, moebench; moebench.load_results; sys.exit('pandas' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
