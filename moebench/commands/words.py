"""The words of the command line, ``key=value``, turned into a frozen dataclass by its type hints.

One grammar for every command. Knows no command: what may be set is what the dataclass declares.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

from moebench.errors import UsageError

T = TypeVar("T")
FLAGS = ("help", "verbose", "version", "multirun", "cfg", "info")  # words with two dashes that set no option


def respell(words: Sequence[str]) -> list[str]:
    """``--name value`` and ``--name=value`` as ``name=value``; flags and a name without a value stay as they are."""
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name and name not in FLAGS and (equals or _is_value(rest)):
            word = f"{name.replace('-', '_')}={value if equals else rest.pop(0)}"
        found.append(word)
    return found


def _is_value(rest: Sequence[str]) -> bool:
    return bool(rest) and "=" not in rest[0] and (not rest[0].startswith("-") or rest[0][1:2].isdigit())


def parse(words: Sequence[str], cls: type[T], command: str) -> T | None:
    """Build ``cls`` from ``key=value`` words; None after printing help. ``debug`` is the dispatcher's."""
    if any(word in ("-h", "--help") for word in words):
        print(describe(cls, command), end="")
        return None
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} is not KEY=VALUE; valid keys: {', '.join(_names(cls))}")
        if key in values:
            raise UsageError(f"{key} is given twice")
        if key != "debug":
            values[key] = value
    return build(cls, values, command)


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a mapping, converting texts by type hint; unknown keys list the valid ones."""
    hints, names = typing.get_type_hints(cls), _names(cls)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"{where} has no option {key!r}{hint}; valid: {', '.join(names) or 'none'}")
    needed = [f.name for f in _fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in values]:
        raise UsageError(f"{where} needs {', '.join(name + '=...' for name in missing)}")
    converted = {key: convert(value, hints[key], f"{where}: {key}") for key, value in values.items()}
    try:
        return cls(**converted)
    except UsageError:
        raise
    except ValueError as error:  # classes of the library check their fields too
        raise UsageError(str(error)) from None


def convert(value: Any, hint: Any, where: str) -> Any:
    """One value as its type hint demands: str, int, float, bool, Literal, X | None, tuple[X, ...] (comma separated)."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
        return convert(value, hint, where)
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise UsageError(f"{where}={value} is not one of {', '.join(map(str, typing.get_args(hint)))}")
        return value
    if origin is tuple:
        parts = [part for part in value.split(",") if part] if isinstance(value, str) else value
        return tuple(convert(part, typing.get_args(hint)[0], where) for part in parts)
    if hint is bool:
        if str(value).lower() not in ("true", "false"):
            raise UsageError(f"{where}={value} is not one of true, false")
        return str(value).lower() == "true"
    if dataclasses.is_dataclass(hint) or hint is Any:
        return value
    lossy = isinstance(value, bool) or (hint is int and isinstance(value, float))
    try:
        if (lossy and hint is not str) or isinstance(value, list | dict):
            raise ValueError
        return hint(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where}={value} is not {_type_name(hint)}") from None


def describe(
    cls: type,
    command: str,
    prefix: str = "",
    defaults: Mapping[str, str] = types.MappingProxyType({}),
    without: Collection[str] = (),
) -> str:
    """Help for a dataclass: each field but those named ``without``, with its type or choices, its use and default.

    A usage line stands first; with a ``prefix``, or without a ``command``, it is part of another one's help.
    """
    lines = [f"usage: moebench {command} KEY=VALUE ...", ""] if command and not prefix else []
    hints = typing.get_type_hints(cls)
    for entry in [entry for entry in _fields(cls) if entry.name not in without]:
        if dataclasses.is_dataclass(hints[entry.name]):
            lines.append(describe(hints[entry.name], command, f"{prefix}{entry.name}.").rstrip())
            continue
        if hints[entry.name] is Any:
            continue
        default = defaults.get(entry.name) or _default(entry)
        text = entry.metadata.get("help", "")
        lines.append(f"  {prefix}{entry.name}={_type_name(hints[entry.name])}\n      {text} [{default}]")
    return "\n".join(lines) + "\n"


def _fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(entry for entry in dataclasses.fields(cls) if entry.init)


def _names(cls: Any) -> list[str]:
    return [entry.name for entry in _fields(cls)]


def _default(entry: dataclasses.Field[Any]) -> str:
    if entry.default is entry.default_factory is dataclasses.MISSING:
        return "required"
    value = entry.default if entry.default is not dataclasses.MISSING else entry.default_factory()  # type: ignore[misc,operator]
    return str(value).lower() if isinstance(value, bool) else str(value) if value not in ("", ()) else "empty"


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return "|".join("none" if part is type(None) else _type_name(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"{_type_name(typing.get_args(hint)[0])},..."
    return {int: "a whole number", float: "a number", str: "text", bool: "true|false"}.get(hint, str(hint))
