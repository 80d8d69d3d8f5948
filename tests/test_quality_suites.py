"""Suites: lm-eval and moebench score the same items alike, offline; what cannot be asked is one line; data of one's own
take the hub's place; programs run only where that was said.
"""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest

pytest.importorskip("lm_eval")

import moebench
from moebench.backends.torch_model import NativeTorchBackend
from moebench.config import QualityConfig
from moebench.engine.loop import Loop
from moebench.errors import MoebenchError, UsageError
from moebench.harness.assets import load_tokenizer
from moebench.harness.plan import embedded_folder
from moebench.quality import catalog, harness, local, suites
from moebench.quality.native import CHUNK, Native, answer
from moebench.quality.programs import passes
from moebench.quality.scores import TaskScores, compare_tasks, mean_delta
from moebench.result import from_json, stdout_document, to_json

LENGTH, VOCABULARY = 2048, 384
SUBJECTS = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history", "law",
    "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded_folder())


@pytest.fixture(scope="module")
def loop():
    return Loop(NativeTorchBackend(embedded_folder()), None, CHUNK)


@pytest.fixture
def offline(monkeypatch):
    """No name is resolved, no address reached."""

    def refuse(*_, **__):
        raise OSError("the network is off")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def suite(tokenizer, name, length=LENGTH, **options):
    return suites.open_suite(
        QualityConfig(name, **options), tokenizer, frozenset([tokenizer.eos_token_id]), length, VOCABULARY
    )


def write(folder, name, items):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


# --- the local tasks -----------------------------------------------------------------------------------------------


def test_lm_eval_and_moebench_agree_on_every_item_with_the_network_off(offline, tokenizer, loop):
    ours, theirs = suite(tokenizer, "quick", limit=2), suite(tokenizer, "local", limit=2)
    one, two = ours.run(loop, decoded=False), theirs.run(loop, decoded=True)
    assert list(one) == list(two) == list(local.TASKS)
    for task in local.TASKS:
        assert one[task].scores.tolist() == two[task].scores.tolist()
        assert (one[task].metric, one[task].mode) == (two[task].metric, two[task].mode) == ("exact_match", "gen")
    assert 0 < np.concatenate([scores.scores for scores in one.values()]).mean() < 1
    assert ours.text() == theirs.text()
    assert ours.harness != theirs.harness


@pytest.mark.parametrize(
    "text", [" 3 + 4 = 7 # 7\n", "# 7", "a # b # c\nd", "", "none", "#\n5", "# 7 8 \n# 9", "x\n y # 5", "#  4\n", "##"]
)
def test_both_find_the_same_answer_in_a_text(offline, tokenizer, text):
    task = suite(tokenizer, "chain", limit=1).tasks["chain"]
    (instance,) = task.instances
    instance.resps = [text]
    task.apply_filters()
    assert instance.filtered_resps["answer"] == local.answer_of(text)


def test_quick_needs_no_lm_eval_and_local_says_how_to_get_it(monkeypatch, tokenizer):
    monkeypatch.setattr(suites, "LIBRARY", "lm_eval_that_nobody_has")
    assert suite(tokenizer, "quick").harness == "moebench"
    with pytest.raises(UsageError, match=r"quality=local runs on lm-eval: pip install 'moebench\[quality\]'"):
        suite(tokenizer, "local")


def test_a_version_follows_prompts_and_settings(tokenizer, loop, monkeypatch):
    def versions(**options):
        return {name: scores.version for name, scores in suite(tokenizer, "quick", **options).run(loop, False).items()}

    monkeypatch.setattr(local, "NEW_TOKENS", 4)
    one = versions(limit=1)
    assert one == versions(limit=1)
    assert all(one[name] != other for name, other in versions(limit=2).items())
    monkeypatch.setattr(local, "NEW_TOKENS", 3)
    assert all(one[name] != other for name, other in versions(limit=1).items())
    assert len({*one.values()}) == 5


def test_a_run_keeps_the_scores_of_each_item_in_its_file_and_off_stdout(offline, monkeypatch):
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    options = {"hw": "m4pro", "model": "tinymoe", "quant": "none", "workload": {"requests": 1, "new_tokens": 4}}
    (row,) = moebench.run(system="lru", warmup_tokens=1, quality={"suite": "lists,world", "limit": 2}, **options)
    assert from_json(to_json(row)).quality == row.quality
    assert row.quality["suite"] == "lists,world"
    assert row.quality["harness"].startswith("lm-eval 0.4.")
    for task in row.quality["tasks"].values():
        assert task["n"] == len(task["scores"]) == len(task["reference_scores"]) == 2
        assert task["delta"] == pytest.approx(task["value"] - task["reference"])
    (entry,) = json.loads(stdout_document([row]))["rows"]
    assert all("scores" not in task for task in entry["quality"]["tasks"].values())
    assert row.metrics["quality_delta"].n == 4
    assert row.metrics["perplexity"].value == pytest.approx(row.quality["text"]["reference_perplexity"], rel=0.01)


# --- the five benchmarks of a paper --------------------------------------------------------------------------------


@pytest.fixture
def five(tmp_path):
    """A few items of each benchmark, made up, in files of one's own."""
    write(tmp_path, "aime25", [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(3)])
    programs = [
        {"task_id": f"T/{i}", "prompt": f"def f(x):\n    return x + {i}\n", "entry_point": "f",
         "test": f"def check(f):\n    assert f(1) == {1 + i}\n"} for i in range(2)
    ]  # fmt: skip
    write(tmp_path, "humaneval_limited", programs)
    wrong = {f"Incorrect Answer {i}": "bcd"[i - 1] for i in (1, 2, 3)}
    write(tmp_path, "gpqa_diamond_cot_zeroshot", [{"Question": q, "Correct Answer": "a", **wrong} for q in "xy"])
    questions = [
        {"question": "which?", "options": ["this", "that"], "answer": "A", "category": subject,
         "cot_content": "A: Let's think step by step. The answer is (A)."} for subject in SUBJECTS
    ]  # fmt: skip
    write(tmp_path, "mmlu_pro", questions)
    write(tmp_path, "mmlu_pro.fewshot", questions * 5)
    check = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    write(tmp_path, "ifeval", [{"key": i, "prompt": "Say hello without commas.", **check} for i in range(2)])
    return tmp_path


def test_the_five_benchmarks_run_on_data_of_ones_own(offline, tokenizer, loop, five, monkeypatch):
    pytest.importorskip("langdetect")
    asked = suite(tokenizer, "opencompass5", length=32, data_dir=str(five), unsafe_code=True)
    found = asked.run(loop, decoded=False)
    modes = {name: scores.mode for name, scores in found.items()}
    assert set(modes.values()) == {"gen"}
    assert len(modes) == 4 + len(SUBJECTS)
    assert {name: found[name].metric for name in ("aime25", "humaneval_limited", "ifeval")} == {
        "aime25": "exact_match", "humaneval_limited": "pass_at_1", "ifeval": "prompt_level_strict_acc"
    }  # fmt: skip
    assert [len(found[name].scores) for name in ("aime25", "humaneval_limited", "mmlu_pro_law", "ifeval")] == [
        3,
        2,
        1,
        2,
    ]
    assert found["ifeval"].scores.mean() == 1.0  # what tinymoe writes has no commas
    assert asked.longest <= 32
    assert all(len(given) + len(predicted) <= 32 for given, predicted in asked.text())
    again = suite(tokenizer, "opencompass5", length=32, data_dir=str(five), unsafe_code=True)
    assert again.key == asked.key
    assert compare_tasks(again.run(loop, decoded=True), found)["gpqa_diamond_cot_zeroshot"]["p"] == 1.0


def test_every_benchmark_of_the_paper_has_a_task_that_exists():
    listed = catalog.opencompass5()
    assert [entry["benchmark"].split()[0] for entry in listed] == [
        "AIME", "HumanEval", "GPQA-Diamond", "MMLU-Pro", "IFBench"
    ]  # fmt: skip
    manager = catalog._manager("", tuple(entry["folder"] for entry in listed if "folder" in entry))
    assert all(entry["task"] in manager.task_index for entry in listed)


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("mmlu_pro", lambda folder: (folder / "mmlu_pro.fewshot.jsonl").unlink(), "put them into mmlu_pro.few"),
        ("aime25", lambda folder: write(folder, "aime25", [{"question": 1}]), "needs the fields problem, answer"),
        ("aime25", lambda folder: write(folder, "aime25", []), "the data of task aime25 do not fit it"),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_one_line(offline, tokenizer, five, monkeypatch, name, spoil, words):
    spoil(five)
    with pytest.raises(UsageError, match=words):
        suite(tokenizer, name, data_dir=str(five))


def test_what_cannot_be_asked_is_one_line(offline, tokenizer, monkeypatch, tmp_path):
    # lm-eval's whole tree takes seconds to read; a part of it will do
    monkeypatch.setattr(catalog, "_everything", lambda folder: catalog._manager(folder, ("aime", "humaneval")))
    with pytest.raises(
        UsageError, match=r"suites: none, quick, local, opencompass5; near it among 15 tasks: chain, aime;"
    ):
        suite(tokenizer, "chaim")
    with pytest.raises(UsageError, match="local is a suite, not a task"):
        suite(tokenizer, "chain,local")
    with pytest.raises(UsageError, match="is no folder"):
        suite(tokenizer, "chain", data_dir=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="no effect: no task of the suite runs programs"):
        suite(tokenizer, "chain", unsafe_code=True)
    with pytest.raises(UsageError, match="humaneval would run programs without limits; humaneval_limited runs them"):
        suite(tokenizer, "humaneval", unsafe_code=True)

    def gated(*_, **__):
        raise ConnectionError("Dataset is gated.\nAsk for access")

    monkeypatch.setattr("datasets.load_dataset", gated)
    with pytest.raises(
        UsageError, match=r"cannot be reached \(Dataset is gated. Ask for access\); put a copy into DIR/aime25"
    ):
        suite(tokenizer, "aime25")


def test_programs_run_only_where_that_was_said(offline, tokenizer, five):
    with pytest.raises(UsageError, match=r"quality\.unsafe_code=true"):
        suite(tokenizer, "humaneval_limited", data_dir=str(five))


@pytest.mark.parametrize(
    ("program", "well"),
    [
        ("import math\nassert math.floor(2.5) == 2", True),
        ("print('noise')", True),
        ("raise ValueError", False),
        ("import sys\nsys.exit(0)", False),
        ("import os\nos._exit(0)", False),
        ("x = bytearray(2**31)", False),
        ("import socket\nsocket.socket()", False),
        ("open('left', 'w')", False),
        ("import os\nos.open('left', os.O_CREAT | os.O_WRONLY)", False),
        ("import subprocess\nsubprocess.run(['true'])", False),
        ("import os\nos.fork()", False),
        ("while True:\n    pass", False),
    ],
)
def test_a_program_passes_only_within_its_limits(program, well):
    assert passes(program) == well


def test_a_task_file_of_ones_own_is_found_and_scored(offline, tokenizer, loop, tmp_path):
    write(tmp_path, "sums", [{"q": "chain: 3 + 4 ?", "choices": [" 3 + 4 = 7", "x"], "right": 0}] * 3)
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\ntarget_delimiter: ''\n"
        "doc_to_text: '{{q}}'\ndoc_to_choice: choices\ndoc_to_target: right\n"
    )
    asked = suite(tokenizer, "sums,chain", data_dir=str(tmp_path), limit=2)
    found = asked.run(loop, decoded=False)
    assert (found["sums"].metric, found["sums"].mode, found["sums"].scores.tolist()) == ("acc", "ll", [1.0, 1.0])
    given, predicted = asked.text()[0]
    assert tokenizer.decode([*given, *predicted]) == "chain: 3 + 4 ? 3 + 4 = 7"
    assert len(found["chain"].scores) == 2


# --- pairs ---------------------------------------------------------------------------------------------------------


def scores(values, mode="gen", items=None, version="abcdef"):
    items = items or tuple(f"item {i}" for i in range(len(values)))
    return TaskScores(version, "m", mode, items, np.array(values, float))


def test_a_block_counts_what_was_gained_and_lost_with_an_exact_p():
    task = compare_tasks({"t": scores([1, 1, 0, 0, 0, 0, 0])}, {"t": scores([0, 1, 1, 1, 1, 1, 1])})["t"]
    assert (task["gained"], task["lost"], task["n"]) == (1, 5, 7)
    assert task["p"] == pytest.approx(2 * (1 + 6) / 2**6)  # at most one of six fair coins, on both sides
    assert (task["value"], task["reference"]) == (pytest.approx(200 / 7), pytest.approx(600 / 7))
    assert task["delta"] == pytest.approx(-400 / 7)
    assert task["ci"][0] <= task["delta"] <= task["ci"][1]


def test_a_text_that_is_predicted_better_is_a_gain_and_no_points():
    system, native = {"t": scores([1.0, 3.0], "ppl")}, {"t": scores([2.0, 2.5], "ppl")}
    task = compare_tasks(system, native)["t"]
    assert (task["gained"], task["lost"], task["value"], round(task["delta"], 9)) == (1, 1, 2.0, -0.25)
    assert mean_delta(system, native, {"t": ["t"]}) is None


def test_other_items_or_prompts_cannot_be_paired():
    for other in (scores([1, 1], items=("item 0", "another")), scores([1, 1], version="123456"), scores([1])):
        with pytest.raises(MoebenchError, match="other documents or prompts"):
            compare_tasks({"t": scores([1, 1])}, {"t": other})
    with pytest.raises(MoebenchError, match="cannot be paired"):
        compare_tasks({"t": scores([1])}, {"u": scores([1])})


def test_what_the_unmodified_model_said_survives_as_arrays(tokenizer, monkeypatch):
    monkeypatch.setattr(local, "NEW_TOKENS", 2)
    native = answer(embedded_folder(), suite(tokenizer, "quick", limit=1))
    again = Native.of(native.arrays())
    assert {
        name: compare_tasks({name: one}, {name: again.tasks[name]})[name]["delta"] for name, one in native.tasks.items()
    } == dict.fromkeys(local.TASKS, 0.0)
    for name, array in native.text.arrays().items():
        assert np.array_equal(array, again.text.arrays()[name])


def test_no_metric_from_0_to_1_is_one_line():
    with pytest.raises(MoebenchError, match=r"no metric of task t \(bleu\) scores a document"):
        harness._metric("t", [{"metrics": ["bleu"], "bleu": ("a", "b")}])
