"""Answers of the unmodified model, kept on disk: computed once for all systems, processes and runs that ask the same.

Knows arrays by name under a key; what they say is the business of ``moebench.quality.native``.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moebench.machine import detect
from moebench.plugins import home
from moebench.quality import native
from moebench.quality.native import Native
from moebench.quality.scores import digest
from moebench.quality.suites import Suite
from moebench.scratch import whole_file
from moebench.store.lock import alone

ANSWERING = ("backends", "engine", "quality")  # packages whose code decides what is answered
LIBRARIES = ("torch", "transformers", "lm-eval")


def answers(folder: Path, model: Mapping[str, Any], suite: Suite) -> Native:
    """What the model of ``folder`` answers to ``suite``; ``model`` says which it is: weights and configuration."""
    key = digest(dict(model), suite.key, _machine(), _code())[:32]
    return Native.of(reference_answers(key, lambda: native.answer(folder, suite).arrays()))


def reference_answers(key: str, compute: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays under ``key`` in ``$MOEBENCH_HOME/cache/reference``, computed where there are none.

    Two processes that want the same compute it once: the second one waits for the first. A damaged file is computed
    again, with a line on stderr.
    """
    folder = home() / "cache" / "reference"
    path = folder / f"{key}.npz"
    with alone(folder / f"{key}.lock"):
        if path.is_file() and (found := _read(path)) is not None:
            return found
        computed = {name: np.asarray(array) for name, array in compute().items()}
        _write(path, computed)
        return computed


def _read(path: Path) -> dict[str, np.ndarray] | None:
    content = path.read_bytes()
    head, body = content[:16], content[16:]
    if head != xxhash.xxh3_128(body).digest():
        print(f"moebench: warning: {path} is damaged; its answers are computed again", file=sys.stderr)
        return None
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return dict(arrays)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """The digest of what follows, then the arrays; the file appears whole or not at all."""
    body = io.BytesIO()
    np.savez(body, **arrays)  # type: ignore[arg-type]
    with whole_file(path) as file:
        file.write(xxhash.xxh3_128(body.getbuffer()).digest())
        file.write(body.getbuffer())


def _machine() -> list[str]:
    """What decides the last bit of a sum: the processor and the libraries."""
    found = [detect().cpu]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} none")
    return found


def _code() -> str:
    """A digest of the modules that answer, so that no other version's answers are taken for this one's."""
    found = hashlib.sha256()
    for package in ANSWERING:
        for entry in sorted(resources.files(f"moebench.{package}").iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith((".py", ".yaml")):
                found.update(entry.read_bytes())
    return found.hexdigest()
