"""From the words of ``run`` and ``compare`` to checked run configurations, through hydra's grammar and Compose API.

Registers what the registry holds as hydra groups. A mistake is one line with the valid choices, found before anything
runs. Knows no system, machine or workload by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moebench.commands.words import build
from moebench.config import QualityConfig, RunConfig, WorkloadConfig
from moebench.errors import UsageError, unknown
from moebench.plugins import Registry

CONFIGS = "moebench.configs"
QUOTES = ("'", '"')
OPTIONS = tuple(f.name for f in dataclasses.fields(RunConfig) if f.name != "knobs")


def workloads() -> list[str]:
    """Workloads that ship with moebench."""
    return sorted(path.stem for path in Path(str(resources.files(CONFIGS))).glob("workloads/*.yaml"))


def defaults() -> dict[str, str]:
    """The groups chosen when nothing is said, from ``configs/run.yaml``."""
    listed = yaml.safe_load(resources.files(CONFIGS).joinpath("run.yaml").read_text())["defaults"]
    return {key: value for entry in listed if isinstance(entry, dict) for key, value in entry.items() if "/" not in key}


def register_groups(registry: Registry) -> None:
    """Offer systems, machines and workloads to hydra, each with all its options and their defaults."""
    store = ConfigStore.instance()
    plain = {
        f.name: f.default
        for f in dataclasses.fields(RunConfig)
        if f.default is not dataclasses.MISSING and f.name != "knobs"
    }
    plain["quality"] = dataclasses.asdict(QualityConfig())
    store.store(name="options", node=plain)
    for name, spec in registry.systems.items():
        store.store(group="system", name=name, node={"id": name, **_plain(spec.config())})
    for name in registry.hardware:
        store.store(group="hw", name=name, package="_global_", node={"hw": name})
    for name in workloads():
        path = resources.files(CONFIGS).joinpath(f"workloads/{name}.yaml")
        known = {f.name: f.default for f in dataclasses.fields(WorkloadConfig)}
        store.store(group="workload", name=name, node={**known, **yaml.safe_load(path.read_text())})


def spelled(words: Sequence[str], sweep: bool) -> list[str]:
    """``quality=NAME`` written out as ``quality.suite=NAME``. Its commas list tasks; in a sweep they part jobs, and a
    list of tasks stands in quotes.
    """

    def one(word: str) -> str:
        key, _, value = word.partition("=")
        if key not in ("quality", "quality.suite"):
            return word
        return f"quality.suite={value if sweep or value[:1] in QUOTES else repr(value)}"

    return [one(word) for word in words]


def jobs(words: Sequence[str], registry: Registry, sweep: bool) -> list[list[str]]:
    """The override lists of all jobs that ``words`` ask for: one, or the product of the swept values."""
    words = spelled(words, sweep)
    try:
        overrides = OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        bare = [word for word in words if "=" not in word]
        reason = (
            f"{bare[0]!r} is not KEY=VALUE; valid keys: {', '.join(OPTIONS)}" if bare else str(error).split("\n")[0]
        )
        raise UsageError(reason) from None
    for override in overrides:
        _check(override, registry, sweep)
    if not sweep:
        return [list(words)]
    return [list(job) for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]


def resolve(overrides: Sequence[str], registry: Registry) -> RunConfig:
    """Compose one job and check it whole."""
    _check_knobs(overrides, registry)
    try:
        with initialize_config_module(CONFIGS, version_base="1.3"):
            return from_hydra(compose("run", overrides=list(overrides)), registry)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(str(error).split("\n")[0]) from None


def from_hydra(config: DictConfig, registry: Registry) -> RunConfig:
    """The typed configuration of what hydra composed."""
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return typed(plain, registry)


def typed(config: Mapping[str, Any], registry: Registry) -> RunConfig:
    """The configuration of plain data, as hydra composes it and as a row holds it."""
    plain = dict(config)
    knobs = dict(plain.pop("system"))
    spec = registry.system(knobs.pop("id"))
    nested = {
        "system": spec.id,
        "knobs": build(spec.config, knobs, f"system {spec.id}"),
        "workload": build(WorkloadConfig, plain.pop("workload"), "workload"),
        "quality": build(QualityConfig, plain.pop("quality"), "quality"),
    }
    return build(RunConfig, {**plain, **nested}, "run")


def _check(override: Override, registry: Registry, sweep: bool) -> None:
    """Refuse a key that does not exist, a name that is not registered, and a list of values without ``-m``."""
    key = override.key_or_group
    head, _, tail = key.partition(".")
    if (head == "hydra" or head.startswith("hydra/")) and not override.is_delete():
        return
    if override.is_add() or override.is_delete() or override.is_force_add():
        raise UsageError(
            f"{override.input_line}: options can be set, not added or removed; valid: {', '.join(OPTIONS)}"
        )
    if head not in OPTIONS:
        raise unknown("option", head, OPTIONS)
    if override.is_sweep_override() and not sweep:
        raise UsageError(f"{override.input_line} gives several values; add -m to run each of them")
    nested = {"workload": WorkloadConfig, "quality": QualityConfig}
    known = [f.name for f in dataclasses.fields(nested[head])] if head in nested else []
    if tail and head != "system" and tail not in known:
        raise unknown(f"option of {head}", tail, known)
    if tail == "id":
        raise UsageError("system.id is not an option; choose with system=NAME")
    groups = {"system": registry.system, "hw": registry.hardware_path, "workload": _workload}
    if head in groups and not tail:
        for value in _values(override):
            groups[head](value)


def _values(override: Override) -> Iterator[str]:
    if override.is_sweep_override():
        yield from (str(value) for value in override.sweep_string_iterator())
    else:
        yield str(override.value())


def _workload(name: str) -> None:
    if name not in workloads():
        raise unknown("workload", name, workloads(), "; a recorded one is workload=trace workload.path=FOLDER")


def _check_knobs(overrides: Sequence[str], registry: Registry) -> None:
    """Refuse an option that the chosen system does not have."""
    given = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(list(overrides))}
    spec = registry.system(str(given.get("system", defaults()["system"])))
    knobs = [f.name for f in dataclasses.fields(spec.config)]
    for key in given:
        if key.startswith("system.") and key.removeprefix("system.") not in knobs:
            raise unknown(f"option of system {spec.id}", key.removeprefix("system."), knobs)


def _plain(config: Any) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(config).items()
    }
