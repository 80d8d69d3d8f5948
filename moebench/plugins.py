"""The registry: everything that can be named on the command line, filled through the registry hooks alone.

The systems that ship with moebench register through the same hooks as a package that someone else installed. A plugin
that cannot be loaded costs one warning line and leaves nothing behind. Knows no system by its id.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pluggy

from moebench.config import RunConfig
from moebench.errors import PluginError, UsageError, unknown
from moebench.hookcheck import REGISTRY_HOOKS, new_manager, register
from moebench.systemspec import SystemSpec

BUILTIN = (
    "moebench.hardware_profiles",
    "moebench.models",
    "moebench.systems.resident",
    "moebench.systems.ondemand",
    "moebench.systems.mmap",
    "moebench.systems.cached",
    "moebench.systems.edge0",
    "moebench.systems.flashmoe",
    "moebench.systems.moe_infinity",
    "moebench.systems.specprefetch",
    "moebench.systems.ssd_llama",
    "moebench.systems.bigmomo",
    "moebench.store.builtin",
)
WARNED: set[str] = set()  # lines that were printed; with an empty one, none is
RESERVED = ("all", "hydra", "systems", "baselines", "workers", *(option.name for option in fields(RunConfig)))


def home() -> Path:
    """The user's own folder: ``$MOEBENCH_HOME``, else ``$XDG_CONFIG_HOME/moebench``, else ``~/.config/moebench``."""
    if own := os.environ.get("MOEBENCH_HOME"):
        return Path(own)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "moebench"


@dataclass
class Registry:
    """Systems, hardware profiles, model geometries and read engines by name, with the package each came from."""

    systems: dict[str, SystemSpec] = field(default_factory=dict)
    hardware: dict[str, Path] = field(default_factory=dict)
    models: dict[str, Path] = field(default_factory=dict)
    engines: dict[str, Callable[..., Any]] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)  # "systems/lru" -> distribution

    def system(self, name: str) -> SystemSpec:
        """The spec of a registered system; an unknown name lists the valid ones."""
        if name not in self.systems:
            raise unknown("system", name, self.systems)
        return self.systems[name]

    def role(self, name: str) -> str:
        """What a system is to a comparison: its floor, a baseline, a system, the oracle or the ceiling. What ships with
        moebench without a paper is a baseline.
        """
        spec = self.system(name)
        if spec.oracle:
            return "oracle"
        if spec.baseline:
            return {"full": "ceiling", "minimal": "floor"}.get(spec.sizing, "baseline")
        return "system" if spec.paper or self.origin[f"systems/{name}"] != "moebench" else "baseline"

    def hardware_path(self, name: str) -> Path:
        """The YAML file of a hardware profile; an unknown name says where a user's own profile goes."""
        if name == "host" and name not in self.hardware:
            raise UsageError(
                "hw=host is this machine, which was not measured yet: run 'moebench calibrate' first (minutes)"
            )
        if name not in self.hardware:
            raise unknown("hardware", name, self.hardware, f"; your own go to {home() / 'hardware'}/NAME.yaml")
        return self.hardware[name]

    def model_path(self, name: str) -> Path:
        """The YAML file of a model geometry."""
        if name not in self.models:
            raise unknown("model geometry", name, self.models)
        return self.models[name]

    def engine(self, name: str) -> Callable[..., Any]:
        """The factory of a read engine."""
        if name not in self.engines:
            raise unknown("engine", name, self.engines)
        return self.engines[name]

    def add(self, kind: str, name: str, value: Any, origin: str) -> None:
        """Register one thing; a name that is taken is an error naming both owners."""
        table = getattr(self, kind)
        if name in table:
            raise UsageError(f"{kind} {name!r} of {origin} is already registered by {self.origin[f'{kind}/{name}']}")
        table[name] = value
        self.origin[f"{kind}/{name}"] = origin

    def drop(self, origin: str) -> None:
        """Forget everything that one plugin registered."""
        for label in [label for label, owner in self.origin.items() if owner == origin]:
            kind, name = label.split("/", 1)
            del getattr(self, kind)[name], self.origin[label]


def load_plugins(quiet: bool = False) -> Registry:
    """Fill a registry: what ships with moebench, the user's own hardware profiles, then installed plugins.

    ``MOEBENCH_PLUGINS`` names the entry points to load (comma separated; empty for none); unset loads all. What cannot
    be loaded is said once in a process; ``quiet`` is for one whose parent has said it.
    """
    if quiet:
        WARNED.add("")
    registry, manager = Registry(), new_manager()
    for name in BUILTIN:
        _register(registry, manager, importlib.import_module(name), "moebench")
    for path in sorted((home() / "hardware").glob("*.yaml")):
        try:
            registry.add("hardware", path.stem, path, str(path))
        except UsageError as error:
            _warn(str(error))
    for entry in _entry_points():
        origin = f"{entry.name} ({entry.dist.name} {entry.dist.version})" if entry.dist else entry.name
        try:
            _register(registry, manager, entry.load(), origin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module that exits, or a compiled one that panics, stops nobody else
            registry.drop(origin)
            reason = " ".join(str(error).split()) or "no reason given"
            what = "" if isinstance(error, PluginError | UsageError) else f"{type(error).__name__}: "
            _warn(f"plugin {origin} not loaded: {what}{reason}")
    return registry


def _warn(line: str) -> None:
    if not WARNED & {line, ""}:
        print(f"moebench: warning: {line}", file=sys.stderr)
    WARNED.add(line)


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    found = sorted(importlib.metadata.entry_points(group="moebench"), key=lambda entry: entry.name)
    wanted = os.environ.get("MOEBENCH_PLUGINS")
    if wanted is None:
        return found
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in {entry.name for entry in found}:
            _warn(
                f"MOEBENCH_PLUGINS names {name!r}, which is not installed;"
                f" installed: {', '.join(e.name for e in found) or 'none'}"
            )
    return [entry for entry in found if entry.name in names]


def _register(registry: Registry, manager: pluggy.PluginManager, plugin: Any, origin: str) -> None:
    """Check one plugin's hooks against the specifications and let it register what it has."""
    others = manager.get_plugins()
    hooks = register(manager, plugin, origin if origin != "moebench" else None)
    try:
        if not hooks & set(REGISTRY_HOOKS):
            raise PluginError(f"it registers nothing; mark a function {', '.join(REGISTRY_HOOKS)} with @hookimpl")
        for hook in REGISTRY_HOOKS:
            manager.subset_hook_caller(hook, others)(register=_registrar(registry, hook, origin))
    except BaseException:
        manager.unregister(plugin)
        raise


def _registrar(registry: Registry, hook: str, origin: str) -> Callable[..., None]:
    kind = {"register_systems": "systems", "register_hardware": "hardware", "register_models": "models"}.get(hook)

    def register_system(spec: SystemSpec) -> None:
        if not isinstance(spec, SystemSpec):
            raise UsageError(f"register_systems takes a SystemSpec, got {type(spec).__name__}")
        if spec.id in RESERVED:
            raise UsageError(f"a system cannot be called {spec.id}: on the command line the word means something else")
        registry.add("systems", spec.id, spec, origin)

    def register_path(path: str | Path) -> None:
        if not Path(path).is_file() or Path(path).suffix != ".yaml":
            raise UsageError(f"{hook} takes the path of a .yaml file, got {path}")
        registry.add(str(kind), Path(path).stem, Path(path), origin)

    def register_engine(name: str, factory: Callable[..., Any]) -> None:
        if not callable(factory):
            raise UsageError(f"register_io takes a name and a factory, got {type(factory).__name__} for {name}")
        registry.add("engines", name, factory, origin)

    if hook == "register_systems":
        return register_system
    return register_engine if hook == "register_io" else register_path
