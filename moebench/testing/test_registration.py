"""What a system says of itself when it registers: hooks, options, fidelity, needs. Nothing runs but its constructor."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from moebench.commands.words import build
from moebench.errors import UsageError
from moebench.systemspec import FIDELITIES, Target
from moebench.testing.lab import Lab
from moebench.testing.subject import Subject
from moebench.testing.test_answers import PLAIN, one_line

TENSORS = ("torch", "transformers", "mlx", "jax", "tensorflow")


@pytest.mark.usefixtures("live")
def test_hooks_are_those_of_moebench(lab: Lab, subject: Subject) -> None:
    """Every method that has the name of a hook is marked ``@hookimpl`` and takes arguments that the hook gives.

    See ``docs/hooks.md``; an unmarked method is never called, and nothing would say so.
    """
    lab.start(subject, PLAIN)


def test_options_have_defaults_and_help(subject: Subject) -> None:
    """Every option is a plain value with a ``help`` text: it is all that ``moebench run system=ID --help`` can print,
    and it stands in every result file.
    """
    config = type(subject.knobs)
    bare = [field.name for field in dataclasses.fields(config) if not field.metadata.get("help")]
    assert not bare, f"no help for {', '.join(bare)}: field(default=..., metadata={{'help': ...}})"
    json.dumps(dataclasses.asdict(config()), allow_nan=False)


def test_an_unknown_option_is_refused(subject: Subject) -> None:
    """A typing error must not be a run with defaults."""
    with pytest.raises(UsageError) as caught:
        build(type(subject.knobs), {"no_such_option": "1"}, f"system {subject.name}")
    assert "no_such_option" in one_line(caught.value)


def test_fidelity_is_declared(subject: Subject) -> None:
    """``fidelity(config)`` is exact, advisory or altered: it stands in the table beside every number."""
    assert subject.fidelity in FIDELITIES, f"{subject.fidelity!r} is not one of {', '.join(FIDELITIES)}"


@pytest.fixture(scope="session")
def imported() -> Callable[[str], list[str]]:
    """Which tensor libraries are loaded in a new process once it has imported a module."""
    known: dict[str, list[str]] = {}

    def load(module: str) -> list[str]:
        if module not in known:
            code = f"import sys, {module}; print(*[name for name in {TENSORS!r} if name in sys.modules])"
            path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            out = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
            assert out.returncode == 0, f"import {module} fails by itself: {out.stderr.strip().splitlines()[-1:]}"
            known[module] = out.stdout.split()
        return known[module]

    return load


def test_importing_it_loads_no_tensor_library(subject: Subject, imported: Callable[[str], list[str]]) -> None:
    """Registering is cheap: ``moebench --help`` and ``list`` import every plugin. Import torch where it is used."""
    module = subject.spec.make.__module__
    assert not (found := imported(module)), f"import {module} loads {', '.join(found)}"


OTHERS = {
    "other weights": lambda target: dataclasses.replace(target, name="other", weights_hash="0" * 32),
    "another K": lambda target: changed(target, top_k=target.geometry.top_k - 1),
    "another shape": lambda target: changed(target, layers=target.geometry.layers + 1, weights_hash="0" * 32),
}


def changed(target: Target, weights_hash: str = "", **shape: Any) -> Target:
    """The target of a model that differs in its shape."""
    geometry = dataclasses.replace(target.geometry, **shape)
    return dataclasses.replace(target, geometry=geometry, weights_hash=weights_hash or target.weights_hash)


@pytest.mark.parametrize("other", OTHERS)
def test_files_for_another_model_are_refused(lab: Lab, subject: Subject, other: str) -> None:
    """Fitted files are keyed by the hash of the weights, the shape and K; others are refused in one line that says how
    to make them, never used. ``SystemSpec.equip`` is where, ``moebench.artefact`` reads headers.
    """
    target = lab.target()
    if not subject.spec.equip(subject.knobs, target).files:
        pytest.skip(f"{subject.name} brings no files to {target.name}")
    with pytest.raises(UsageError) as caught:
        subject.spec.equip(subject.knobs, OTHERS[other](target))
    one_line(caught.value)
