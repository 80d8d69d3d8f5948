"""Scores in the shape of OpenCompass' summary: dataset, version, metric, mode, then one column for each system.

Values are 0 to 100, ``version`` is the first six hex digits of the hash of prompts and settings, and what differs in it
never stands on one line. Averages are naive means over a suite and need all its members. Returns plain tables; reads
the ``quality`` block of rows and runs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebench.quality.members import members
from moebench.quality.paired import exact_p, paired_delta
from moebench.report.groups import newest
from moebench.report.plain import Plain
from moebench.result import Row

AVERAGE = "average"
KEYS = ("dataset", "version", "metric", "mode")
DELTAS = ("delta", "low", "high", "n", "p")


@dataclass(frozen=True, order=True)
class Key:
    """What may stand on one line; ``place`` orders the lines."""

    suite: str
    place: int
    dataset: str
    version: str
    metric: str
    mode: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The leading cells of a line."""
        return self.dataset, self.version, self.metric, self.mode


@dataclass(frozen=True)
class Score:
    """One system on one line, and the unmodified model on the same items; values 0 to 100, ``delta`` in points."""

    value: float
    reference: float
    delta: float
    ci: tuple[float, float]
    n: int
    p: float
    gained: int
    lost: int


@dataclass(frozen=True)
class Column:
    """One run and its scores; ``missing`` says why an average is not there."""

    label: str
    row: Row
    scores: Mapping[Key, Score]
    missing: tuple[str, ...] = ()


def summary(rows: Sequence[Row]) -> list[Plain]:
    """For each model the table of scores and, below it, each system's paired differences to the unmodified model."""
    tables = []
    for model, columns, notes in _models(rows):
        references, more = _references(columns)
        keys = sorted({key for column in columns for key in column.scores})
        lines = []
        for key in keys:
            cells = [_value(values.get(key)) for values in references.values()]
            cells += [_value(c.scores[key].value if key in c.scores else None) for c in columns]
            lines.append((*key.cells, *cells))
        header = (*KEYS, *references, *(column.label for column in columns))
        tables.append(Plain(f"{model}: scores, 0 to 100", header, tuple(lines), (*more, *notes), len(KEYS)))
        changes = [
            (*key.cells[:2], c.label, *_delta(c.scores[key]), str(c.scores[key].gained), str(c.scores[key].lost))
            for key in keys for c in columns if key in c.scores
        ]  # fmt: skip
        header = ("dataset", "version", "system", "delta pt", "95\u00a0%", "n", "p", "gained", "lost")
        about = ("paired item by item; interval by bootstrap over items, p of the two-sided exact test",)
        tables.append(Plain(f"{model}: system - reference, points", header, tuple(changes), about, 3))
    return tables


def sheet(rows: Sequence[Row]) -> Plain:
    """The same in one table for a program: a line per model and dataset; a missing value is an empty cell."""
    models = _models(rows)
    names = sorted({column.label for _, columns, _ in models for column in columns})
    kept = {model: _references(columns)[0] for model, columns, _ in models}
    bases = list(dict.fromkeys(name for references in kept.values() for name in references))
    header = ("model", *KEYS, *bases, *names, *(f"{name} {part}" for name in names for part in DELTAS))
    lines = []
    for model, columns, _ in models:
        found = {column.label: column.scores for column in columns}
        for key in sorted({key for scores in found.values() for key in scores}):
            scores = [found.get(name, {}).get(key) for name in names]
            cells = [_value(kept[model].get(base, {}).get(key), "") for base in bases]
            cells += [_value(score.value if score else None, "") for score in scores]
            for score in scores:
                cells += _numbers(score) if score else [""] * len(DELTAS)
            lines.append((model, *key.cells, *cells))
    return Plain("scores, 0 to 100, and differences in points", header, tuple(lines), labels=1 + len(KEYS))


# --- from rows to columns ------------------------------------------------------------------------------------------


def _models(rows: Sequence[Row]) -> list[tuple[str, list[Column], list[str]]]:
    """Per model its columns, in an order that no order of files changes, and what must be said below the table."""
    found = []
    for model in sorted({row.model for row in rows if row.quality}):
        mine = [row for row in rows if row.model == model and (row.quality or row.status == "failed")]
        kept, notes = newest(mine)
        ok = [column for column in _columns(kept) if column.row.quality]
        notes += [line for column in ok for line in column.missing]
        failed = [column for column in _columns(kept) if not column.row.quality]
        notes += [f"failed {column.label}: {column.row.error}" for column in failed]
        found.append((model, sorted([*ok, *failed], key=lambda column: column.label), notes))
    return found


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Rows with their names: the system, and the options by which several rows of one system differ."""
    columns = []
    for row in rows:
        said, *others = (
            {"hw": other.hw, "workload": other.workload_name, **other.options}
            for other in (row, *(other for other in rows if other.system == row.system))
        )
        varied = [name for name in said if any(other.get(name) != said[name] for other in others)]
        label = " ".join(
            [row.system, *(f"{name.removeprefix('system.')}={_said(said[name])}" for name in sorted(varied))]
        )
        columns.append(_column(label, row, rows))
    return columns


def _column(label: str, row: Row, rows: Sequence[Row]) -> Column:
    """The scores of one row, and the average over its suite where no member is missing."""
    if not row.quality:
        return Column(label, row, {})
    suite = row.quality["suite"]
    valued = {name: task for name, task in row.quality["tasks"].items() if task.get("value") is not None}
    known = {name for other in rows if other.quality.get("suite") == suite for name in other.quality["tasks"]}
    of = members(suite, known)
    order = [name for member, parts in of.items() for name in (*parts, member)]
    order = list(dict.fromkeys([*order, *sorted(valued)]))
    missing = [
        f"{label}, {name}: {task.get('reason', 'no value')}"
        for name, task in row.quality["tasks"].items() if name not in valued
    ]  # fmt: skip
    scores = {_key(suite, order.index(name), name, [task]): _score(task) for name, task in valued.items()}
    whole: dict[str, list[Mapping[str, Any]]] = {}
    for member, parts in of.items():
        if parts and all(name in valued for name in parts):
            whole[member] = [valued[name] for name in parts]
            if len(parts) > 1:
                scores[_key(suite, order.index(member), member, whole[member], "mean of items")] = average(
                    {member: whole[member]}
                )
    absent = [member for member, parts in of.items() if not parts or not all(name in valued for name in parts)]
    if absent:
        missing.append(f"no average of {suite} for {label}: it lacks {', '.join(absent)}")
    elif any(task["mode"] == "ppl" for task in valued.values()):
        missing.append(f"no average of {suite} for {label}: it holds perplexities")
    elif len(whole) > 1:
        tasks = [task for own in whole.values() for task in own]
        key = _key(suite, len(order), f"{AVERAGE} of {suite}", tasks, "naive_average")
        scores[key] = average(whole)
    return Column(label, row, scores, tuple(missing))


def _key(suite: str, place: int, name: str, tasks: Sequence[Mapping[str, Any]], metric: str = "") -> Key:
    """The line of a task, or by ``metric`` of several: their version is a hash of all that tells their lines apart."""
    modes = {task["mode"] for task in tasks}
    mode = modes.pop() if len(modes) == 1 else "mixed"
    if not metric:
        return Key(suite, place, name, tasks[0]["version"], tasks[0]["metric"], mode)
    parts = repr([(task["version"], task["metric"], task["mode"]) for task in tasks])
    return Key(suite, place, name, hashlib.sha256(parts.encode()).hexdigest()[:6], metric, mode)


def _score(task: Mapping[str, Any]) -> Score:
    low, high = task["ci"]
    numbers = (task["value"], task["reference"], task["delta"], (low, high), task["n"], task["p"])
    return Score(*numbers, task["gained"], task["lost"])


def average(members: Mapping[str, Sequence[Mapping[str, Any]]]) -> Score:
    """The mean over members, each counting the same; items of one member's tasks count as one task's. Items are
    resampled within their member; p is over all items.
    """
    names = ("scores", "reference_scores")
    arms = [[[s / 100 for task in tasks for s in task[of]] for tasks in members.values()] for of in names]
    system, reference = ([score for scores in arm for score in scores] for arm in arms)
    groups = [name for name, scores in zip(members, arms[0], strict=True) for _ in scores]
    delta = paired_delta(system, reference, groups)
    gained, lost = (sum(sign * (a - b) > 0 for a, b in zip(system, reference, strict=True)) for sign in (1, -1))
    value, base = (100 * sum(sum(scores) / len(scores) for scores in arm) / len(arm) for arm in arms)
    return Score(value, base, delta.points, delta.ci, delta.n, exact_p(gained, lost), gained, lost)


def _references(columns: Sequence[Column]) -> tuple[dict[str, dict[Key, float]], list[str]]:
    """The unmodified model's column; a second one where runs on other machines or versions saw it answer otherwise."""
    found: dict[str, dict[Key, float]] = {}
    notes = []
    for column in columns:
        own = {key: score.reference for key, score in column.scores.items()}
        base = str(column.row.quality.get("reference", ""))
        for number in range(1, len(columns) + 2):
            name = base if number == 1 else f"{base} ({number})"
            if all(found.get(name, {}).get(key, value) == value for key, value in own.items()):
                break
        if own:
            found.setdefault(name, {}).update(own)
            notes += [f"{name} is that of {column.label}: on other kernels it answers otherwise"] * (number > 1)
    return found, notes


# --- cells -----------------------------------------------------------------------------------------------------------


def _said(option: Any) -> str:
    """An option as the command line has it."""
    return str(option).lower() if isinstance(option, bool) else str(option)


def _value(value: float | None, missing: str = "-") -> str:
    return missing if value is None else f"{value:.2f}"


def _delta(score: Score) -> tuple[str, ...]:
    return f"{score.delta:+.2f}", f"[{score.ci[0]:+.2f}, {score.ci[1]:+.2f}]", str(score.n), p_text(score.p)


def _numbers(score: Score) -> list[str]:
    return [f"{score.delta:.2f}", *(f"{end:.2f}" for end in score.ci), str(score.n), f"{score.p:.4g}"]


def p_text(p: float) -> str:
    """A p value for people."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"
