"""``moebench prepare system=ID model=MODEL``: fit or import what a system brings to a model.

Knows no system: what can be set beside its own words is what the system's ``Preparation`` declares.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebench.checkpoint.hub import find_model, model_name
from moebench.commands.places import writable_folder
from moebench.commands.words import describe, parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.plugins import Registry, home, load_plugins
from moebench.progress import progress_bar
from moebench.systemspec import Preparation
from moebench.units import human_bytes


@dataclass(frozen=True)
class PrepareWords:
    """What is prepared for which model."""

    system: str = dataclasses.field(metadata={"help": "system whose artefact is made; its own options follow"})
    model: str = option(
        "tinymoe", "tinymoe, a folder or org/name, or a geometry where the system learns from routing alone"
    )
    out: str = option("", "folder that gets the artefact's own folder; empty: artefacts/SYSTEM in moebench's folder")
    import_: str = option("", "folder of files that others published, converted instead of fitted")


def main(words: Sequence[str]) -> int:
    """Fit with a progress bar on stderr, or convert; the last line is one JSON document."""
    # "import" is what a user would say, and no name that Python allows
    own = {"import" if f.name == "import_" else f.name: f.name for f in dataclasses.fields(PrepareWords)}
    first, rest, wants_help = [], [], False
    for word in words:
        key, equals, value = word.partition("=")
        wants_help |= word in ("-h", "--help")
        if equals and key in own:
            first.append(f"{own[key]}={value}")
        elif word not in ("-h", "--help"):
            rest.append(word)
    registry = load_plugins()
    if wants_help:
        print(_help(first, registry), end="")
        return 0
    chosen = parse(first, PrepareWords, "prepare")
    assert chosen is not None  # help is answered above
    how = _preparation(chosen.system, registry)
    options = parse(rest, how.options, f"prepare system={chosen.system}")
    source = Path(chosen.import_).expanduser() if chosen.import_ else None
    if source is not None and how.convert is None:
        raise UsageError(f"system {chosen.system} imports nothing")
    if source is not None and not source.is_dir():
        raise UsageError(f"import={chosen.import_} is not a folder")
    name, folder = _model(chosen.model, how, registry)
    out = writable_folder(chosen.out or home() / "artefacts" / chosen.system)
    if source is not None and how.convert is not None:
        made = how.convert(options, source, folder, name, out)
    else:
        with _threads(options), progress_bar() as bar:
            task = bar.add_task("starting", total=None)
            made = how.fit(
                options, folder, name, out,
                lambda text, done, total: bar.update(task, description=text, completed=done, total=total),
            )  # fmt: skip
    nbytes = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
    print(f"{made}: {human_bytes(nbytes)} for system={chosen.system} model={name}")
    document = {"artefact": str(made), "system": chosen.system, "model": name, "bytes": nbytes}
    print(json.dumps(document, separators=(",", ":")))
    return 0


def _threads(options: Any) -> AbstractContextManager[None]:
    """As many threads of torch as a system's own option says, for as long as it fits."""
    if not hasattr(options, "threads"):
        return nullcontext()
    from moebench.backends.torch_threads import torch_threads

    return torch_threads(options.threads)


def _preparation(system: str, registry: Registry) -> Preparation:
    """How a system is prepared; one without is told apart from one that does not exist."""
    how = registry.system(system).prepare
    if how is None:
        able = sorted(name for name, spec in registry.systems.items() if spec.prepare is not None)
        raise UsageError(f"system {system} needs no preparation; those that have one: {', '.join(able) or 'none'}")
    return how


def _model(model: str, how: Preparation, registry: Registry) -> tuple[str, Path]:
    """Name and folder of a model that computes, or name and file of a geometry where the system takes one."""
    from moebench.harness.plan import EMBEDDED, embedded_folder

    if model == EMBEDDED:
        return EMBEDDED, embedded_folder()
    if how.geometries and model in registry.models:
        return model, registry.model_path(model)
    folder = find_model(model)
    return model_name(folder).replace("/", "--"), folder  # a name that files can have


def _help(first: Sequence[str], registry: Registry) -> str:
    """The command's words, and the system's own where one is named."""
    text = describe(PrepareWords, "prepare").replace("import_=", "import=")
    systems = [word.partition("=")[2] for word in first if word.startswith("system=")]
    if systems:
        described = describe(_preparation(systems[0], registry).options, "prepare")
        return f"{text}\noptions of {systems[0]}:\n" + described.split("\n", 2)[2]
    able = sorted(name for name, spec in registry.systems.items() if spec.prepare is not None)
    return text + f"\nsystem=ID --help adds the options of ID, one of {', '.join(able) or 'none'}\n"
