"""The tables of a comparison: for each model one, from the floor over baselines and systems to the oracle and the
ceiling, narrow enough for a terminal; what else there is to say stands below them, grouped.

Knows rows and what each system is to the table; runs nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moebench.report.groups import PUBLISHED, ROLES
from moebench.report.table import HEADINGS, LEGEND, MARKS, NOTHING, number
from moebench.result import Row

COLUMNS = {  # a metric and its heading here
    "decode_tok_s": "decode\ntok/s",
    "peak_active_gib": "peak\nactive\nGiB",
    "hit_rate": "hit\nrate",
    "ssd_mib_per_token": "SSD\nMiB\n/tok",
    "reads_per_token": "reads\n/tok",
    "stall_ms_per_token": "stall\nms\n/tok",
    "token_agreement": "token\nagree",
    "quality_delta": "qual.\ndelta\npt",
}
GROUPS = {"floor": "floor", "baseline": "baselines", "system": "systems", "oracle": "oracle", "ceiling": "ceiling"}
BOUNDS = {"floor": "keeps nothing", "oracle": "knows the future", "ceiling": "holds everything"}


@dataclass(frozen=True)
class Form:
    """How a table is set: blanks between columns and before marks, decimals, intervals."""

    gap: int = 2
    mark: str = " "
    decimals: int = 9
    intervals: bool = False


FORMS = (Form(intervals=True), Form(), Form(mark=""), Form(gap=1, mark=""), Form(gap=1, mark="", decimals=4))


def print_comparison(
    rows: Sequence[Row],
    roles: Mapping[str, str],
    stream: TextIO,
    width: int | None = None,
    forecasts: Mapping[str, str] = NOTHING,
) -> None:
    """Print one table for each model. ``roles`` maps a system to one of ``ROLES``, others are systems; ``forecasts``
    says of machines what modeled numbers of theirs are off by.
    """
    console = Console(file=stream, width=width, highlight=False)
    for model in dict.fromkeys(row.model for row in rows):
        found = [row for row in rows if row.model == model]
        ran = [row for row in found if row.workload["kind"] != PUBLISHED]
        names = [name for name in COLUMNS if any(_has(row, name) for row in ran)]
        console.print(Text(_title(ran)))
        for table in _tables(found, roles, names, console.width):
            console.print(table)
        here = {roles.get(row.system) for row in found}
        bounds = "   ".join(f"{role}: {text}" for role, text in BOUNDS.items() if role in here)
        for line in filter(None, [LEGEND, *forecasts.values(), bounds, *_notes(found, ran)]):
            wrapped = textwrap.wrap(line, console.width, subsequent_indent="  ", break_on_hyphens=False)
            console.print(Text("\n".join(wrapped)))
        console.print()


def _title(ran: Sequence[Row]) -> str:
    """What the rows of a table have in common."""
    first = ran[0]
    clock = "measured" if first.protocol.get("clock") == "wall" else "modeled"
    about = f"workload {first.workload_name}, budget {_short(first.config['budget'])}, {first.config['quant']}"
    return f"{first.model} on {first.hw}, {clock}: {about}"


def _short(budget: str) -> str:
    try:
        return f"{float(budget):.4g}"
    except ValueError:
        return budget


def _tables(rows: Sequence[Row], roles: Mapping[str, str], names: Sequence[str], width: int) -> list[Table]:
    """The table in the most telling form that fits; where none does, its columns in several tables."""
    for form in FORMS:
        if _natural_width(table := _table(rows, roles, names, form)) <= width:
            return [table]
    parts: list[list[str]] = [[]]
    for name in names:
        if parts[-1] and _natural_width(_table(rows, roles, [*parts[-1], name], FORMS[-1])) > width:
            parts.append([])
        parts[-1].append(name)
    return [_table(rows, roles, part, FORMS[-1]) for part in parts]


def _table(rows: Sequence[Row], roles: Mapping[str, str], names: Sequence[str], form: Form) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, form.gap - 1, 0, 0))
    for heading in ("system", "fidelity"):
        table.add_column(Text(heading), no_wrap=True, vertical="bottom")
    for name in names:
        table.add_column(Text(COLUMNS[name], justify="right"), justify="right", no_wrap=True)
    for role in ROLES:
        group = [row for row in rows if roles.get(row.system, "system") == role]
        if group:
            table.add_row(Text(GROUPS[role], style="bold"))
        for row in group:
            published = row.workload["kind"] == PUBLISHED
            label = "  published" if published else f" {row.system}"
            cells = [Text(_cell(row, name, form)) for name in names]
            if row.status == "failed":
                cells[:1] = [Text("failed")]
            table.add_row(Text(label), Text(row.fidelity), *cells)
    return table


def _natural_width(table: Table) -> int:
    return Console(width=10_000).measure(table).maximum


def _has(row: Row, name: str) -> bool:
    return name in row.metrics and row.metrics[name].value is not None


def _cell(row: Row, name: str, form: Form) -> str:
    """A number with its mark, and a quality delta's interval where there is room for it."""
    metric = row.metrics.get(name)
    if metric is None or metric.value is None:
        return "-"
    text = f"{number(metric.value, form.decimals)}{form.mark}{MARKS[str(metric.provenance)]}"
    if form.intervals and name == "quality_delta" and metric.ci is not None:
        text += f" [{number(metric.ci[0])}, {number(metric.ci[1])}]"
    return text


def _notes(rows: Sequence[Row], ran: Sequence[Row]) -> list[str]:
    """Why values are missing, what failed, what others published, what was assumed, what hooks took: each once."""
    good = [row for row in ran if row.status == "ok"]
    lines = [f"failed: {', '.join(systems)}: {error}" for error, systems in _by(ran, lambda row: [row.error or ""])]
    lines += _missing(good)
    lines += [_published(row) for row in rows if row.workload["kind"] == PUBLISHED]
    assumed = _by(good, lambda row: row.assumptions)
    together: dict[tuple[str, ...], list[str]] = {}
    for line, systems in assumed:
        together.setdefault(systems, []).append(line)
    for systems, said in together.items():
        lines.append(_who(systems, good) + "; ".join(_kinds(said)))
    taken = {row.system: row.volatile.get("hook_us_per_token") for row in good}
    if told := [f"{system} {number(us)}" for system, us in taken.items() if us]:
        lines.append(f"hooks and policy, us/token on this machine: {', '.join(told)}")
    return lines


def _by(rows: Sequence[Row], says: Callable[[Row], Iterable[str]]) -> list[tuple[str, tuple[str, ...]]]:
    """Each thing that rows say, with the systems that say it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for line in filter(None, says(row)):
            found.setdefault(line, []).append(row.system)
    return [(line, tuple(systems)) for line, systems in found.items()]


def _who(systems: Sequence[str], rows: Sequence[Row]) -> str:
    """Whom a note is about: nobody in particular where it is all rows, and where it is nearly all who it is not."""
    others = [row.system for row in rows if row.system not in systems]
    if not others:
        return ""
    return f"all but {', '.join(others)}: " if len(others) < len(systems) / 2 else f"{', '.join(systems)}: "


def _kinds(said: Sequence[str]) -> list[str]:
    """Notes of one kind after another, the kind (``assumed:``) said once."""
    kinds: dict[str, list[str]] = {}
    for line in said:
        kind, colon, rest = line.partition(": ")
        kinds.setdefault(kind + colon if colon else "", []).append(rest if colon else line)
    return [kind + "; ".join(rest) for kind, rest in kinds.items()]


def _missing(good: Sequence[Row]) -> list[str]:
    """Why the table has no column, or some systems no value in it: each reason once."""
    absent: dict[str, list[str]] = {}
    for name in COLUMNS:
        lacking: dict[str, list[str]] = {}
        for row in good:
            metric = row.metrics.get(name)
            if metric is None or metric.value is None:
                lacking.setdefault(metric.reason if metric else "not reported", []).append(row.system)
        for reason, systems in lacking.items():
            absent.setdefault(_who(systems, good) + reason, []).append(HEADINGS[name])
    return [f"- no {', '.join(where)}: {reason}" for reason, where in absent.items()]


def _published(row: Row) -> str:
    """Everything that others published for a system, also where the table has no column for it."""
    sources: dict[str, list[str]] = {}
    for name, metric in row.metrics.items():
        if metric.value is not None:
            sources.setdefault(metric.source, []).append(f"{number(metric.value)} {HEADINGS[name]}")
    told = [f"{', '.join(values)} ({source})" for source, values in sources.items()]
    return f"† {row.system}: {'; '.join(told)}; setting: {row.protocol['setting']}"
