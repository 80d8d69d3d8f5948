"""What a suite says of one model: the score of each item of each task, in order; and the block of a row that sets two
models side by side. Knows no model, no task and no harness.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.errors import MoebenchError
from moebench.quality.paired import exact_p, paired_delta

MODES = ("gen", "ll", "ppl")  # an answer is written, a choice is the likeliest, a text is predicted
REFERENCE = "unmodified bf16"


@dataclass(frozen=True, eq=False)
class TaskScores:
    """One task under one model. ``scores`` (fp64 [n], in the order of the documents) are shares of the full mark, 0 to
    1; in mode ``ppl`` nats per word, where less is better. ``items`` are digests of document and prompt.
    """

    version: str
    metric: str
    mode: str
    items: tuple[str, ...]
    scores: np.ndarray

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        if len(self.items) != len(self.scores) or not len(self.items):
            raise ValueError(f"{len(self.items)} items and {len(self.scores)} scores: one score an item, at least one")

    @property
    def points(self) -> np.ndarray:
        """The scores as a table shows them: 0 to 100, or nats."""
        return self.scores * (1.0 if self.mode == "ppl" else 100.0)


def digest(*parts: Any) -> str:
    """Hex digits of sha256 over texts and plain data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def version_of(prompts: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Six hex digits over all prompts and the settings under which they are answered and scored."""
    return digest(list(prompts), dict(settings))[:6]


def compare_tasks(system: Mapping[str, TaskScores], native: Mapping[str, TaskScores]) -> dict[str, dict[str, Any]]:
    """The block's ``tasks``: both models' means, the paired difference with its interval, and an exact test.

    Other items or prompts under the two models are an error: nothing would be paired.
    """
    if set(system) != set(native):
        raise MoebenchError(f"quality: tasks {', '.join(system)} and {', '.join(native)} cannot be paired")
    return {name: _compare(name, scores, native[name]) for name, scores in system.items()}


def _compare(name: str, system: TaskScores, native: TaskScores) -> dict[str, Any]:
    if system.items != native.items or system.version != native.version:
        raise MoebenchError(f"quality: task {name} was asked with other documents or prompts of the unmodified model")
    n = len(system.items)
    delta = paired_delta(system.points / 100.0, native.points / 100.0, [name] * n)
    rise = (system.scores - native.scores) * (-1 if system.mode == "ppl" else 1)
    gained, lost = int((rise > 0).sum()), int((rise < 0).sum())
    return {
        "version": system.version,
        "metric": system.metric,
        "mode": system.mode,
        "n": n,
        "value": float(system.points.mean()),
        "reference": float(native.points.mean()),
        "delta": delta.points,
        "ci": list(delta.ci),
        "p": exact_p(gained, lost),
        "gained": gained,
        "lost": lost,
        "scores": system.points.tolist(),
        "reference_scores": native.points.tolist(),
    }


def mean_delta(
    system: Mapping[str, TaskScores], native: Mapping[str, TaskScores], members: Mapping[str, Sequence[str]]
) -> tuple[float, tuple[float, float], int] | None:
    """Mean over ``members``, each one task or several whose items count as one's, of the paired difference in points;
    its interval and the number of items; None where no task is scored in points.
    """
    member_of = {task: name for name, tasks in members.items() for task in tasks}
    names = [name for name, scores in system.items() if scores.mode != "ppl"]
    if not names:
        return None
    mine = np.concatenate([system[name].scores for name in names])
    other = np.concatenate([native[name].scores for name in names])
    groups = [member_of[name] for name in names for _ in system[name].items]
    delta = paired_delta(mine, other, groups)
    return delta.points, delta.ci, delta.n
