"""Live and replayed runs through the harness: they end in a row, and a replay is the same twice."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from moebench.config import QualityConfig, WorkloadConfig
from moebench.harness.cell import run_cell
from moebench.harness.plan import Cell
from moebench.result import Row, from_json, to_json
from moebench.testing.lab import Lab, deadline
from moebench.testing.replays import replay_cell, replayed
from moebench.testing.subject import Subject
from moebench.testing.test_answers import ALONE, PLAIN
from moebench.trace.format import Trace


def test_a_replay_is_the_same_twice(lab: Lab, subject: Subject, trace: Trace, tmp_path: Path) -> None:
    """Two replays of one trace give one result, byte for byte, but for the volatile block; it can be read again.

    Draw from ``numpy.random.default_rng(run.seed)``; iterate over no set; look at no clock but ``view.now``.
    """
    file = trace.save(tmp_path / "trace.safetensors")
    workload = WorkloadConfig(kind="trace", name="conformance", path=str(file))
    cell = replay_cell(lab, subject, workload=workload, warmup_tokens=2)
    texts = []
    for _ in range(2):
        row = finished(lab, cell)
        texts.append(to_json(dataclasses.replace(row, volatile={}, environment={})))  # somebody may edit meanwhile
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("live")
def test_a_live_run_gives_a_row(lab: Lab, subject: Subject) -> None:
    """The embedded model answers a prompt on a modeled machine, through the harness as ``moebench run`` goes: there is
    a number or a reason for every metric, and the row can be written and read again.
    """
    cell = dataclasses.replace(lab.cell(subject, ALONE), clock="virtual")
    workload = WorkloadConfig(kind="prompts", requests=1, new_tokens=6)
    config = dataclasses.replace(cell.config, workload=workload, warmup_tokens=1, quality=QualityConfig("none"))
    row = finished(lab, dataclasses.replace(cell, config=config))
    assert row.fidelity == subject.fidelity
    assert row.metrics["decode_tok_s"].value


def finished(lab: Lab, cell: Cell) -> Row:
    """The row of a cell that ran to its end."""
    with deadline(lab.seconds, f"{cell.spec.id}, {'live' if cell.live else 'replayed'} row"):
        row = run_cell(cell, lab.registry)
    assert row.status == "ok", row.error
    assert from_json(to_json(row)).id == row.id
    for name, number in row.metrics.items():
        assert number.value is not None or number.reason, f"{name} is missing without a reason"
    return row


def test_what_it_reports_are_finite_numbers(lab: Lab, subject: Subject, trace: Trace) -> None:
    """``report()`` returns names and numbers: no NaN, no infinity, no array, live and in replay."""
    runs = {"replay": replayed(lab, subject, trace)}
    if not subject.spec.handling(subject.knobs).matrices:
        runs["live"] = lab.run(subject, PLAIN)
    for where, run in runs.items():
        for name, value in run.report.items():
            number = isinstance(value, int | float) and math.isfinite(value)
            assert isinstance(name, str) and number, f"{where}: report() says {name!r}: {value!r}"  # noqa: PT018
