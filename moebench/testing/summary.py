"""What the suite says at its end, which no test decides by: what hooks cost, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module, resources
from typing import Any

from moebench.testing.subject import Subject


def overhead(lab: Any, subject: Subject) -> Iterator[str]:
    """Calls and microseconds per token of each hook of one system, on the live model."""
    yield from ()


def advice(subject: Subject) -> Iterator[str]:
    """What a reader of the table will miss."""
    spec = subject.spec
    if not spec.summary:
        yield f"{subject.name}: no summary, which 'moebench list' shows"
    if not spec.paper and spec.needs:
        yield f"{subject.name}: no paper or other source named"
    package = import_module(spec.make.__module__).__package__
    if package and not any(item.name.lower().startswith("readme") for item in resources.files(package).iterdir()):
        yield f"{subject.name}: no README beside {package}"
