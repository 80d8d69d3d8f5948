"""What a comparison found, written for people, for a pull request, for a test runner, for Bencher, for GitHub.

Each form escapes what it would read as its own: names and errors may come from a plugin. Knows findings; judges
nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from moebench.regress import REGRESSIONS, VERDICTS, Finding, cell_name, finished
from moebench.report.plain import Plain, to_markdown
from moebench.result import SCHEMA, Row

HEADER = ("cell", "metric", "verdict", "baseline", "current", "change", "why")


def names(rows: Iterable[Row]) -> Callable[[Row], str]:
    """The cell's name, with the options that tell it apart from other rows of that name."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(cell_name(row), []).append(row.options)
    varied = {
        name: [key for key in given[0] if len({repr(one.get(key)) for one in given}) > 1]
        for name, given in groups.items()
    }

    def name(row: Row) -> str:
        given = row.options
        return " ".join([cell_name(row), *(f"{key}={given[key]}" for key in varied[cell_name(row)] if key in given)])

    return name


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many cells, and how many values met each verdict."""
    counts: Counter[str] = Counter(finding.verdict for finding in findings)
    cells = len({id(finding.row) for finding in findings})
    return f"{cells} cells: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def told(findings: Sequence[Finding]) -> list[Finding]:
    """Everything that is not the same, regressions first."""
    found = [finding for finding in findings if finding.verdict != "same"]
    return sorted(found, key=lambda finding: VERDICTS.index(finding.verdict))


def tables(findings: Sequence[Finding]) -> list[Plain]:
    """For a terminal: the rows that are spoken of as a whole, then a table for each cell with what is not the same."""
    name, found = names(finding.row for finding in findings), told(findings)
    rows = tuple((name(f.row), f.verdict, f.note) for f in found if not f.metric)
    made = [Plain(f"{len(rows)} whole rows", ("row", "verdict", "why"), rows, labels=3)] if rows else []
    cells: dict[str, list[Finding]] = {}
    for finding in found:
        if finding.metric:
            cells.setdefault(name(finding.row), []).append(finding)
    for cell, own in cells.items():
        lines = tuple((f.metric, f.verdict, _number(f.baseline), _number(f.current), _change(f)) for f in own)
        notes: dict[str, list[str]] = {}
        for finding in own:
            notes.setdefault(finding.note, []).append(finding.metric)
        below = tuple(f"{', '.join(metrics)}: {note}" for note, metrics in notes.items() if note)
        made.append(Plain(cell, ("metric", "verdict", "baseline", "current", "change"), lines, below, labels=2))
    return made


def document(findings: Sequence[Finding]) -> str:
    """One line of JSON: verdicts counted, and each finding that is not the same."""
    name = names(finding.row for finding in findings)
    counts: Counter[str] = Counter(finding.verdict for finding in findings)
    entries = [
        {
            "cell": name(f.row),
            "id": f.row.id,
            "metric": f.metric or None,
            "verdict": f.verdict,
            "baseline": f.baseline,
            "current": f.current,
            "note": f.note,
        }
        for f in told(findings)
    ]
    return json.dumps({"schema": SCHEMA, "counts": counts, "findings": entries}, sort_keys=True, separators=(",", ":"))


def markdown(findings: Sequence[Finding]) -> str:
    """One table for a comment, or one line where nothing differs."""
    name = names(finding.row for finding in findings)
    rows = tuple(
        (name(f.row), f.metric or "(row)", f.verdict, _number(f.baseline), _number(f.current), _change(f), f.note)
        for f in told(findings)
    )
    return to_markdown([Plain(summary(findings), HEADER, rows, labels=3)]) if rows else f"**{summary(findings)}**\n"


def junit(findings: Sequence[Finding]) -> str:
    """JUnit XML: a suite per cell, a case per metric; regressions are failures, a failed run an error, what was not
    judged is skipped.
    """
    name = names(finding.row for finding in findings)
    suites: dict[str, list[Finding]] = {}
    for finding in findings:
        suites.setdefault(name(finding.row), []).append(finding)
    root = ElementTree.Element("testsuites", name="moebench regress")
    for cell, found in suites.items():
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(cell), tests=str(len(found)))
        counts = Counter(_outcome(finding) for finding in found)
        for outcome in ("failure", "error", "skipped"):
            suite.set({"failure": "failures", "error": "errors"}.get(outcome, outcome), str(counts[outcome]))
        for finding in found:
            case = ElementTree.SubElement(suite, "testcase", classname=_xml(cell), name=_xml(finding.metric or "row"))
            if outcome := _outcome(finding):
                ElementTree.SubElement(case, outcome, message=_xml(_sentence(finding)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _outcome(finding: Finding) -> str:
    if finding.verdict == "failed":
        return "error"
    return "failure" if finding.verdict in REGRESSIONS else "skipped" if finding.verdict == "not judged" else ""


def bmf(rows: Sequence[Row]) -> str:
    """Bencher Metric Format of the current rows: benchmark -> measure -> value, with the interval where there is one
    (https://bencher.dev/docs/reference/bencher-metric-format/). A failed row has no values, so it stands in no line.
    """
    name, found = names(rows), {}
    for row in sorted(rows, key=finished):
        measures = {}
        for metric, number in row.metrics.items():
            if number.value is not None:
                measures[metric] = {"value": number.value}
                measures[metric] |= dict(zip(("lower_value", "upper_value"), number.ci or (), strict=False))
        if measures:
            found[name(row)] = measures
    return json.dumps(found, sort_keys=True, indent=1) + "\n"


def github(findings: Sequence[Finding]) -> str:
    """Workflow commands: an error per regression, a notice per other difference, the sum last
    (https://docs.github.com/actions/reference/workflow-commands-for-github-actions).
    """
    name = names(finding.row for finding in findings)
    lines = []
    for finding in told(findings):
        kind = "error" if finding.verdict in REGRESSIONS else "notice"
        title = _property(f"{finding.metric or 'row'} {finding.verdict}")
        lines.append(f"::{kind} title={title}::{_data(f'{name(finding.row)}: {_sentence(finding)}')}")
    return "\n".join([*lines, f"::notice title=moebench regress::{_data(summary(findings))}"]) + "\n"


def _sentence(finding: Finding) -> str:
    parts = [f"{finding.metric} {finding.verdict}".strip()]
    if finding.baseline is not None or finding.current is not None:
        parts.append(f"{_number(finding.baseline)} -> {_number(finding.current)} {_change(finding)}".strip())
    return "; ".join([*parts, *([finding.note] if finding.note else [])])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _change(finding: Finding) -> str:
    """Relative change in percent with its direction; more digits where the change is small."""
    if finding.change is None or finding.change == 0:
        return ""
    return f"{100 * finding.change:+.3g} %"


def _xml(text: str) -> str:
    """Text without the characters that XML 1.0 cannot hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
