"""The local suite: five tasks of tinymoe's domains as JSON lines, answered greedily and scored by exact match.

An answer is the text between ``#`` and the end of the line. Knows the loop and the tokenizer; knows no system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from moebench.engine.loop import Loop
from moebench.jsonl import read_jsonl

TASKS = ("chain", "recall", "lists", "program", "world")
ITEMS = {"quick": 8, "local": 100}  # per task
BATCH = 20
NEW_TOKENS = 112


@dataclass(frozen=True)
class Answer:
    """One item answered: the ids that were written, and whether the answer is exactly right."""

    task: str
    tokens: tuple[int, ...]
    right: bool


def load_items(suite: str) -> list[dict[str, Any]]:
    """Items of a suite, the same ones every time: ``{"task", "prompt", "answer"}``."""
    folder = Path(str(resources.files("moebench.models.tinymoe"))) / "tasks"
    items = []
    for task in TASKS:
        items += [{**item, "task": task} for item in read_jsonl(folder / f"{task}.jsonl")[: ITEMS[suite]]]
    return items


def answer_of(text: str) -> str:
    """The final answer in a completion; empty where there is none."""
    _, found, rest = text.partition("#")
    return rest.split("\n")[0].strip() if found else ""


def evaluate(loop: Loop, tokenizer: Any, items: Sequence[dict[str, Any]]) -> list[Answer]:
    """Answer all items, in batches of similar length; the order of ``items`` is kept."""
    ids = [tokenizer(item["prompt"])["input_ids"] for item in items]
    order = sorted(range(len(items)), key=lambda i: len(ids[i]))
    answers: dict[int, Answer] = {}
    for at in range(0, len(order), BATCH):
        group = order[at : at + BATCH]
        out = loop.generate([ids[i] for i in group], NEW_TOKENS, stop=tokenizer.eos_token_id)
        for i, tokens in zip(group, out.tokens, strict=True):
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            answers[i] = Answer(items[i]["task"], tuple(tokens), answer_of(text) == items[i]["answer"])
    return [answers[i] for i in range(len(items))]


def agreement(
    loop: Loop, tokenizer: Any, items: Sequence[dict[str, Any]], reference: Sequence[Answer]
) -> tuple[float, int]:
    """Share of the reference's tokens that are the system's greedy choice too, given the same text so far; and their
    count.
    """
    same = total = 0
    order = sorted(range(len(items)), key=lambda i: len(items[i]["prompt"]))
    for at in range(0, len(order), BATCH):
        group = order[at : at + BATCH]
        prompts = [tokenizer(items[i]["prompt"])["input_ids"] for i in group]
        forced = [reference[i].tokens for i in group]
        out = loop.generate(prompts, max(map(len, forced)), forced=forced, keep_logits=True)
        for position, logits in enumerate(out.logits):
            choice = logits.argmax(-1)
            for row, tokens in enumerate(forced):
                if position < len(tokens):
                    same += int(choice[row] == tokens[position])
                    total += 1
    return same / total, total
