"""Whether a plugin's hooks are what ``hookspecs`` says, in one line that tells its author what to change.

pluggy ignores what is not marked, and words its refusals for hosts; here a name, an argument or a mark that is wrong is
an error. Knows no system and calls no hook.
"""

from __future__ import annotations

import inspect
from typing import Any

import pluggy

from moebench import hookspecs
from moebench.errors import PluginError, unknown

ARGUMENTS = {
    name: tuple(inspect.signature(value).parameters)
    for name, value in vars(hookspecs).items()
    if hasattr(value, "moebench_spec")
}
REGISTRY_HOOKS = ("register_systems", "register_hardware", "register_models", "register_io")


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows all hooks."""
    manager = pluggy.PluginManager("moebench")
    manager.add_hookspecs(hookspecs)
    return manager


def register(manager: pluggy.PluginManager, plugin: Any, name: str | None = None) -> set[str]:
    """Register a module or an object; returns the names of the hooks it implements. Raises ``PluginError``."""
    who = getattr(plugin, "__name__", type(plugin).__name__)
    if inspect.isclass(plugin):
        raise PluginError(f"{who} is a class; a plugin is a module, or an object of a class")
    found = {attribute: hook for attribute in dir(plugin) if (hook := _hook(plugin, who, attribute))}
    manager.register(plugin, name)
    return set(found.values())


def _hook(plugin: Any, who: str, attribute: str) -> str:
    """The hook that one attribute implements, checked; empty for none."""
    method = inspect.getattr_static(plugin, attribute)
    method = getattr(method, "__func__", method)
    options = inspect.getattr_static(method, "moebench_impl", None)
    where = f"{who}.{attribute}"
    if not inspect.isroutine(method):
        if options is not None:
            raise PluginError(f"{where} is marked @hookimpl and is no function")
        return ""
    hook = attribute if options is None else options["specname"] or attribute
    if options is None:  # what a module imports may have any name, and so may an object's own registry
        if hook in ARGUMENTS and inspect.ismodule(plugin) == (hook in REGISTRY_HOOKS) and not _extra(method, hook):
            raise PluginError(f"{where} has the name of a hook and no @hookimpl: mark it, or rename it")
        return ""
    if hook not in ARGUMENTS:
        raise PluginError(f"{where}: {unknown('hook', hook, ARGUMENTS)}")
    if extra := _extra(method, hook):
        gives = ", ".join(ARGUMENTS[hook]) or "no arguments"
        raise PluginError(f"{where} takes {', '.join(extra)}: the hook {hook} gives {gives}, and any may be left out")
    return hook


def _extra(method: Any, hook: str) -> list[str]:
    """Arguments that a function needs and the hook does not give."""
    asked = inspect.signature(method).parameters.values()
    needed = [p.name for p in asked if p.default is p.empty and p.name not in ("self", "cls")]
    return [name for name in needed if name not in ARGUMENTS[hook]]
