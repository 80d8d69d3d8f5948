"""``moebench ladder``: where a system's loss comes from, one change at a time, and what its repairs pay back."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moebench import result
from moebench.commands import compose
from moebench.commands.command_line import command
from moebench.commands.places import writable_folder
from moebench.commands.run import run_cell
from moebench.commands.words import describe, parse
from moebench.config import RunConfig, option
from moebench.errors import UsageError
from moebench.plugins import load_plugins

QUALITY = "quality=local"  # what is run where nothing is said: the quick suite is too short for steps


@dataclass(frozen=True)
class LadderOptions:
    """How the ladder is written; every other word is an option of ``moebench run`` and holds for all rungs."""

    format: Literal["text", "csv", "markdown"] = option("text", "tables for people, one table as CSV, or Markdown")


def main(words: Sequence[str]) -> int:
    """Run every rung, write each as a result file and print the ladder; 1 when a rung failed."""
    from moebench.harness.ladder import rungs_of
    from moebench.report import ladder, plain

    if any(word in ("-h", "--help") for word in words):
        defaults = {**compose.defaults(), "quality": "local"}
        print(describe(LadderOptions, "ladder") + describe(RunConfig, "run", defaults=defaults), end="")
        return 0
    own = [word for word in words if word.partition("=")[0] == "format"]
    options = parse(own, LadderOptions, "ladder")
    assert options is not None  # help was handled above
    registry = load_plugins()
    compose.register_groups(registry)
    rest = [word for word in words if word not in own]
    if not any(word.partition("=")[0] in ("quality", "quality.suite") for word in rest):
        rest.append(QUALITY)
    (job,) = compose.jobs(rest, registry, sweep=False)
    config = compose.resolve(job, registry)
    if config.quality.suite == "none":
        raise UsageError("a ladder compares answers: quality=none leaves it none; choose quality=quick or local")
    writable_folder(config.out)
    climbed = []
    rungs = rungs_of(config, registry)
    for number, rung in enumerate(rungs, 1):
        print(f"{rung.name} ({number} of {len(rungs)})", file=sys.stderr)
        strict = number == 1  # what is wrong for all rungs stops the ladder; what only one cannot do is a failed rung
        row = next(row for row in run_cell(rung.config, strict) if row.workload["kind"] != "published")
        climbed.append(ladder.Climbed(rung.name, rung.change, rung.after, rung.repairs, row, command(row, registry)))
    found = ladder.Ladder(climbed)
    title = f"{config.system} on {climbed[0].row.model}, {config.hw}: scores, 0 to 100"
    plain.print_as(options.format, ladder.tables(found, title), ladder.sheet(found), sys.stdout)
    if options.format == "text":
        document = json.loads(result.stdout_document([rung.row for rung in climbed]))
        print(json.dumps({**document, "ladder": ladder.data(found)}, sort_keys=True, separators=(",", ":")))
    return int(any(rung.row.status == "failed" for rung in climbed))
