"""Two sets of results, cell by cell and metric by metric: what became worse, by rules that say what is noise.

Modeled values must be equal, measured ones differ beyond noise, answers of a model are compared on the same documents.
What cannot be compared (another profile, workload, protocol) is refused and not judged. Knows rows; prints nothing.
``docs/results.md`` states the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from moebench.errors import UsageError
from moebench.evidence import MINIMUM, change, rank_p
from moebench.quality.paired import exact_p
from moebench.result import METRICS, Metric, Row

VERDICTS = ("missing", "failed", "worse", "better", "changed", "not judged", "new", "same")
REGRESSIONS = ("missing", "failed", "worse")
# Where a file lies is no option of a cell: what is in it stands in the workload's hash, or in a task's version.
PLACES = ("workload.path", "quality.data_dir")
ANSWERS = ("token_agreement", "quality_delta", "kl_median_nats", "kl_p99_nats", "perplexity")  # what a model says
SAME_MACHINE = ("cpu", "isa", "python", "packages")  # on which kernels give one model the same tokens


@dataclass(frozen=True)
class Rules:
    """What counts as a change of a measured value: at least ``least`` (relative), with p of at most ``alpha``."""

    least: float = 0.05
    alpha: float = 0.05


@dataclass(frozen=True)
class Finding:
    """What became of one metric of one cell; ``metric`` is empty where it is the whole row that is spoken of."""

    row: Row  # the current one where there is one
    metric: str
    verdict: Literal["missing", "failed", "worse", "better", "changed", "not judged", "new", "same"]
    baseline: float | None = None
    current: float | None = None
    note: str = ""

    @property
    def change(self) -> float | None:
        """Relative change; None where one side has no value."""
        return None if self.baseline is None or self.current is None else change(self.baseline, self.current)


def cell_name(row: Row) -> str:
    """A cell for people and for the names of tests and benchmarks."""
    machine = f"-{row.machine}" if row.machine else ""
    return f"{row.hw}{machine}/{row.system}/{row.model}/{row.workload_name}"


def compare(baseline: Sequence[Row], current: Sequence[Row], rules: Rules) -> list[Finding]:
    """All findings, baseline's order first; raises ``UsageError`` that names what makes the two sides incomparable."""
    pairs = list(pair(baseline, current))
    refuse(pairs)
    found: list[Finding] = []
    for old, new in pairs:
        if new is None:
            found += [Finding(row, "", "missing", note="the current results lack it") for row in (old,) if row]
        elif old is None:
            found.append(Finding(new, "", "failed" if new.status == "failed" else "new", note=new.error or ""))
        elif "failed" in (old.status, new.status):
            found.append(_failed(old, new))
        else:
            found += _judged(old, new, rules)
    return found


def pair(baseline: Sequence[Row], current: Sequence[Row]) -> Iterator[tuple[Row | None, Row | None]]:
    """Rows of one cell side by side, the newest of each. Options that only one side's moebench has do not tell cells
    apart.
    """
    groups: dict[tuple[str, ...], tuple[list[Row], list[Row]]] = {}
    for side, rows in enumerate((baseline, current)):
        for row in rows:
            label = (row.hw, row.machine, row.system, row.model, row.workload_name)
            groups.setdefault(label, ([], []))[side].append(row)
    for sides in groups.values():
        known = [{name for row in rows for name in row.options} for rows in sides]
        alone = known[0] ^ known[1] if all(sides) else set()
        old, new = (_newest(rows, alone | set(PLACES)) for rows in sides)
        for key in dict.fromkeys([*old, *new]):
            yield old.get(key), new.get(key)


def _newest(rows: Sequence[Row], ignored: set[str]) -> dict[tuple[Any, ...], Row]:
    found: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=finished):
        given = row.options
        key = tuple(sorted((name, repr(value)) for name, value in given.items() if name not in ignored))
        if key in found and {**found[key].options, **dict.fromkeys(PLACES)} != {**given, **dict.fromkeys(PLACES)}:
            differ = ", ".join(sorted(n for n in ignored if found[key].options.get(n) != given.get(n)))
            raise UsageError(f"{cell_name(row)}: rows that differ in {differ} only, which the other side does not have")
        found[key] = row
    return found


def finished(row: Row) -> str:
    """When a row was made, as text that sorts by time; empty where nobody knows."""
    return str(row.volatile.get("finished", ""))


def refuse(pairs: Sequence[tuple[Row | None, Row | None]]) -> None:
    """Raise ``UsageError`` where what was asked or where differs, with what and in how many cells."""
    reasons: dict[str, int] = {}
    for old, new in pairs:
        for what, before, after in _conditions(old, new) if old and new else ():
            if before != after:
                text = f"{what} (baseline {before}, current {after})"
                reasons[text] = reasons.get(text, 0) + 1
    timed = [{cell_name(row).replace(f"-{row.machine}", "", 1): row for row in side if row and row.machine}
             for side in ([o for o, n in pairs if not n], [n for o, n in pairs if not o])]  # fmt: skip
    for cell in sorted(set(timed[0]) & set(timed[1])):
        before, after = (side[cell].machine for side in timed)
        text = f"machine of {cell.partition('/')[0]} (baseline {before}, current {after})"
        reasons[text] = reasons.get(text, 0) + 1
    if reasons:
        listed = "; ".join(f"{text}, {count} rows" for text, count in reasons.items())
        raise UsageError(f"baseline and current cannot be compared, they differ in {listed}: make a new baseline")


def _conditions(old: Row, new: Row) -> Iterator[tuple[str, Any, Any]]:
    """(what, baseline's, current's) of all that must be equal before a number is looked at."""
    yield "schema", old.schema, new.schema
    if "failed" in (old.status, new.status):
        return  # it has no protocol, and its workload may never have been opened
    where = cell_name(new)
    if new.protocol.get("clock") == "virtual" and {"profile"} <= set(old.protocol) & set(new.protocol):
        yield f"profile of {new.hw}", old.protocol["profile"], new.protocol["profile"]
    for name in ("kind", "seed", "hash"):
        yield f"workload {name} of {new.workload_name}", old.workload[name], new.workload[name]
    for name in ("clock", "warmup_tokens", "page_cache"):
        yield f"protocol {name} of {where}", old.protocol.get(name), new.protocol.get(name)
    yield f"fidelity of {where}", old.fidelity, new.fidelity


def _failed(old: Row, new: Row) -> Finding:
    if new.status == "ok":
        return Finding(new, "", "better", note=f"it runs; the baseline failed: {old.error}")
    if old.status == "ok":
        return Finding(new, "", "failed", note=str(new.error))
    return Finding(new, "", "same", note=f"fails in both: {new.error}")


def _judged(old: Row, new: Row, rules: Rules) -> Iterator[Finding]:
    """Each metric of a cell that ran on both sides, then each task of its quality suite."""
    names = [*METRICS, *sorted({*old.metrics, *new.metrics} - set(METRICS))]
    for name in [name for name in names if name in old.metrics or name in new.metrics]:
        yield _metric(name, old, new, rules)
    tasks, before = (row.quality.get("tasks", {}) for row in (new, old))
    for name in sorted({*tasks, *before}):
        yield _task(name, old, new, before.get(name), tasks.get(name), rules)


def _metric(name: str, old: Row, new: Row, rules: Rules) -> Finding:
    before, after = old.metrics.get(name), new.metrics.get(name)
    was, now = before.value if before else None, after.value if after else None

    def found(verdict: Any, note: str = "") -> Finding:
        return Finding(new, name, verdict, was, now, note)

    if before is None or was is None:
        return found("same") if now is None else found("new", "the baseline has no value")
    if after is None or now is None:
        return found("missing", after.reason if after else "the current row does not have it")
    if before.provenance != after.provenance:
        raise UsageError(f"{cell_name(new)}: {name} is {before.provenance} in the baseline, now {after.provenance}")
    if after.higher_is_better is None:
        return found("same" if was == now else "changed", "neither direction is better")
    if after.provenance == "modeled":
        if was == now:
            return found("same")
        if new.workload["kind"] == "prompts" and not _same_machine(old, new):
            return found("not judged", "a model computed the routing, on another processor or with other versions")
        return found("better" if (now > was) == after.higher_is_better else "worse")
    if name in ANSWERS:
        return found(*_intervals(before, after))
    return found(*_samples(before, after, rules))


def _same_machine(old: Row, new: Row) -> bool:
    return all(old.environment.get(name) == new.environment.get(name) for name in SAME_MACHINE)


def _intervals(before: Metric, after: Metric) -> tuple[str, str]:
    """Answers of a model: 95 % intervals that do not touch."""
    spans = [_interval(number) for number in (before, after)]
    if None in spans:
        return ("same", "") if before.value == after.value else ("not judged", "it has no interval")
    (low, high), (lower, upper) = spans  # type: ignore[misc]
    text = f"95 % intervals {low:.4g} to {high:.4g}, now {lower:.4g} to {upper:.4g}"
    if upper >= low and lower <= high:
        return "same", text
    return ("better" if (lower > high) == after.higher_is_better else "worse"), text


def _interval(number: Metric) -> tuple[float, float] | None:
    """A metric's own, or for a share of n Wilson's (1927, https://doi.org/10.1080/01621459.1927.10502953)."""
    if number.ci is not None or number.unit != "fraction" or not number.n:
        return number.ci
    n, p, z = number.n, float(number.value or 0.0), 1.959964
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def _samples(before: Metric, after: Metric, rules: Rules) -> tuple[str, str]:
    """A measured value: medians that differ by ``least``, and ranks that differ by more than chance."""
    counts = len(before.samples), len(after.samples)
    if min(counts) < MINIMUM:
        return "not judged", f"needs {MINIMUM} repeats on both sides, has {counts[0]} and {counts[1]}"
    moved = change(median(before.samples), median(after.samples))
    low, high = (before.samples, after.samples) if moved > 0 else (after.samples, before.samples)
    p = rank_p(low, high)
    text = f"medians of {counts[0]} and {counts[1]}, p = {p:.3g}"
    if abs(moved) < rules.least or p > rules.alpha:
        return "same", text
    return ("better" if (moved > 0) == after.higher_is_better else "worse"), text


def _task(name: str, old: Row, new: Row, before: Mapping | None, after: Mapping | None, rules: Rules) -> Finding:
    """A task on the same documents: how many got better and worse, and an exact sign test."""
    label = f"quality.{name}"
    if before is None or after is None:
        return Finding(new, label, "new" if before is None else "missing", note="only one side ran this task")
    values = (before["value"], after["value"])
    scores = before.get("scores", []), after.get("scores", [])
    if before["version"] != after["version"]:
        note = f"other prompts or settings: version {before['version']}, now {after['version']}"
        return Finding(new, label, "not judged", *values, note)
    if not all(scores) or len(scores[0]) != len(scores[1]):
        return Finding(new, label, "not judged", *values, "no scores of the same documents on both sides")
    sign = -1 if after["mode"] == "ppl" else 1
    rise = [sign * (b - a) for a, b in zip(*scores, strict=True)]
    gained, lost = sum(x > 0 for x in rise), sum(x < 0 for x in rise)
    p = exact_p(gained, lost)
    note = f"{gained} of {len(rise)} documents better, {lost} worse, p = {p:.3g}"
    if p > rules.alpha:
        return Finding(new, label, "same", *values, note)
    return Finding(new, label, "better" if gained > lost else "worse", *values, note)
