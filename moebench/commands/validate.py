"""``moebench validate``: the same cells measured here and modeled from the profile, and how far they differ."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from moebench import forecast, hardware, machine
from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError, unknown
from moebench.plugins import Registry, home, load_plugins

SCHEMA = 1


@dataclass(frozen=True)
class ValidateOptions:
    """Which cells are run, how often, and where what was found goes."""

    hw: str = option("host", "profile of this machine, written by 'moebench calibrate'")
    cells: tuple[str, ...] = option(
        ("live", "replay", "large"),
        "kinds of cells: live (tinymoe computes), replay (its routing, reads alone), large (reads of several GiB)",
    )
    systems: tuple[str, ...] = option(("all",), "systems by name, or all")
    budgets: tuple[str, ...] = option(("0.25", "0.5", "0.75"), "budgets of each system that has one")
    repeats: int = option(2, "times each cell is measured, in turn with the others")
    read_mb_s: float = option(
        0.0, "forecast for this machine with its reads limited so: run it by scripts/throttled.sh read_bps=..."
    )
    ram_gib: float = option(0.0, "forecast for this machine with less memory: by scripts/throttled.sh memory=...")
    trace: str = option("", "routing of the replay cells; empty takes the shipped model's")
    out: str = option("results/validation", "folder that rows and the document go to")

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"validate: repeats must be at least 1, got {self.repeats}")
        if self.read_mb_s < 0 or self.ram_gib < 0:
            raise UsageError("validate: read_mb_s and ram_gib must be at least 0, which takes the machine as it is")
        if not self.budgets or not self.cells or not self.systems:
            raise UsageError("validate: cells, systems and budgets need a name each at least")


def main(words: Sequence[str]) -> int:
    """Run, print, write; 1 where a bar is missed."""
    options = parse(words, ValidateOptions, "validate")
    if options is None:
        return 0
    from moebench.harness.derived import derive
    from moebench.harness.validate import Validation, kinds, pairs
    from moebench.report import validated
    from moebench.report.plain import show
    from moebench.validation import bars, plain

    registry, hw = load_plugins(), options.hw
    if options.read_mb_s or options.ram_gib:
        folder = writable_folder(home() / "hardware", "moebench's configuration folder")
        hw = derive(registry.hardware_path(hw), folder, options.read_mb_s, options.ram_gib)
        registry = load_plugins()
    known = kinds(options.trace)
    for name in options.cells:
        if name not in known:
            raise unknown("kind of cells", name, known)
    wanted = {name: known[name] for name in options.cells}
    out = writable_folder(options.out)
    profile = hardware.load(registry.hardware_path(hw))
    todo = pairs(hw, wanted, chosen(options, registry), options.budgets, registry, options.out)
    work = Validation(todo, options.repeats, registry)
    _run(work, out)
    cells = work.compared()
    judged = bars(cells)
    show(validated.tables(cells, judged), sys.stdout)
    for line in work.unfit():
        print(f"neither measured nor modeled: {line}")
    here, day = machine.detect(), datetime.datetime.now(datetime.UTC).date().isoformat()
    record = forecast.Record(hw, here.cpu, here.ram_gib, day, profile.digest, validated.band(cells))
    if record.errors:
        writable_folder(home(), "moebench's configuration folder")
        forecast.write(home() / forecast.FILE, record)
        print(record.band)
    document = {
        "schema": SCHEMA, "hw": hw, "profile": profile.digest, "date": day,
        "environment": machine.environment(), "repeats": options.repeats,
        "cells": [plain(cell) for cell in cells],
        "bars": [{**vars(bar), "misses": list(bar.misses), "met": bar.met} for bar in judged],
    }  # fmt: skip
    path = _write(document, out, f"{hw}-{day}")
    told = [{"name": bar.name, "value": bar.value, "limit": bar.limit, "met": bar.met} for bar in judged]
    short = {"schema": SCHEMA, "document": str(path), "cells": len(cells), "bars": told}
    print(json.dumps(short, separators=(",", ":"), allow_nan=False))
    return int(validated.failed(judged))


def chosen(options: ValidateOptions, registry: Registry) -> list[str]:
    """The systems that ``systems=`` asks for."""
    if options.systems == ("all",):
        return list(registry.systems)
    return [registry.system(name).id for name in dict.fromkeys(options.systems)]


def _run(work, out: Path) -> None:
    from moebench import result

    def progress(text: str) -> None:
        print(text, file=sys.stderr)

    with closing(work.run(progress)) as coming:
        for row in coming:
            result.write(row, out)


def _write(document: dict, out: Path, stem: str) -> Path:
    """Write the document under a name that no older one has."""
    text = json.dumps(document, sort_keys=True, indent=1, allow_nan=False)
    count = 0
    while True:
        path = out / f"validation-{stem}-{count}.json"
        try:
            with open(path, "x") as file:
                file.write(text + "\n")
            return path
        except FileExistsError:
            count += 1
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {os.strerror(error.errno or 0)}") from None
