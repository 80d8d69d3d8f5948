"""Each form of a comparison parses back to what was found, whatever stands in a name; the exit code says the rest."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_fixtures import answered, failed_row, make_row, measured, modeled

from moebench import cli, regress, verdicts
from moebench.regress import Rules
from moebench.result import write

NASTY = "a|b`c`<b>%0A::error::,:\x00\x1b\n]]>&\"'"


@pytest.fixture
def folders(tmp_path):
    """Baseline and current results: one cell same, one worse and better, one missing, one new, one failed."""
    sides = {
        "baseline": [
            make_row(),
            make_row(modeled(decode_tok_s=20.0, ttft_s=1.0), system="lfu"),
            make_row(system="gone"),
            make_row(system="breaks"),
        ],
        "current": [
            make_row(),
            make_row(modeled(decode_tok_s=10.0, ttft_s=0.5), system="lfu"),
            make_row(system="came"),
            failed_row(system="breaks", error=NASTY),
        ],
    }
    for side, rows in sides.items():
        for row in rows:
            write(row, tmp_path / side)
    return f"baseline={tmp_path / 'baseline'}", f"current={tmp_path / 'current'}"


EXPECTED = {
    ("m4pro/lfu/tinymoe/synthetic", "decode_tok_s", "worse"),
    ("m4pro/lfu/tinymoe/synthetic", "ttft_s", "better"),
    ("m4pro/gone/tinymoe/synthetic", None, "missing"),
    ("m4pro/came/tinymoe/synthetic", None, "new"),
    ("m4pro/breaks/tinymoe/synthetic", None, "failed"),
}


def told(capsys, *words, code=1):
    """What ``moebench regress`` printed on stdout; it ended with ``code``."""
    assert cli.main(["regress", *words]) == code
    return capsys.readouterr().out


def test_the_table_is_for_people_and_ends_with_the_document(folders, capsys):
    *lines, last = told(capsys, *folders).splitlines()
    document = json.loads(last)
    found = {(entry["cell"], entry["metric"], entry["verdict"]) for entry in document["findings"]}
    assert found == EXPECTED
    assert document["counts"] == {"better": 1, "failed": 1, "missing": 1, "new": 1, "same": 2, "worse": 1}
    text = "\n".join(lines)
    assert re.search(r"decode_tok_s +worse +20 +10 +-50 %", text)
    assert re.search(r"ttft_s +better +1 +0\.5 +-50 %", text)
    assert lines[-1] == "5 cells: 1 missing, 1 failed, 1 worse, 1 better, 1 new, 2 same"
    assert max(map(len, lines)) <= 160


def test_json_is_the_document_alone(folders, capsys):
    (line,) = told(capsys, *folders, "format=json").splitlines()
    assert {(e["cell"], e["metric"], e["verdict"]) for e in json.loads(line)["findings"]} == EXPECTED


def test_junit_counts_what_it_holds(folders, capsys):
    root = ElementTree.fromstring(told(capsys, *folders, "format=junit"))
    suites = {suite.get("name"): suite for suite in root}
    assert len(suites) == 5
    for suite in suites.values():
        for outcome, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert len(suite.findall(f"testcase/{outcome}")) == int(suite.get(count))
        assert len(suite) == int(suite.get("tests"))
    (failure,) = root.findall("testsuite[@name='m4pro/lfu/tinymoe/synthetic']/testcase/failure")
    assert "20 -> 10 -50 %" in failure.get("message")
    (error,) = root.iter("error")
    assert "::error::" in error.get("message")


def cells(line):
    """The cells of a Markdown table's line."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def test_markdown_has_a_line_for_each_finding(folders, capsys):
    text = told(capsys, *folders, "format=markdown")
    lines = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert {len(line) for line in lines} == {7}
    assert {
        (cell, None if metric == "(row)" else metric, verdict) for cell, metric, verdict, *_ in lines[2:]
    } == EXPECTED
    assert "<b>" not in text


def test_bmf_holds_the_current_values_with_their_intervals(tmp_path, capsys):
    rows = [
        make_row(modeled(decode_tok_s=20.0, ttft_s=None)),
        make_row(answered("quality_delta", -1.0, 9, (-2.0, 0.5)), options={"budget": "0.5"}),
        failed_row(system="breaks"),
    ]
    for row in rows:
        write(row, tmp_path)
    found = json.loads(told(capsys, f"baseline={tmp_path}", f"current={tmp_path}", "format=bmf", code=0))
    assert found == {
        "m4pro/lru/tinymoe/synthetic budget=0.25": {"decode_tok_s": {"value": 20.0}},
        "m4pro/lru/tinymoe/synthetic budget=0.5": {
            "quality_delta": {"value": -1.0, "lower_value": -2.0, "upper_value": 0.5}
        },
    }


def test_annotations_are_one_line_each_and_nothing_in_them_is_a_command(folders, capsys):
    lines = told(capsys, *folders, "format=github").splitlines()
    parsed = [re.fullmatch(r"::(error|notice) title=([^:,]*)::(.*)", line) for line in lines]
    assert all(parsed)
    kinds = [match[1] for match in parsed]
    assert kinds == ["error"] * 3 + ["notice"] * 3  # missing, failed, worse; better, new, the sum
    (broken,) = [match[3] for match in parsed if "breaks" in match[3]]
    assert broken.replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%").endswith(NASTY)


@settings(max_examples=15, deadline=None)
@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_whatever_a_row_is_called_xml_and_markdown_stay_whole(name, error):
    rows = [make_row(system=f"a{name}"), failed_row(system="b", error=f"x{error}")]
    findings = regress.compare([make_row()], rows, Rules())
    assert len(ElementTree.fromstring(verdicts.junit(findings))) == 3
    lines = [line for line in verdicts.markdown(findings).splitlines() if line.startswith("|")]
    assert [len(cells(line)) for line in lines] == [7] * 5
    assert len(verdicts.github(findings).split("\n")) == 5


def test_the_exit_code_is_of_regressions_and_with_exact_of_any_difference(tmp_path, capsys):
    for side, value in (("old", 1.0), ("new", 2.0)):
        write(make_row(modeled(hit_rate=value)), tmp_path / side)
    better = f"baseline={tmp_path / 'old'}", f"current={tmp_path / 'new'}"
    told(capsys, *better, code=0)
    told(capsys, *better, "exact=true", code=1)
    told(capsys, f"baseline={tmp_path / 'new'}", f"current={tmp_path / 'old'}", code=1)
    told(capsys, f"baseline={tmp_path / 'new'}", f"current={tmp_path / 'new'}", "exact=true", code=0)


def test_exact_takes_what_cannot_be_judged_for_no_difference(tmp_path, capsys):
    for side, value in (("old", 1.0), ("new", 2.0)):
        write(make_row(measured(ttft_s=[value]), clock="wall"), tmp_path / side)
    told(capsys, f"baseline={tmp_path / 'old'}", f"current={tmp_path / 'new'}", "exact=true", code=0)


def test_skipping_a_file_would_mislead_so_it_is_refused(folders, capsys, tmp_path):
    (tmp_path / "current" / "half.json").write_text("{")
    assert cli.main(["regress", *folders]) == 2
    assert "half.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["baseline=x"], "current=DIR"),
        (["current=x"], "baseline=DIR"),
        ([], "history=DIR"),
        (["history=x", "baseline=y"], "history=DIR"),
        (["history=x", "format=junit"], "format=table"),
        (["history=x", "exact=true"], "exact"),
        (["history=x", "metric=speed"], "unknown metric"),
        (["baseline=x", "current=y", "metric=ttft_s"], "history"),
        (["baseline=x", "current=y", "alpha=1.5"], "alpha"),
        (["baseline=x", "current=y", "format=xml"], "junit"),
        (["baseline=x", "current=/nowhere"], "no results"),
    ],
)
def test_wrong_use_is_one_line(words, said, capsys):
    assert cli.main(["regress", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
