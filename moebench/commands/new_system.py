"""``moebench new-system NAME``: writes a plugin package that installs, runs and passes its tests, to be made one's own.

The package is a copy of ``moebench/system-template`` under another name. Writes all of it or nothing; uses no network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from moebench.commands.places import writable_folder
from moebench.commands.words import describe, parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.plugins import RESERVED, Registry, load_plugins
from moebench.scratch import beside, own_folder

FILES = ("pyproject.toml", "README.md", "moebench_mysystem/__init__.py", "tests/test_mysystem.py")
USAGE = "usage: moebench new-system NAME [out=FOLDER]\n\n"


@dataclass(frozen=True)
class NewSystemOptions:
    """Where the package goes."""

    out: str = option("", "folder of the package, new or empty; empty: NAME, in the current folder")


def main(words: Sequence[str]) -> int:
    """Write the package, say what to do next, and print one JSON document."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE + describe(NewSystemOptions, "new-system").split("\n\n", 1)[1], end="")
        return 0
    names = [word for word in words if "=" not in word]
    if len(names) != 1:
        raise UsageError(f"new-system takes one NAME, got {len(names)}: moebench new-system NAME [out=FOLDER]")
    options = parse([word for word in words if "=" in word], NewSystemOptions, "new-system")
    assert options is not None  # help was handled above
    require_free(name := names[0], load_plugins())
    folder = write_package(name, Path(options.out or name).expanduser())
    print(f"{folder}: a package with one system, {name}. Its README.md says what it does. Next:")
    print(f"  pip install -e {folder}     without network: pip install --no-build-isolation -e {folder}")
    print(f"  moebench compare systems={name} hw=m4pro quality=none")
    print(f"  python -m pytest {folder}")
    document = {"system": name, "folder": str(folder), "files": sorted(map(_rename(name), FILES))}
    print(json.dumps(document, separators=(",", ":")))
    return 0


def require_free(name: str, registry: Registry) -> None:
    """Refuse a name that no system can have, or that is taken."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise UsageError(f"name {name!r}: a system's name is lower-case letters, digits and single underscores")
    if name in RESERVED:
        raise UsageError(f"name {name!r} means something else on the command line; choose another")
    if name in registry.systems:
        raise UsageError(f"a system {name} is registered already, by {registry.origin[f'systems/{name}']}")
    if importlib.util.find_spec(package := f"moebench_{name}") is not None:
        raise UsageError(f"a package {package} is installed already; choose another name")


def write_package(name: str, folder: Path) -> Path:
    """Write the package as ``folder``, which is new or empty, in one move; returns it."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists already and is not an empty folder; nothing was written")
    writable_folder(folder.parent, f"out={folder}: folder")
    template, rename = Path(str(resources.files("moebench"))) / "system-template", _rename(name)
    try:
        with own_folder(beside(folder)) as whole:
            for file in FILES:
                target = whole / rename(file)
                target.parent.mkdir(exist_ok=True)
                target.write_text(rename((template / file).read_text()))
            os.replace(whole, folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from None
    return folder


def _rename(name: str):  # type: ignore[no-untyped-def]
    """The template's words under another name: ``mysystem`` in files and code, ``MySystem`` as a title."""
    title = " ".join(part.capitalize() for part in name.split("_"))
    return lambda text: text.replace("mysystem", name).replace("MySystem", title)
