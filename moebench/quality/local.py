"""Five tasks of tinymoe's domains as JSON lines, answered greedily and scored by exact match, without lm-eval.

An answer is the text between ``#`` and the end of the line. Knows the loop and the tokenizer; knows no system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from moebench.config import QualityConfig
from moebench.engine.loop import Loop
from moebench.jsonl import read_jsonl
from moebench.quality import parity
from moebench.quality.batches import batches
from moebench.quality.scores import TaskScores, digest, version_of

TASKS = ("chain", "recall", "lists", "program", "world")
ITEMS = {"quick": 8, "local": 100}  # per task
NEW_TOKENS = 112
TEXTS = 4  # of each task, held-out: one batch, so that a quick answer stays quick
METRIC = "exact_match"


@dataclass(frozen=True)
class Answer:
    """One item answered: the ids that were written, and whether the answer is exactly right."""

    task: str
    tokens: tuple[int, ...]
    right: bool


def folder() -> Path:
    """Where the items lie, one file a task."""
    return Path(str(resources.files("moebench.models.tinymoe"))) / "tasks"


def load_items(suite: str, limit: int = 0) -> list[dict[str, Any]]:
    """Items of a suite, the same ones every time: ``{"task", "prompt", "answer", "completion"}``."""
    items = []
    for task in TASKS:
        items += [{**item, "task": task} for item in read_jsonl(folder() / f"{task}.jsonl")[: limit or ITEMS[suite]]]
    return items


def answer_of(text: str) -> str:
    """The final answer in a completion; empty where there is none."""
    _, found, rest = text.partition("#")
    return rest.split("\n")[0].strip() if found else ""


def evaluate(
    loop: Loop, tokenizer: Any, items: Sequence[dict[str, Any]], ends: frozenset[int], batch: int = 20
) -> list[Answer]:
    """Answer all items, each up to a token in ``ends``, in batches of similar length; their order is kept."""
    ids = [tokenizer(item["prompt"])["input_ids"] for item in items]
    answers: dict[int, Answer] = {}
    for group in batches([len(prompt) + NEW_TOKENS for prompt in ids], batch):
        out = loop.generate([ids[i] for i in group], NEW_TOKENS, stop=ends)
        for i, tokens in zip(group, out.tokens, strict=True):
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            answers[i] = Answer(items[i]["task"], tuple(tokens), answer_of(text) == items[i]["answer"])
    return [answers[i] for i in range(len(items))]


class LocalSuite:
    """The first items of each task. Held-out text is their worked steps, which no training saw."""

    name, harness = "quick", "moebench"

    def __init__(self, config: QualityConfig, tokenizer: Any, ends: frozenset[int], vocabulary: int) -> None:
        self.tokenizer, self.ends, self.vocabulary, self.batch = tokenizer, ends, vocabulary, config.batch
        self.items = load_items("quick", config.limit)
        own = [parity.Text(item["prompt"], item["completion"]) for item in first(self.items, TEXTS)]
        self.pairs = parity.held_out(config.text, parity.encode(tokenizer, own), tokenizer)
        self.longest = NEW_TOKENS + max(len(tokenizer(item["prompt"])["input_ids"]) for item in self.items)
        self.longest = max(self.longest, *(len(given) + len(predicted) for given, predicted in self.pairs))
        self.key = digest(self.harness, NEW_TOKENS, self.items, self.pairs, self.batch)

    def run(self, loop: Loop, decoded: bool) -> dict[str, TaskScores]:
        """All items by task; every answer is written, so it is decoded either way."""
        answers, found = evaluate(loop, self.tokenizer, self.items, self.ends, self.batch), {}
        for task in TASKS:
            asked = [item["prompt"] for item in self.items if item["task"] == task]
            right = [answer.right for answer in answers if answer.task == task]
            version = version_of(asked, {"new_tokens": NEW_TOKENS, "metric": METRIC})
            found[task] = TaskScores(version, METRIC, "gen", tuple(map(digest, asked)), np.array(right, np.float64))
        return found

    def text(self) -> parity.Pairs:
        """Held-out text to predict."""
        return self.pairs


def first(items: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first ``count`` items of each task."""
    return [item for task in TASKS for item in [one for one in items if one["task"] == task][:count]]
