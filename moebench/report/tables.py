"""The tables of one machine and model: all numbers, parts of a token's time, step times, how to get each row again.

Knows rows and their names; knows no HTML and draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moebench.report.grid import Cell, Column, Grid
from moebench.report.groups import Group, Named
from moebench.report.table import HEADINGS, MARKS, number
from moebench.report.tail import P99_MINIMUM, Bucket, tail
from moebench.result import METRICS, Metric

PARTS = ("compute", "stall", "copy", "decode", "overhead")  # of the time of an emitted token, details' own names
TIMES = ("p50 ms", "p95 ms", "p99 ms")
FEW = f"a 99th percentile needs {P99_MINIMUM} steps"


def results(group: Group, slug: str, forecast: str = "") -> Grid:
    """Every system with every metric; what no row has is said once below, and what a forecast is off by."""
    shown = [name for name in METRICS if any(_value(named, name) is not None for named in group.rows)]
    columns = [Column("system"), Column("role"), Column("fidelity"), Column("workload")]
    rows = [(*_labels(named), *(_metric(named, name) for name in shown)) for named in group.rows]
    remarks = [forecast] if forecast else []
    absent: dict[str, list[str]] = {}
    for name in METRICS:
        found = [named.row.metrics[name] for named in group.rows if named.drawn and name in named.row.metrics]
        if name not in shown and found:
            reasons = "; ".join(dict.fromkeys(metric.reason for metric in found))
            absent.setdefault(reasons, []).append(HEADINGS[name])
    remarks += [f"no row has {', '.join(names)}: {reasons}" for reasons, names in absent.items()]
    return Grid(
        slug, f"All rows: {group.title}", (*columns, *(Column(HEADINGS[name], "marked") for name in shown)),
        tuple(rows), "m measured, ~ modeled, † published by others, - no value: the note says why.", tuple(remarks),
    )  # fmt: skip


def split(group: Group, slug: str) -> Grid | None:
    """Where the time of an emitted token goes, in ms; None where no row says."""
    rows = []
    for named in group.rows:
        if parts := named.row.details.get("split_ms_per_token"):
            values = [float(parts.get(name, 0)) for name in PARTS]
            hooks = named.row.volatile.get("hook_us_per_token")
            took = Cell("-", note="not counted") if hooks is None else Cell(number(float(hooks)), float(hooks))
            rows.append((_name(named), Cell(named.workload), *map(_ms, values), _ms(sum(values)), took))
    head = [Column(f"{name} ms/token", "number") for name in (*PARTS, "sum")]
    names = Column("system"), Column("workload"), *head, Column("hooks, real us/token", "number")
    caption = (
        "The last column is no part of the sum where time is modeled: what the system's hooks took of the real clock."
    )
    return Grid(slug, f"Time per token: {group.title}", names, tuple(rows), caption) if rows else None


def steps(group: Group, slug: str) -> Grid | None:
    """Step times of each row, and how much of their tail had a miss; None where no row has timed steps."""
    rows = []
    for named in group.rows:
        if (found := tail(named.row.details.get("steps", {}))) is None:
            continue
        slowest = Cell("-", note=FEW)
        if found.slow is not None and found.slow_missed is not None:
            slowest = Cell(f"{found.slow_missed} of {found.slow}", found.slow_missed / found.slow)
        missed = Cell("0", 0), Cell("-", note="no step missed")
        if found.given_miss is not None:
            missed = Cell(str(found.given_miss.n), found.given_miss.n), _p99(found.given_miss)
        rows.append((_name(named), Cell(named.workload), *_times(found.whole), *missed, slowest))
    head = [Column(name, "number") for name in ("steps", *TIMES, "steps with a miss", "p99 ms given a miss")]
    caption = "The slowest are the steps at or above the 99th percentile of all steps; percentiles are nearest-rank."
    names = Column("system"), Column("workload"), *head, Column("slowest with a miss", "number")
    return Grid(slug, f"Step times: {group.title}", names, tuple(rows), caption) if rows else None


def by_misses(group: Group, slug: str) -> Grid | None:
    """Step times of each row by the number of experts that missed in the step; None where no row has timed steps."""
    rows = []
    for named in group.rows:
        if (found := tail(named.row.details.get("steps", {}))) is not None:
            for bucket in found.buckets:
                share = Cell(f"{bucket.n / found.whole.n:.1%}", bucket.n / found.whole.n)
                times = _times(bucket)
                rows.append((_name(named), Cell(named.workload), Cell(bucket.label), times[0], share, *times[1:]))
    head = [Column(name, "number") for name in ("steps", "share of steps", *TIMES)]
    names = Column("system"), Column("workload"), Column("experts missed"), *head
    return Grid(slug, f"Step times by misses: {group.title}", names, tuple(rows), folded=True) if rows else None


def commands(group: Group, slug: str, texts: Mapping[str, str]) -> Grid:
    """The command that makes each row again, and on what it was made; ``texts`` maps a row's id to the command."""
    rows = []
    for named in group.rows:
        row = named.row
        if named.published:
            continue
        commit, workload = row.environment.get("commit") or "-", str(row.workload["hash"])[:12] or "-"
        rows.append((_name(named), Cell(texts.get(row.id, "-")), Cell(row.id), Cell(str(commit)[:13]), Cell(workload)))
    head = (Column("system"), Column("command", "code"), Column("id"), Column("commit"), Column("workload hash"))
    caption = (
        "The same commit gives the same id where the machine is modeled; a measured row gives its own numbers. "
        "A + behind a commit: files differed from it."
    )
    return Grid(slug, f"How to get each row again: {group.title}", head, tuple(rows), caption)


def assumptions(found: Sequence[Group], slug: str) -> Grid | None:
    """Every assumed, altered or transferred input, with the rows that it stands behind."""
    behind: dict[str, dict[str, dict[str, None]]] = {}
    for group in found:
        for named in group.rows:
            for line in named.row.assumptions:
                behind.setdefault(line, {}).setdefault(group.title, {})[named.row.system] = None
    rows = tuple(
        (Cell(line), Cell("; ".join(f"{title}: {', '.join(systems)}" for title, systems in groups.items())))
        for line, groups in sorted(behind.items())
    )
    return (
        Grid(slug, "Assumed and transferred inputs", (Column("input"), Column("rows")), rows, headed=False)
        if rows
        else None
    )


def environments(found: Sequence[Group], slug: str) -> Grid | None:
    """The machines and versions that the rows were made with; a modeled row's own machine is its profile."""
    made: dict[tuple[str, ...], int] = {}
    for group in found:
        for named in group.rows:
            here = named.row.environment
            if named.published or not here:
                continue
            packages = here.get("packages") or {}
            versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
            names = ("commit", "python", "platform", "cpu", "gpu")
            key = (*(str(here.get(name) or "-") for name in names), versions)
            made[key] = made.get(key, 0) + 1
    head = [Column(name) for name in ("commit", "python", "platform", "processor", "card", "packages")]
    rows = tuple((*map(Cell, key), Cell(str(count), count)) for key, count in sorted(made.items()))
    return (
        Grid(slug, "What the rows were made with", (*head, Column("rows", "number")), rows, headed=False)
        if rows
        else None
    )


def _labels(named: Named) -> tuple[Cell, ...]:
    role = "published" if named.published else named.role
    return _name(named), Cell(role), Cell(named.row.fidelity), Cell(named.workload)


def _name(named: Named) -> Cell:
    if named.row.status == "failed":
        return Cell(f"{named.name}: failed", note=f"failed: {named.row.error}")
    return Cell(named.name)


def _value(named: Named, name: str) -> float | None:
    metric = named.row.metrics.get(name)
    return None if metric is None else metric.value


def _metric(named: Named, name: str) -> Cell:
    metric = named.row.metrics.get(name)
    if metric is None:
        return Cell("-", note="this kind of run does not report it")
    if metric.value is None:
        return Cell("-", note=f"failed: {named.row.error}" if named.row.error else metric.reason)
    source = f"published: {metric.source}" if metric.provenance == "published" else ""
    return Cell(_shown(metric), metric.value, str(metric.provenance), source)


def _shown(metric: Metric) -> str:
    """Number, interval and mark."""
    assert metric.value is not None
    interval = "" if metric.ci is None else f" [{number(metric.ci[0])}, {number(metric.ci[1])}]"
    return f"{number(metric.value)}{interval} {MARKS[str(metric.provenance)]}"


def _ms(value: float) -> Cell:
    return Cell(number(value), value)


def _times(bucket: Bucket) -> tuple[Cell, ...]:
    return Cell(str(bucket.n), bucket.n), _ms(bucket.p50), _ms(bucket.p95), _p99(bucket)


def _p99(bucket: Bucket) -> Cell:
    return Cell("-", note=FEW) if bucket.p99 is None else _ms(bucket.p99)
