"""The words of ``moebench run`` that give a row again, taken from its configuration; what is the default is left out.

A row holds what was resolved, so a value that the run would choose by itself is left out too.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from moebench import hardware
from moebench.api import written
from moebench.commands import compose
from moebench.config import QualityConfig, RunConfig, WorkloadConfig
from moebench.errors import MoebenchError
from moebench.harness.plan import EMBEDDED, WHOLE_PROMPT
from moebench.plugins import Registry
from moebench.result import Row

PLAIN = re.compile(r"[A-Za-z0-9_./+@-]+")  # what hydra and a shell read as it stands
NAMED = ("system", "hw", "model", "workload", "quality", "knobs")  # options with a way of their own


def command(row: Row, registry: Registry) -> str:
    """``moebench run system=...``; empty where a row has no configuration, as a published one."""
    return shlex.join(["moebench", "run", *words(row.config, registry)]) if row.config else ""


def words(config: Mapping[str, Any], registry: Registry) -> list[str]:
    """The overrides that differ from what a run does by itself; of a model folder a row knows the name alone."""
    knobs = dict(config["system"])
    name, hw, model = knobs.pop("id"), str(config["hw"]), str(config["model"])
    known = model == EMBEDDED or model in registry.models
    found = [f"system={name}", f"hw={hw}", _word("model", model if known else f"FOLDER/{model}")]
    found += _workload(config["workload"])
    own = _own(name, hw, registry)
    for entry in dataclasses.fields(RunConfig):
        key = entry.name
        if key in config and key not in NAMED and config[key] not in (entry.default, own.get(key, entry.default)):
            found.append(_word(key, config[key]))
    found += _quality(config["quality"])
    spec = registry.systems.get(name)
    defaults = {f.name: f.default for f in dataclasses.fields(spec.config)} if spec else {}
    for key, value in knobs.items():
        if key not in defaults or _list(value) != _list(defaults[key]):
            found.append(_word(f"system.{key}", value))
    return found


def _own(system: str, hw: str, registry: Registry) -> dict[str, Any]:
    """What the plan puts in the place of ``auto`` for this system on this machine."""
    if system not in registry.systems:
        return {}
    spec = registry.systems[system]
    found = {"scope": spec.scope, "chunk": WHOLE_PROMPT if spec.whole_prompt else 32}
    try:
        engine = spec.engine or hardware.load(registry.hardware_path(hw)).engine
    except MoebenchError:
        return found
    return {**found, "engine": engine}


def _workload(config: Mapping[str, Any]) -> list[str]:
    """The shipped workload that is nearest, and what differs from it."""
    known = {entry.name: entry.default for entry in dataclasses.fields(WorkloadConfig)}
    folder = resources.files(compose.CONFIGS).joinpath("workloads")
    found = []
    for name in compose.workloads():
        base = {**known, **yaml.safe_load(folder.joinpath(f"{name}.yaml").read_text())}
        chosen = [] if name == compose.defaults()["workload"] else [f"workload={name}"]
        found.append([*chosen, *_differ("workload", config, base)])
    return min(found, key=len)


def _quality(config: Mapping[str, Any] | str) -> list[str]:
    """``quality=SUITE`` and what differs besides."""
    plain = {"suite": config} if isinstance(config, str) else config
    default = dataclasses.asdict(QualityConfig())
    differ = _differ("quality", {key: value for key, value in plain.items() if key != "suite"}, default)
    return [*([] if plain["suite"] == default["suite"] else [_word("quality", plain["suite"])]), *differ]


def _differ(name: str, config: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    return [_word(f"{name}.{key}", value) for key, value in config.items() if value != base.get(key)]


def _list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _word(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) and _bare(value) else written(value)}"


def _bare(text: str) -> bool:
    """Whether a text without quotes is read back as itself, though hydra may take it for a number on the way."""
    if not PLAIN.fullmatch(text) or text.lower() in ("true", "false", "null"):
        return False
    for kind in (int, float):
        try:
            return str(kind(text)) == text
        except ValueError:
            continue
    return True
