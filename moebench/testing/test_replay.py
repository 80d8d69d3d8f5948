"""Live and replayed runs through the harness: they end in a row, and a replay is the same twice."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from moebench.config import WorkloadConfig
from moebench.harness.cell import run_cell
from moebench.result import from_json, to_json
from moebench.testing.lab import Lab
from moebench.testing.replays import replay_cell, replayed
from moebench.testing.subject import Subject
from moebench.testing.test_answers import PLAIN
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
        row = run_cell(cell, lab.registry)
        assert row.status == "ok", row.error
        assert from_json(to_json(row)).id == row.id
        texts.append(to_json(dataclasses.replace(row, volatile={})))
    assert texts[0] == texts[1]


def test_what_it_reports_are_finite_numbers(lab: Lab, subject: Subject, trace: Trace) -> None:
    """``report()`` returns names and numbers: no NaN, no infinity, no array, live and in replay."""
    runs = {"live": lab.run(subject, PLAIN), "replay": replayed(lab, subject, trace)}
    for where, run in runs.items():
        for name, value in run.report.items():
            number = isinstance(value, int | float) and math.isfinite(value)
            assert isinstance(name, str) and number, f"{where}: report() says {name!r}: {value!r}"  # noqa: PT018
