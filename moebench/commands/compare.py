"""``moebench compare systems=a,b``: the same cell for several systems, beside baselines and oracles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moebench.commands import compose
from moebench.commands.places import writable_folder
from moebench.commands.run import finish, run_cell
from moebench.commands.words import describe, parse
from moebench.config import RunConfig, option
from moebench.errors import UsageError, unknown
from moebench.harness.plan import plan as cells
from moebench.plugins import Registry, load_plugins


@dataclass(frozen=True)
class CompareOptions:
    """Which systems stand in the table; every other word is an option of ``moebench run``."""

    systems: tuple[str, ...] = option(
        (), "systems to compare, or all; a system's own options are written ID.NAME=VALUE"
    )
    baselines: bool = option(True, "add the floor, the baselines and the oracles")


def main(words: Sequence[str]) -> int:
    """Run all cells one after another and print one table; the systems that were named decide the exit code."""
    own = [word for word in words if word.partition("=")[0] in ("systems", "baselines", "-h", "--help")]
    if any(word in ("-h", "--help") for word in words):
        print(describe(CompareOptions, "compare") + describe(RunConfig, "run", defaults=compose.defaults()), end="")
        return 0
    options = parse(own, CompareOptions, "compare")
    assert options is not None  # help was handled above
    registry = load_plugins()
    compose.register_groups(registry)
    configs = plan(options, [word for word in words if word not in own], registry)
    writable_folder(configs[0].out)
    rows = []
    for number, config in enumerate(configs, 1):
        print(f"{config.system} ({number} of {len(configs)})", file=sys.stderr)
        rows += run_cell(config, strict=False)
    return finish(rows, named(options, registry))


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
            raise unknown("option", head, (*compose.OPTIONS, "systems", "baselines"))
    configs = []
    for name in chosen:
        (job,) = compose.jobs([f"system={name}", *common, *knobs.get(name, [])], registry, sweep=False)
        configs.append(compose.resolve(job, registry))
        cells(configs[-1], registry)  # what cannot be stops all of them before the first one runs
    return configs
