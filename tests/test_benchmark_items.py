"""The committed benchmark items, and the script that takes them out of wheels."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ITEMS = ROOT / "benchmarks" / "items"
COUNTS = {"hellaswag": 100, "truthfulqa_mc1": 100, "social_iqa": 200}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_items", ROOT / "scripts" / "benchmark_items.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(task: str) -> list[dict]:
    return [json.loads(line) for line in (ITEMS / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("task", COUNTS)
def test_every_item_has_a_right_answer_and_every_file_its_licence(task):
    items = read(task)
    assert len(items) == COUNTS[task]
    assert f"`{task}.jsonl`" in (ITEMS / "README.md").read_text()
    for item in items:
        if task == "hellaswag":
            assert int(item["label"]) in range(len(item["endings"]))
        elif task == "truthfulqa_mc1":
            assert item["mc1_targets"]["labels"] == [1] + [0] * (len(item["mc1_targets"]["choices"]) - 1)
        else:
            assert item["question"].endswith("?")
            assert item["label"] in ("1", "2", "3")


def test_lm_eval_asks_them(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from moebench.config import QualityConfig
    from moebench.quality import catalog
    from moebench.quality.harness import quiet

    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    own = ("hellaswag", "truthfulqa", "siqa")  # lm-eval's whole tree takes many seconds to read
    monkeypatch.setattr(catalog, "_everything", lambda data_dir: catalog._manager(data_dir, own))
    with quiet():
        tasks, _ = catalog.load(QualityConfig(suite=",".join(COUNTS), data_dir=str(ITEMS)))
    assert {name: len(list(task.test_docs())) for name, task in tasks.items()} == COUNTS
    for name, task in tasks.items():
        item = read(name)[0]
        doc = next(iter(task.test_docs()))
        doc = task._process_doc(doc) if hasattr(task, "_process_doc") else doc
        right = task.doc_to_choice(doc)[task.doc_to_target(doc)]
        wanted = {
            "hellaswag": lambda item: item["endings"][int(item["label"])],
            "truthfulqa_mc1": lambda item: item["mc1_targets"]["choices"][0],
            "social_iqa": lambda item: item["answer" + "ABC"[int(item["label"]) - 1]],
        }[name](item)
        assert right == wanted


def test_a_begun_sentence_is_cut_off_and_a_whole_text_is_not(script):
    item = {"id": "x", "activity_label": "A", "endings": ["b"] * 4, "expected_index": 2}
    begun = script.hellaswag({**item, "ctx": "He sits. Then he"})
    assert (begun["ctx_a"], begun["ctx_b"], begun["label"]) == ("He sits.", "Then he", "2")
    whole = script.hellaswag({**item, "ctx": "[header] How to sit. [step] Sit."})
    assert (whole["ctx_a"], whole["ctx_b"]) == ("[header] How to sit. [step] Sit.", "")


def test_the_right_answer_of_truthfulqa_moves_to_the_front(script):
    made = script.truthfulqa({"question": "q", "choices": ["a", "b", "c"], "expected_index": 2})
    assert made["mc1_targets"] == {"choices": ["c", "a", "b"], "labels": [1, 0, 0]}


def test_a_line_of_social_iqa_is_taken_apart_or_left_out(script):
    line = "Kai ran. He was late. Why did Kai run? A: he was late; B: for fun; C: to win."
    made = script.social_iqa({"input": [{"content": line}], "ideal": "A"})
    assert made == {
        "context": "Kai ran. He was late.", "question": "Why did Kai run?", "answerA": "he was late",
        "answerB": "for fun", "answerC": "to win", "label": "1",
    }  # fmt: skip
    assert script.social_iqa({"input": [{"content": "no question"}], "ideal": "A"}) is None


def test_the_script_writes_a_file_a_task(script, tmp_path, capsys):
    member, _, most = script.SOURCES["truthfulqa_mc1"]
    lines = [json.dumps({"question": f"q{n}", "choices": ["a", "b"], "expected_index": 1}) for n in range(2 * most + 5)]
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr(member, "\n".join(lines))
    assert script.main([str(tmp_path / "out"), str(tmp_path / "w.whl")]) == 0
    written = (tmp_path / "out" / "truthfulqa_mc1.jsonl").read_text().splitlines()
    assert len(written) == most
    assert json.loads(written[1])["question"] == "q2"  # spread over the file
    assert script.main([]) == 2
