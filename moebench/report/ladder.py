"""An ablation ladder as tables: each rung's scores, what its step costs, and how much of a loss a repair pays back.

Differences are paired item by item; along any way up they add up to the difference to the unmodified model. A rung that
failed keeps its line. Returns plain tables and plain data; runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moebench.quality.members import members
from moebench.quality.paired import Delta, Share, exact_p, paid_back, paired_delta
from moebench.report.plain import Plain
from moebench.report.summary import p_text
from moebench.report.table import HEADINGS, number
from moebench.result import Row

MEAN = "mean"
UNMODIFIED = "unmodified"
LIKENESS = ("token_agreement", "kl_median_nats", "kl_p99_nats")  # to the unmodified model, on held-out text


@dataclass(frozen=True)
class Climbed:
    """A rung that was run. ``after`` is the position of the rung below, None for the unmodified model."""

    name: str
    change: str
    after: int | None
    repairs: bool
    row: Row
    command: str


@dataclass(frozen=True)
class Step:
    """A paired difference in points, or the reason why there is none; ``p`` of the exact test over all items."""

    delta: Delta | None
    p: float | None = None
    reason: str = ""

    def data(self) -> dict[str, Any]:
        """For a document."""
        return {"points": None, "reason": self.reason} if self.delta is None else {**asdict(self.delta), "p": self.p}


class Ladder:
    """All rungs with their scores. Every task that is scored in points stands in it, in the order of the suite."""

    def __init__(self, climbed: Sequence[Climbed]) -> None:
        self.rungs = list(climbed)
        self.arms = [_scores(rung.row) for rung in self.rungs]
        self.tasks = list(dict.fromkeys(name for arm in self.arms for name in arm))
        found = [_scores(rung.row, "reference_scores") for rung in self.rungs]
        self.reference = {name: arm[name] for arm in reversed(found) for name in arm}

    def below(self, position: int) -> Mapping[str, list[float]]:
        """The scores that a rung's step starts from."""
        after = self.rungs[position].after
        return self.reference if after is None else self.arms[after]

    def step(self, position: int) -> Step:
        """The difference to the rung below."""
        after = self.rungs[position].after
        name = UNMODIFIED if after is None else self.rungs[after].name
        return difference(self.arms[position], self.below(position), self.rungs[position].name, name)

    def total(self, position: int) -> Step:
        """The difference to the unmodified model."""
        return difference(self.arms[position], self.reference, self.rungs[position].name, UNMODIFIED)

    def paid_back(self, position: int) -> dict[str, Share]:
        """By task and for their mean: the share of the loss of the rung below that this one regains."""
        arms = (self.arms[position], self.below(position), self.reference)
        if not all(arms):
            return {name: Share(None, None, "a rung failed") for name in (*self.tasks, MEAN)}
        parts = {name: [name] for name in self.tasks} | {MEAN: self.tasks}
        found = {}
        for name, of in parts.items():
            mine, lower, base = ([score for task in of for score in arm[task]] for arm in arms)
            found[name] = paid_back(mine, lower, base, _groups(arms[0], of))
        return found


def difference(upper: Mapping[str, list[float]], lower: Mapping[str, list[float]], name: str, below: str) -> Step:
    """upper - lower as the mean over tasks, items paired."""
    for arm, who in ((upper, name), (lower, below)):
        if not arm:
            return Step(None, reason=f"{who} failed")
    mine, other = ([score for task in upper for score in arm[task]] for arm in (upper, lower))
    gained, lost = (sum(sign * (a - b) > 0 for a, b in zip(mine, other, strict=True)) for sign in (1, -1))
    return Step(paired_delta(mine, other, _groups(upper, list(upper))), exact_p(gained, lost))


def tables(ladder: Ladder, title: str) -> list[Plain]:
    """For people: scores, steps and, where a rung repairs, what it pays back."""
    return [_score_table(ladder, title), _step_table(ladder), *_repairs(ladder)]


def sheet(ladder: Ladder) -> Plain:
    """For programs: one line for each rung and dataset, the mean last; missing values are empty."""
    numbers = tuple(f"{of} {part}" for of in ("step", "total") for part in ("delta", "low", "high", "n", "p"))
    header = ("rung", "after", "dataset", "score", UNMODIFIED, *numbers)
    lines = []
    for position, rung in enumerate(ladder.rungs):
        after = UNMODIFIED if rung.after is None else ladder.rungs[rung.after].name
        for task in (*ladder.tasks, MEAN):
            of = ladder.tasks if task == MEAN else [task]
            mine, lower, base = (
                {name: arm[name] for name in of if name in arm}
                for arm in (ladder.arms[position], ladder.below(position), ladder.reference)
            )
            steps = (difference(mine, lower, "", ""), difference(mine, base, "", ""))
            cells = [cell for step in steps for cell in _numbers(step)]
            lines.append((rung.name, after, task, _mean(mine, ""), _mean(base, ""), *cells))
    return Plain("ladder", header, tuple(lines), labels=3)


def data(ladder: Ladder) -> list[dict[str, Any]]:
    """For a document: each rung with its row's id, command, mean scores, steps and what it pays back."""
    found = []
    for position, rung in enumerate(ladder.rungs):
        entry = {
            "rung": rung.name, "change": rung.change, "after": rung.after, "id": rung.row.id, "command": rung.command,
            "scores": {name: 100 * sum(scores) / len(scores) for name, scores in ladder.arms[position].items()},
            "step": ladder.step(position).data(), "total": ladder.total(position).data(), "error": rung.row.error,
        }  # fmt: skip
        if rung.repairs:
            entry["paid_back"] = {name: asdict(share) for name, share in ladder.paid_back(position).items()}
        found.append(entry)
    return found


# --- tables ----------------------------------------------------------------------------------------------------------


def _score_table(ladder: Ladder, title: str) -> Plain:
    lines = [(UNMODIFIED, "bf16, experts resident", *_cells(ladder, ladder.reference), *["-"] * len(LIKENESS))]
    notes = []
    for rung, arm in zip(ladder.rungs, ladder.arms, strict=True):
        shown = (_metric(rung.row, name) for name in LIKENESS)
        lines.append((rung.name, rung.change, *_cells(ladder, arm), *shown))
        notes += [f"failed {rung.name}: {rung.row.error}"] if rung.row.status == "failed" else []
    header = ("rung", "what changed", *ladder.tasks, MEAN, *(HEADINGS[name] for name in LIKENESS))
    return Plain(title, header, tuple(lines), (*notes, *(f"{r.name}: {r.command}" for r in ladder.rungs)), 2, 1)


def _step_table(ladder: Ladder) -> Plain:
    lines, reasons = [], dict[str, None]()
    for position, rung in enumerate(ladder.rungs):
        after = UNMODIFIED if rung.after is None else ladder.rungs[rung.after].name
        step, total = ladder.step(position), ladder.total(position)
        n = step.delta or total.delta
        lines.append((rung.name, after, *_step(step), *_step(total), str(n.n) if n else "-"))
        reasons |= dict.fromkeys(s.reason for s in (step, total) if s.reason)
    header = ("rung", "step from", "step pt", "95\u00a0%", "p", "to unmodified pt", "95\u00a0%", "p", "n")
    about = "points of the mean over datasets, paired item by item; p of the two-sided exact test over all items"
    return Plain("steps", header, tuple(lines), (about, *(f"- {reason}" for reason in reasons)), 2, 1)


def _repairs(ladder: Ladder) -> list[Plain]:
    found = []
    for position, rung in enumerate(ladder.rungs):
        if not rung.repairs:
            continue
        lines, reasons = [], dict[str, list[str]]()
        arms = (ladder.reference, ladder.below(position), ladder.arms[position])
        for name, share in ladder.paid_back(position).items():
            of = ladder.tasks if name == MEAN else [name]
            scores = [_mean({task: arm[task] for task in of if task in arm}) for arm in arms]
            interval = "-" if share.ci is None else f"[{share.ci[0]:.2f}, {share.ci[1]:.2f}]"
            lines.append((name, *scores, "-" if share.value is None else f"{share.value:.2f}", interval))
            if share.reason:
                reasons.setdefault(share.reason, []).append(name)
        header = ("dataset", UNMODIFIED, "without", "with", "paid back", "95\u00a0%")
        about = "share of the loss without it that is regained: 1 is all of it, more is above the unmodified model"
        notes = (about, *(f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()))
        found.append(Plain(f"what the rung pays back: {rung.name}", header, tuple(lines), notes))
    return found


def _cells(ladder: Ladder, arm: Mapping[str, list[float]]) -> tuple[str, ...]:
    return (*(_mean({task: arm[task]} if task in arm else {}) for task in ladder.tasks), _mean(arm))


def _mean(arm: Mapping[str, list[float]], missing: str = "-") -> str:
    """Mean over tasks of their mean scores, 0 to 100."""
    return f"{100 * sum(sum(scores) / len(scores) for scores in arm.values()) / len(arm):.2f}" if arm else missing


def _step(step: Step) -> tuple[str, str, str]:
    if step.delta is None:
        return "-", "-", "-"
    low, high = step.delta.ci
    return f"{step.delta.points:+.2f}", f"[{low:+.2f}, {high:+.2f}]", p_text(step.p or 0.0)


def _numbers(step: Step) -> list[str]:
    if step.delta is None:
        return [""] * 5
    delta = step.delta
    return [*(f"{value:.2f}" for value in (delta.points, *delta.ci)), str(delta.n), f"{step.p:.4g}"]


def _metric(row: Row, name: str) -> str:
    metric = row.metrics.get(name)
    return "-" if metric is None or metric.value is None else number(metric.value)


# --- scores ----------------------------------------------------------------------------------------------------------


def _scores(row: Row, of: str = "scores") -> dict[str, list[float]]:
    """Shares of the full mark, 0 to 1, by dataset, a group of tasks as one; empty for a row that has none. Perplexities
    are left out.
    """
    tasks = {name: task for name, task in row.quality.get("tasks", {}).items() if task["mode"] != "ppl"}
    parts = members(row.quality.get("suite", ""), tasks)
    found = {name: [score / 100 for task in own for score in tasks[task][of]] for name, own in parts.items()}
    return {name: scores for name, scores in found.items() if scores}


def _groups(arm: Mapping[str, list[float]], tasks: Sequence[str]) -> list[str]:
    return [task for task in tasks for _ in arm[task]]
