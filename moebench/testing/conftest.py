"""Fixtures of the suite."""

from __future__ import annotations

import pytest

from moebench.testing.lab import Lab
from moebench.testing.replays import record
from moebench.testing.subject import Subject
from moebench.trace.format import Trace


@pytest.fixture(scope="session")
def trace(lab: Lab, subject: Subject) -> Trace:
    """Routing of the embedded model, recorded under the system: with its predictions and drafts, where it has any."""
    return record(lab, subject)
