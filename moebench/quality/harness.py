"""Suites whose tasks are lm-eval's: loaded from its tree, from moebench's own or from a user's folder, asked and scored
item by item. Needs lm-eval; knows no system.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np

from moebench.config import QualityConfig
from moebench.errors import MoebenchError
from moebench.quality import catalog, parity
from moebench.quality.lm import LoopLM
from moebench.quality.scores import TaskScores, digest, version_of

MODES = {"generate_until": "gen", "multiple_choice": "ll", "loglikelihood": "ll", "loglikelihood_rolling": "ppl"}
PREDICTED = 128  # last tokens of a prompt that serve as held-out text where a task brings no completion


class HarnessSuite:
    """Tasks of lm-eval under one model and another, with the same documents and prompts for both."""

    def __init__(
        self, config: QualityConfig, tokenizer: Any, ends: frozenset[int], max_length: int, vocabulary: int
    ) -> None:
        self.name, self.harness = config.suite, f"lm-eval {metadata.version('lm_eval')}"
        self.tokenizer, self.ends, self.max_length = tokenizer, ends, max_length
        self.vocabulary, self.batch = vocabulary, config.batch
        self.limit, self.unsafe = config.limit or None, config.unsafe_code
        with quiet():
            self.tasks, self.filters = catalog.load(config)
            for task in self.tasks.values():
                task.build_all_requests(limit=self.limit, rank=0, world_size=1)
        requests = {name: [r.args for r in task.instances] for name, task in self.tasks.items()}
        own = [pair for task in self.tasks.values() for pair in self._texts(task)]
        self.pairs = parity.held_out(config.text, own, tokenizer)
        lengths = [len(given) + len(predicted) for given, predicted in self.pairs]
        lengths += [self._length(*args) for asked in requests.values() for args in asked]
        self.longest = min(max_length, max(lengths))
        settings = {name: task.config.to_dict() for name, task in self.tasks.items()}
        self.key = digest(self.harness, settings, requests, self.pairs, max_length, self.batch, sorted(ends))

    def run(self, loop: Any, decoded: bool) -> dict[str, TaskScores]:
        """Ask and score all tasks."""
        from lm_eval.evaluator import evaluate

        model = LoopLM(loop, self.tokenizer, self.ends, self.max_length, self.vocabulary, self.batch, decoded)
        with quiet():
            found = evaluate(
                lm=model, task_dict={"tasks": self.tasks}, limit=self.limit, bootstrap_iters=0,
                confirm_run_unsafe_code=self.unsafe,
            )  # fmt: skip
        return {name: self._scores(name, task, found["samples"][name]) for name, task in self.tasks.items()}

    def text(self) -> parity.Pairs:
        """Held-out text to predict."""
        return self.pairs

    def _scores(self, name: str, task: Any, samples: Sequence[Mapping[str, Any]]) -> TaskScores:
        chosen = self.filters.get(name, samples[0]["filter"])
        mine = sorted((s for s in samples if s["filter"] == chosen), key=lambda sample: sample["doc_id"])
        metric, scores = _metric(name, mine)
        settings = {
            "metric": metric, "filter": chosen, "output_type": task.OUTPUT_TYPE,
            "generation": task.config.generation_kwargs, "fewshot": task.config.num_fewshot,
        }  # fmt: skip
        version = version_of([sample["arguments"] for sample in mine], settings)
        items = tuple(digest(sample["doc_hash"], sample["arguments"]) for sample in mine)
        return TaskScores(version, metric, MODES[task.OUTPUT_TYPE], items, scores)

    def _length(self, text: str, more: Any = "") -> int:
        """Tokens of a request: a text alone, with its continuation, or with the room that its answer may take."""
        if isinstance(more, str):
            return len(self.tokenizer(text + more)["input_ids"]) + 1
        return len(self.tokenizer(text)["input_ids"]) + int(more.get("max_gen_toks", self.max_length))

    def _texts(self, task: Any) -> list[tuple[list[int], list[int]]]:
        """Held-out text of a task's first documents: a prompt and its field ``completion``, else the last tokens of a
        prompt, with the right choice where there are choices.
        """
        found: dict[int, tuple[list[int], list[int]]] = {}
        for request in task.instances:
            if request.doc_id in found or len(found) == parity.TEXTS:
                continue
            prompt = request.args[0]
            if isinstance(completion := request.doc.get("completion"), str):
                (pair,) = parity.encode(self.tokenizer, [parity.Text(prompt, completion)]) or [([], [])]
            else:
                ids = self.tokenizer(prompt + _right(task, request.doc))["input_ids"][-self.max_length :]
                cut = max(1, len(ids) - PREDICTED)
                pair = ids[:cut], ids[cut:]
            found[request.doc_id] = pair
        return [pair for pair in found.values() if all(pair)]


def _right(task: Any, doc: Any) -> str:
    """The right choice of a document as it would be written; nothing where there are no choices."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return ""
    target = task.doc_to_target(doc)
    choice = task.doc_to_choice(doc)[target] if isinstance(target, int) else target
    return f"{task.config.target_delimiter}{choice}" if isinstance(choice, str) else ""


def _metric(name: str, samples: Sequence[Mapping[str, Any]]) -> tuple[str, np.ndarray]:
    """The first metric that scores each document from 0 to 1; else nats per word of a text that is predicted."""
    for metric in samples[0]["metrics"]:
        values = [sample[metric] for sample in samples]
        if all(isinstance(value, bool | int | float | np.number) and 0 <= value <= 1 for value in values):
            return metric, np.array(values, np.float64)
    if "word_perplexity" in samples[0]["metrics"]:
        pairs = [sample["word_perplexity"] for sample in samples]
        return "nats_per_word", np.array([-likelihood / words for likelihood, words in pairs])
    raise MoebenchError(
        f"quality: no metric of task {name} ({', '.join(samples[0]['metrics'])}) scores a document from 0 to 1, so "
        "nothing can be paired"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and notes of the libraries, nothing on stdout; their seeds as lm-eval sets them, so that prompts are
    always the same.
    """
    import datasets
    from lm_eval.api import task as tasks
    from tqdm import tqdm

    random.seed(0)
    np.random.seed(1234)
    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub")]
    levels, before, bars = [logger.level for logger in loggers], tasks.tqdm, datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    tasks.tqdm = partial(tqdm, disable=True)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        tasks.tqdm = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
