"""The table shows every value with its provenance, every missing one with its reason, and fits the terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from test_result_files import make_row

from moebench.report.table import HEADINGS, cell, number, print_table
from moebench.result import METRICS, Metric, metric


def full_row(system: str, model: str = "qwen3.6-35b-a3b"):
    found = {name: metric(name, 3.25, "modeled") for name in METRICS}
    found["ttft_s"] = Metric(1.5, "s", False, provenance="published", source="arXiv 1234.5")
    found["decode_tok_s"] = metric("decode_tok_s", 12.0, "measured")
    found["quality_delta"] = metric("quality_delta", None, None, reason="quality=none")
    return make_row(system=system, model=model, metrics=found, assumptions=("assumed: recall 0.86",))


def shown(rows, width: int) -> list[str]:
    stream = io.StringIO()
    print_table(rows, stream, width)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_nothing_is_cut_and_nothing_overflows(width, count):
    names = ["ondemand", "lru", "decayed_lfu", "slru", "belady", "resident", "a_longer_name"][:count]
    lines = shown([full_row(name, model) for name in names for model in ("tinymoe", "qwen3.6-35b-a3b")], width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for name in names:
        assert text.count(name) >= 2
    assert text.count("12.0 m") == 2 * count


def test_marks_legend_reasons_sources_and_assumptions_are_printed_once():
    text = "\n".join(shown([full_row("lru"), full_row("slru")], 100))
    assert "1.50 †" in text
    assert "3.25 ~" in text
    assert text.count("m measured") == 1
    assert text.count("quality=none") == 1
    assert text.count("assumed: recall 0.86") == 1
    assert "† lru, TTFT s: arXiv 1234.5" in text


def test_a_reason_that_holds_for_some_rows_names_them():
    whole = full_row("lru")
    gone = metric("tpot_p99_ms", None, None, reason="needs 100 samples")
    partial = dataclasses.replace(full_row("slru"), metrics={**whole.metrics, "tpot_p99_ms": gone})
    assert f"- {HEADINGS['tpot_p99_ms']} (slru): needs 100 samples" in shown([whole, partial], 100)


def test_a_failed_row_shows_its_error():
    text = "\n".join(shown([full_row("lru"), make_row(system="slru", status="failed", error="disk full")], 100))
    assert "failed slru, tinymoe: disk full" in text


def test_a_missing_value_is_a_dash_and_zero_is_zero():
    assert cell(full_row("lru"), "quality_delta") == "-"
    row = dataclasses.replace(full_row("lru"), metrics={"hit_rate": metric("hit_rate", 0.0, "measured")})
    assert cell(row, "hit_rate") == "0 m"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1234"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (-0.0004, "-0.000400"), (0, "0")],
)
def test_numbers_keep_three_digits_and_never_read_as_zero(value, text):
    assert number(value) == text


def test_a_sweep_says_which_row_is_which_and_one_run_each_does_not():
    rows = [
        dataclasses.replace(full_row("lru"), config={"layout": x, "system": {"id": "lru", "n": 2}}) for x in ("a", "b")
    ]
    text = "\n".join(shown(rows, 60))
    assert [line.split() for line in text.splitlines() if line.startswith("layout")] == [["layout", "a", "b"]]
    assert "system.n" not in text
    other = [dataclasses.replace(full_row(name), config={"layout": name}) for name in ("lru", "slru")]
    assert "layout" not in "\n".join(shown(other, 60))
