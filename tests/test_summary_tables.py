"""The summary: one line per dataset and version, averages that need every member, forms that read back."""

from __future__ import annotations

import csv
import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quality_fixtures import TASKS, answered, task
from test_result_files import make_row

from moebench.cli import main
from moebench.quality.members import members
from moebench.quality.paired import paired_delta
from moebench.quality.scores import TaskScores, mean_delta
from moebench.report.plain import Plain, show, to_csv, to_markdown
from moebench.report.summary import sheet, summary
from moebench.result import write


def scores(rows) -> dict[tuple[str, ...], dict[str, str]]:
    """The table of scores: (dataset, version, metric, mode) -> column -> cell."""
    table = summary(rows)[0]
    return {line[:4]: dict(zip(table.header[4:], line[4:], strict=True)) for line in table.rows}


def by_name(rows) -> dict[str, dict[str, str]]:
    return {key[0]: cells for key, cells in scores(rows).items()}


def test_values_have_two_digits_and_the_average_is_that_of_the_tasks():
    found = by_name([answered("lru", 1), answered("edge0", 3)])
    assert found["chain"] == {"unmodified bf16": "75.00", "edge0": "25.00", "lru": "75.00"}
    assert found["average of local"] == {"unmodified bf16": "75.00", "edge0": "25.00", "lru": "75.00"}
    assert list(found) == [*TASKS, "average of local"]


def test_an_average_is_not_there_where_a_member_is_missing_and_a_line_says_which():
    whole, part = answered("lru"), answered("slru")
    del part.quality["tasks"]["world"]
    found = by_name([whole, part])
    assert found["average of local"]["slru"] == "-"
    assert found["average of local"]["lru"] == "100.00"
    assert found["world"]["slru"] == "-"
    assert "no average of local for slru: it lacks world" in summary([whole, part])[0].notes
    assert "average of local" not in by_name([part])


def test_a_group_of_tasks_counts_as_one_in_the_average_with_all_its_items():
    parts = {"mmlu_pro_law": [0.0], "mmlu_pro_math": [1.0, 1.0, 1.0]}
    tasks = {name: task(scores, [1.0] * len(scores)) for name, scores in parts.items()}
    others = ("aime25", "humaneval_limited", "gpqa_diamond_cot_zeroshot", "ifeval")
    tasks |= {name: task([0.0, 1.0], [1.0, 1.0]) for name in others}
    rows = [answered("lru", suite="opencompass5", tasks=tasks)]
    found = by_name(rows)
    assert found["mmlu_pro"]["lru"] == "75.00"
    assert found["average of opencompass5"]["lru"] == "55.00"
    assert summary(rows)[1].rows[-1][3] == "-45.00"
    del tasks["mmlu_pro_law"], tasks["mmlu_pro_math"]
    assert "lacks mmlu_pro" in summary([answered("lru", suite="opencompass5", tasks=tasks)])[0].notes[0]


def test_the_metric_of_a_row_weighs_members_as_the_summary_does():
    arms = {"aime25": ([0.0, 1.0], [1.0, 1.0]), "mmlu_pro_law": ([0.0], [1.0]), "mmlu_pro_math": ([1.0] * 3, [1.0] * 3)}
    system, native = (
        {
            name: TaskScores("v", "m", "gen", tuple(map(str, range(len(arm[i])))), np.array(arm[i]))
            for name, arm in arms.items()
        }
        for i in (0, 1)
    )
    assert mean_delta(system, native, members("opencompass5", arms))[0] == pytest.approx((-50 - 25) / 2)
    assert mean_delta(system, native, members("a,b", arms))[0] == pytest.approx((-50 - 100 + 0) / 3)


def test_a_task_that_the_suite_does_not_know_has_its_line():
    rows = [answered("lru", tasks={name: task([1.0], [1.0]) for name in (*TASKS, "extra")})]
    assert list(by_name(rows)) == [*TASKS, "extra", "average of local"]


def test_a_task_without_a_value_is_a_dash_with_its_reason():
    row = answered("lru")
    row.quality["tasks"]["world"] |= {"value": None, "reason": "data set cannot be reached"}
    table = summary([row])[0]
    assert "lru, world: data set cannot be reached" in table.notes
    assert "average of local" not in {line[0] for line in table.rows}


def test_other_versions_metrics_modes_and_suites_never_share_a_line():
    rows = [answered("lru")]
    for number, (field, value) in enumerate((("version", "ffffff"), ("metric", "acc"), ("mode", "ll"))):
        rows.append(answered(f"other{number}"))
        rows[-1].quality["tasks"]["chain"] |= {field: value}
    rows.append(answered("quick", suite="quick"))
    table = summary(rows)[0]
    for dataset in ("chain", "average of local"):
        lines = [line for line in table.rows if line[0] == dataset]
        assert len(lines) == 4 + (dataset == "chain")  # the quick suite has a line of its own
        assert len({line[1:4] for line in lines}) == 4
        for line in lines:
            assert sum(cell != "-" for cell in line[5:]) == 1


def test_perplexities_are_not_averaged():
    row = answered("lru")
    row.quality["tasks"]["world"] |= {"mode": "ppl"}
    assert not any(key[0].startswith("average") for key in scores([row]))
    assert any("perplexities" in note for note in summary([row])[0].notes)


@given(st.permutations(range(5)))
@settings(max_examples=8, deadline=None)
def test_the_order_of_rows_changes_nothing(order):
    rows = [
        answered("lru"), answered("slru", 2), answered("edge0", 3, config={"k": 1, "system": {"id": "edge0"}}),
        answered("edge0", 3, config={"k": 2, "system": {"id": "edge0"}}),
        make_row(system="lfu", status="failed", error="disk full"),
    ]  # fmt: skip
    assert summary([rows[i] for i in order]) == summary(rows)
    assert sheet([rows[i] for i in order]) == sheet(rows)


def test_rows_of_one_system_are_told_apart_and_the_last_run_of_the_same_stands():
    old = answered("lru", 3, volatile={"finished": "2026-01-01"})
    new = answered("lru", 0, volatile={"finished": "2026-01-02"})
    assert by_name([new, old])["chain"]["lru"] == "100.00"
    assert any("older" in note for note in summary([new, old])[0].notes)
    rows = [answered("lru", n, config={"quant": q, "system": {"id": "lru"}}) for n, q in enumerate(("none", "int4"))]
    assert by_name(rows)["chain"] == {"unmodified bf16": "75.00", "lru quant=int4": "75.00", "lru quant=none": "100.00"}
    rows = [answered("lru", n, hw=hw) for n, hw in enumerate(("a", "b"))]
    assert by_name(rows)["chain"]["lru hw=b"] == "75.00"


def test_a_failed_run_keeps_its_column_and_its_error():
    table = summary([answered("lru"), make_row(system="slru", status="failed", error="disk full")])[0]
    assert table.header[-1] == "slru"
    assert {line[-1] for line in table.rows} == {"-"}
    assert "failed slru: disk full" in table.notes


def test_a_reference_that_answered_otherwise_stands_in_a_column_of_its_own():
    other = {name: task([1.0] * 4, [1.0, 0.0, 0.0, 0.0]) for name in TASKS}
    rows = [answered("lru"), answered("slru", tasks=other)]
    cells = by_name(rows)["chain"]
    assert (cells["unmodified bf16"], cells["unmodified bf16 (2)"]) == ("75.00", "25.00")
    assert any("slru" in note and "kernels" in note for note in summary(rows)[0].notes)


def test_differences_are_paired_and_the_average_counts_each_task_the_same():
    sizes = {"chain": 4, "recall": 8, "lists": 4, "program": 4, "world": 4}
    tasks = {name: task([0.0] * (n // 4) + [1.0] * (n - n // 4), [1.0] * n) for name, n in sizes.items()}
    table = summary([answered("edge0", tasks=tasks)])[1]
    line = dict(zip(table.header, table.rows[-1], strict=True))
    assert (line["dataset"], line["delta pt"], line["n"], line["lost"]) == ("average of local", "-25.00", "24", "6")
    mine = [s / 100 for t in tasks.values() for s in t["scores"]]
    low, high = paired_delta(mine, [1.0] * 24, [name for name, n in sizes.items() for _ in range(n)]).ci
    assert line["95\u00a0%"] == f"[{low:+.2f}, {high:+.2f}]"
    assert line["p"] == "0.031"  # 2 / 2**6


EVIL = "a|b <script>`x`</script> =1+1 \\ [l](http)\nnext"


def test_csv_reads_back_with_pandas():
    pandas = pytest.importorskip("pandas")
    rows = [answered("lru"), answered("a,\"b'|"), make_row(system="slru", status="failed", error="x")]
    found = pandas.read_csv(io.StringIO(to_csv(sheet(rows)))).set_index("dataset")
    assert found.loc["chain", "lru"] == 100
    assert found.loc["average of local", "a,\"b'| delta"] == 25
    assert found["slru"].isna().all()
    assert found.loc["chain", "lru n"] == 4


cells = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)


@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=3), st.tuples(cells, cells))
@settings(max_examples=60, deadline=None)
def test_every_form_keeps_its_shape_whatever_stands_in_a_cell(rows, header):
    plain = Plain("t", header, tuple(rows))
    parsed = list(csv.reader(io.StringIO(to_csv(plain), newline="")))
    assert [len(line) for line in parsed] == [2] * (len(rows) + 1)
    for line in parsed:
        assert not any(cell.startswith(("=", "@")) for cell in line)
    lines = [line for line in to_markdown([plain]).split("\n") if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines] == [3] * (len(rows) + 2)
    show([plain], io.StringIO(), 40)


def test_markdown_shows_names_as_they_are():
    text = to_markdown([Plain("t", ("name", "n"), ((EVIL, "1"),))])
    assert "<script" not in text
    assert "](" not in text
    assert len(text.splitlines()) == 5


def test_text_cuts_nothing_where_the_terminal_is_narrow():
    stream = io.StringIO()
    show(summary([answered(name) for name in ("lru", "a_system_with_a_long_name", "edge0")]), stream, 60)
    text = stream.getvalue()
    for part in ("a_system_with_a_long_name", "average of local", "naive_average", "100.00"):
        assert part in text
    assert "…" not in text


def test_the_command_reads_folders_and_refuses_what_has_no_scores(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    write(make_row(), tmp_path / "plain")
    assert main(["summary", f"results={tmp_path}/plain"]) == 2
    assert "quality suite" in capsys.readouterr().err
    assert main(["summary", f"results={tmp_path}/plain", "format=pdf"]) == 2
    assert "markdown" in capsys.readouterr().err
    for number, row in enumerate((answered("lru"), answered("slru", 2))):
        write(row, tmp_path / f"part{number}")
    both = f"results={tmp_path}/part0,{tmp_path}/part1"
    assert main(["summary", both, "format=csv"]) == 0
    first = capsys.readouterr().out
    assert main(["summary", f"results={tmp_path}/part1,{tmp_path}/part0", "format=csv"]) == 0
    assert capsys.readouterr().out == first
    assert len(first.splitlines()) == 1 + len(TASKS) + 1
