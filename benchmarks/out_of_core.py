"""The race: a model that does not fit, decoded by moebench, llama.cpp and accelerate under one memory limit.

    python benchmarks/out_of_core.py folder=DIR [minutes=N] [KEY=VALUE ...]
    python benchmarks/out_of_core.py --help

Everything is made in DIR: random weights of half a Qwen3-30B-A3B in 4 bits, 8.1 GiB, in two layouts and as GGUF, with
routers that use all experts alike or by a law of ranks; the same weights in every arm. Each arm decodes the same random
tokens in a process held to the limit by a control group, page cache included, after the machine's page cache was
emptied. Arms take turns within a round, with fio at an expert's size before and after each; ratios are taken within a
round. A race that stops, or whose ``minutes`` are over, goes on where it was when the same command is given again.
Linux, as root, with fio; the last line is one JSON document.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from race import figures, rounds
from race import machine as here

from moebench import machine
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import MoebenchError, UsageError


@dataclasses.dataclass(frozen=True)
class Options(rounds.Race):
    """A race, and how much of it is run now."""

    minutes: float = option(0.0, "begin no step after so many minutes; 0 runs all")
    out: str = option("", "file for the records and the table's numbers, JSON")

    def settings(self) -> dict[str, Any]:
        """Without what says how much is run now."""
        return {key: value for key, value in super().settings().items() if key not in ("minutes", "out")}


def say(text: str) -> None:
    """Progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def prepare(race: rounds.Race) -> None:
    """Files of all arms, and a profile of this machine, where they are not there."""
    race.files.prepare("llama.cpp" in race.arms, say)
    if "accelerate" in race.arms and not (race.files.offload / "config.json").is_file():
        say("the model that accelerate streams")
        task = json.dumps({"folder": str(race.files.offload), "layers": race.accelerate_layers})
        command = [race.accelerate_python, str(rounds.HERE / "accelerate_arm.py"), "write", task]
        if "error" in (found := here.child(command, None, {})):
            raise UsageError(f"accelerate's model cannot be written: {found['error']}")
    if not (race.home / "hardware" / "host.yaml").is_file():
        say("calibrating")
        words = ["calibrate", "seconds=5", f"dir={race.folder}"]
        environment = {**os.environ, "MOEBENCH_HOME": str(race.home)}
        done = subprocess.run(
            [sys.executable, "-m", "moebench.cli", *words], stdout=subprocess.DEVNULL, env=environment, check=False
        )
        if done.returncode:
            raise UsageError("this machine could not be calibrated")


def document(race: rounds.Race, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings, machine, records and bars."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine.environment(),
        "readahead_kib": here.readahead_kib(race.files.folder),
        "settings": race.settings(),
        "bars": figures.judged(records),
        "records": records,
    }


def main(words: Sequence[str]) -> int:
    """Go on with the race; print the table of what there is. 1 where a bar is missed, 2 where there can be no race."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        race = parse(words, Options, "(benchmarks/out_of_core.py)")
        if race is None:
            return 0
        if reason := here.refusal():
            raise UsageError(reason)
        started = time.monotonic()
        prepare(race)
        log = rounds.Log(race)
        todo = list(rounds.left(race, log.records))
        for number, step in enumerate(todo):
            if race.minutes and time.monotonic() - started > 60 * race.minutes:
                say(f"{len(todo) - number} of {len(todo)} steps are left; the same command goes on")
                break
            log.add(rounds.run(race, step, say))
    except MoebenchError as error:
        print(f"out_of_core: {error}", file=sys.stderr)
        return 2
    records = figures.with_disk(log.records)
    found = document(race, records)
    print(figures.table(records))
    if race.out:
        Path(race.out).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in ("date", "machine", "bars")}, separators=(",", ":")))
    return int(any(bar["holds"] is False for bar in found["bars"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
