"""``moebench regress``: current results against a baseline, or the steps in a history; exit code 1 on a regression."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moebench import regress, verdicts
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError, unknown
from moebench.evidence import change
from moebench.history import find
from moebench.regress import Rules
from moebench.report.plain import Plain, show, to_markdown
from moebench.result import METRICS, SCHEMA
from moebench.results import read

BOTH = ("table", "json", "markdown")  # forms that a history has too


@dataclass(frozen=True)
class RegressOptions:
    """What is compared with what, by which rules, and in which form it is said."""

    baseline: str = option("", "result file or folder to compare with")
    current: str = option("", "result file or folder that is judged")
    history: str = option("", "instead of both: folder of results of many commits; finds where a metric changed")
    metric: tuple[str, ...] = option((), "with history: metrics to look at; empty for all")
    format: Literal["table", "json", "markdown", "junit", "bmf", "github"] = option(
        "table",
        "table ends with the JSON line; junit is XML for test reports, bmf for Bencher, github writes annotations",
    )
    min_change: float = option(0.05, "relative change below which measured values are the same")
    alpha: float = option(0.05, "chance of calling noise a change, per measured value, of an exact rank or sign test")
    exact: bool = option(False, "fail as well on what is better, changed or new: the baseline is out of date")

    def __post_init__(self) -> None:
        if bool(self.history) == bool(self.baseline or self.current):
            raise UsageError("regress needs baseline=DIR and current=DIR, or history=DIR")
        if not self.history and not (self.baseline and self.current):
            raise UsageError(f"regress needs {'current' if self.baseline else 'baseline'}=DIR too")
        if self.history and (self.exact or self.format not in BOTH):
            raise UsageError(f"history takes format={'|'.join(BOTH)} and no exact=: it judges nothing")
        if self.metric and not self.history:
            raise UsageError("metric= chooses what a history looks at; a comparison looks at all metrics")
        for name in self.metric:
            if name not in METRICS:
                raise unknown("metric", name, METRICS)
        if self.min_change < 0 or not 0 < self.alpha < 1:
            raise UsageError("min_change must be at least 0, alpha above 0 and below 1")

    @property
    def rules(self) -> Rules:
        """The rules of judging."""
        return Rules(self.min_change, self.alpha)


def main(words: Sequence[str]) -> int:
    """Judge, print, and say it with the exit code; files that are no results are refused, not skipped."""
    chosen = parse(words, RegressOptions, "regress")
    if chosen is None:
        return 0
    if chosen.history:
        return _history(chosen)
    baseline, current = (read(path, strict=True) for path in (chosen.baseline, chosen.current))
    findings = regress.compare(baseline, current, chosen.rules)
    print(_text(chosen.format, findings, current), end="")
    found = {finding.verdict for finding in findings}
    if found & set(regress.REGRESSIONS):
        return 1
    if chosen.exact and (found := found - {"same", "not judged"}):
        print(f"moebench: the baseline is out of date ({', '.join(sorted(found))}); make it anew", file=sys.stderr)
        return 1
    return 0


def _text(form: str, findings: Sequence[regress.Finding], current: Sequence) -> str:
    if form == "table":
        return _shown(verdicts.summary(findings), verdicts.tables(findings), verdicts.document(findings))
    if form == "json":
        return verdicts.document(findings) + "\n"
    if form == "bmf":
        return verdicts.bmf(current)
    return {"markdown": verdicts.markdown, "junit": verdicts.junit, "github": verdicts.github}[form](findings)


def _shown(title: str, tables: Sequence[Plain], document: str) -> str:
    """Tables for people, what they come to, and the document as the last line."""
    stream = io.StringIO()
    show(tables, stream)
    return f"{stream.getvalue()}{title}\n{document}\n"


def _history(chosen: RegressOptions) -> int:
    """Print where a metric changed; a step is news and no failure."""
    rows = read(chosen.history)
    name = verdicts.names(rows)
    entries: list[dict[str, Any]] = []
    cells: dict[str, list[tuple[str, ...]]] = {}
    for step in find(rows, chosen.rules, chosen.metric):
        last, first = (str(row.environment.get("commit") or regress.finished(row)) for row in (step.last, step.first))
        entry = {"cell": name(step.first), "metric": step.metric, "verdict": step.verdict, "last": last, "first": first}
        entries.append({**entry, "before": step.before, "after": step.after})
        numbers = (f"{step.before:.6g}", f"{step.after:.6g}", f"{100 * change(step.before, step.after):+.3g} %")
        line = (step.metric, step.verdict, _short(last), _short(first), *numbers)
        cells.setdefault(name(step.first), []).append(line)
    failed = sum(row.status == "failed" for row in rows)
    title = f"{len(rows)} results, {failed} of them failed: {len(entries)} steps"
    header = ("metric", "verdict", "last", "first", "before", "after", "change")
    tables = [Plain(cell, header, tuple(lines), labels=4) for cell, lines in cells.items()]
    document = json.dumps({"schema": SCHEMA, "steps": entries}, sort_keys=True, separators=(",", ":"))
    if chosen.format == "markdown":
        print(f"{to_markdown(tables)}\n{title}" if tables else title)
    else:
        print(document + "\n" if chosen.format == "json" else _shown(title, tables, document), end="")
    return 0


def _short(commit: str) -> str:
    """A commit, its mark of changed files kept; or a date."""
    return commit[:10] + "+" * (commit.endswith("+") and len(commit) > 10)
