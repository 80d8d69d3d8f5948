"""``moebench compare systems=a,b``: the same cells for several systems, beside baselines and oracles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from moebench import result
from moebench.commands import compose
from moebench.commands.places import writable_folder
from moebench.commands.words import describe, parse
from moebench.config import RunConfig, option
from moebench.errors import UsageError, unknown
from moebench.forecast import told
from moebench.harness.plan import plan as cells
from moebench.machine import detect
from moebench.plugins import Registry, home, load_plugins
from moebench.result import Row

INTERRUPTED = 130  # as a shell says it of a command that Ctrl-C ended


@dataclass(frozen=True)
class CompareOptions:
    """Which systems stand in the table; every other word is an option of ``moebench run``."""

    systems: tuple[str, ...] = option(
        (), "systems to compare, or all; a system's own options are written ID.NAME=VALUE"
    )
    baselines: bool = option(True, "add the floor, the baselines, the oracle and the ceiling")
    workers: int = option(
        0, "modeled cells that run at the same time; 0: as many as processors and memory allow. Measured ones never do"
    )

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise UsageError(f"compare: workers must be at least 0, got {self.workers}")


OWN = ("systems", "baselines", "workers")


def main(words: Sequence[str]) -> int:
    """Run all cells and print a table for each model; the systems that were named decide the exit code."""
    own = [word for word in words if word.partition("=")[0] in OWN]
    registry = load_plugins()
    if any(word in ("-h", "--help") for word in words):
        print(_help(own, registry), end="")
        return 0
    options = parse(own, CompareOptions, "compare")
    assert options is not None  # help was handled above
    compose.register_groups(registry)
    configs = plan(options, [word for word in words if word not in own], registry)
    writable_folder(configs[0].out)
    rows, missing, lost = _run(configs, options.workers, registry)
    return _finish(rows, missing, named(options, registry), registry) or int(lost)


def _run(configs: Sequence[RunConfig], workers: int, registry: Registry) -> tuple[list[Row], list[str], bool]:
    """All rows in the order of ``configs``, each written when it comes; the cells that Ctrl-C left out; and whether a
    row could not be written.
    """
    from moebench import harness

    arms = harness.arms(configs, registry)
    done: dict[int, list[Row]] = {}
    lost = False
    with suppress(KeyboardInterrupt), closing(harness.run_arms(arms, workers)) as coming:
        for at, rows in coming:
            done[at] = rows
            for row in [row for row in rows if row.workload["kind"] != "published"]:  # nobody ran that one here
                try:
                    told = f"wrote {result.write(row, Path(arms[at].config.out))}"
                except OSError as error:
                    told, lost = f"not written: {error}", True
                print(f"{len(done)} of {len(arms)}: {arms[at].name}, {told}", file=sys.stderr)
    rows = [row for at in sorted(done) for row in done[at]]
    return rows, [a.name for n, a in enumerate(arms) if n not in done], lost


def _finish(rows: Sequence[Row], missing: Sequence[str], asked: Sequence[str], registry: Registry) -> int:
    from moebench.report.comparison import print_comparison

    roles = {name: registry.role(name) for name in registry.systems}
    print_comparison(rows, roles, sys.stdout, forecasts=told(rows, home(), detect()))
    if missing:
        print(f"stopped: {len(missing)} not run: {', '.join(missing)}")
    print(result.stdout_document(rows))
    failed = any(row.status == "failed" and row.system in asked for row in rows)
    return INTERRUPTED if missing else int(failed)


def _help(own: Sequence[str], registry: Registry) -> str:
    """One page: what compare adds, what each run takes, and the options of the systems that are named."""
    parts = [describe(CompareOptions, "compare"), "options of every run:\n"]
    parts.append(describe(RunConfig, "", defaults=compose.defaults(), without=("system",)))
    chosen = [name for word in own if word.startswith("systems=") for name in word.partition("=")[2].split(",")]
    for spec in [registry.system(name) for name in chosen if name not in ("", "all")]:
        parts.append(f"options of {spec.id}:\n{describe(spec.config, '', f'{spec.id}.')}")
    parts.append(f"\nsystems=ID --help adds the options of ID\nsystems: {', '.join(sorted(registry.systems))}\n")
    return "\n".join(parts)


def named(options: CompareOptions, registry: Registry) -> list[str]:
    """The systems that ``systems=`` asks for, each once."""
    if not options.systems:
        valid = ", ".join(sorted(registry.systems))
        raise UsageError(f"compare needs systems=a,b or systems=all; valid: {valid}")
    if options.systems == ("all",):
        return list(registry.systems)
    return [registry.system(name).id for name in dict.fromkeys(options.systems)]


def plan(options: CompareOptions, words: Sequence[str], registry: Registry) -> list[RunConfig]:
    """One configuration per system, baselines first."""
    if any(word.partition("=")[0] == "system" for word in words):
        raise UsageError("compare takes systems=a,b instead of system=a")
    chosen = named(options, registry)
    if options.baselines:
        standing = [name for name, spec in registry.systems.items() if spec.baseline or spec.oracle]
        chosen = [name for name in standing if name not in chosen] + chosen
    common: list[str] = []
    knobs: dict[str, list[str]] = {}
    for word in words:
        head, dot, tail = word.partition("=")[0].partition(".")
        if dot and head in registry.systems:
            if head not in chosen:
                raise UsageError(f"{word}: {head} is not compared; compared are {', '.join(chosen)}")
            knobs.setdefault(head, []).append(f"system.{tail}={word.partition('=')[2]}")
        elif head in (*compose.OPTIONS, "hydra"):
            common.append(word)
        else:
            raise unknown("option", head, (*compose.OPTIONS, *OWN))
    configs = []
    for name in chosen:
        (job,) = compose.jobs([f"system={name}", *common, *knobs.get(name, [])], registry, sweep=False)
        configs.append(compose.resolve(job, registry))
        cells(configs[-1], registry)  # what cannot be stops all of them before the first one runs
    return configs
