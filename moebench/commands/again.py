"""The command that runs a configuration again: only the words that differ from the defaults."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any

from moebench.api import written
from moebench.config import RunConfig, WorkloadConfig

ALWAYS = ("system", "hw")
PLAIN = re.compile(r"[\w./:+-]+")  # what hydra and a shell both read as it stands


def command(config: RunConfig) -> str:
    """``moebench run ...`` for one configuration; ``out`` and ``debug`` change no row and are left out."""
    found = [f"{name}={getattr(config, name)}" for name in ALWAYS]
    for name, value, default in _fields(config, RunConfig(config.system, config.hw, type(config.knobs)())):
        if name in (*ALWAYS, "out", "debug") or name.startswith("workload.") or value == default:
            continue
        found.append(_word(re.sub(r"^knobs\.", "system.", name).replace("quality.suite", "quality"), value))
    kind = config.workload.kind
    own = WorkloadConfig(kind, name=kind, path=config.workload.path)
    found += [f"workload={kind}"] * (kind != "synthetic")
    for name, value, default in _fields(config.workload, own):
        if value != default or (name == "path" and value):
            found.append(_word(f"workload.{name}", value))
    return " ".join(["moebench run", *found])


def _fields(config: Any, default: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, value, default) of all options."""
    found = []
    for entry in dataclasses.fields(config):
        value, other = getattr(config, entry.name), getattr(default, entry.name)
        if dataclasses.is_dataclass(value):
            found += _fields(value, other, f"{prefix}{entry.name}.")
        else:
            found.append((prefix + entry.name, value, other))
    return found


def _word(name: str, value: Any) -> str:
    text = value if isinstance(value, str) and PLAIN.fullmatch(value) else written(value)
    return shlex.quote(f"{name}={text}") if not PLAIN.fullmatch(text) else f"{name}={text}"
