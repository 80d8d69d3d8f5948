"""Fixtures of the suite."""

from __future__ import annotations

import pytest

from moebench.errors import UsageError
from moebench.systemspec import Target
from moebench.testing.lab import Lab
from moebench.testing.replays import record
from moebench.testing.subject import Subject
from moebench.trace.format import Trace


@pytest.fixture
def live(lab: Lab, subject: Subject) -> None:
    """Skips what needs a model that computes, where the configuration is for replays only."""
    try:
        lab.planned(subject)
    except UsageError as error:
        pytest.skip(f"{subject.name} refuses to run live: {error}")


@pytest.fixture(scope="session")
def trace(lab: Lab, subject: Subject) -> Trace:
    """Routing of the embedded model, recorded under the system: with its predictions and drafts, where it has any."""
    found = record(lab, subject)
    try:
        subject.spec.equip(subject.knobs, Target(lab.geometry.name, lab.geometry, trace=found))
    except UsageError as error:
        pytest.skip(f"{subject.name} refuses to replay: {error}")
    return found
