"""``moebench run``: one system, one machine, one workload; ``-m`` sweeps, ``--cfg job`` shows what would run."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from moebench import result
from moebench.commands import compose
from moebench.commands.places import writable_folder
from moebench.commands.words import describe
from moebench.config import RunConfig
from moebench.errors import MoebenchError, UsageError
from moebench.forecast import told
from moebench.machine import detect
from moebench.plugins import home, load_plugins
from moebench.report.table import print_table

FLAGS = """
flags:
  -m, --multirun   run every combination of comma-separated values, such as system=lru,lfu
  --cfg job        print the resolved configuration and stop
  --info           print where the configuration comes from and stop
"""


class Unwritten(MoebenchError):
    """A row that could not be written; ``rows`` are all of its run, for the table and the document."""

    def __init__(self, reason: str, rows: list[result.Row]) -> None:
        super().__init__(reason)
        self.rows = rows


def main(words: Sequence[str]) -> int:
    """Check everything first, then let hydra run the job or the jobs; prints the table and the document."""
    registry = load_plugins()
    if any(word in ("-h", "--help") for word in words):
        print(describe(RunConfig, "run", defaults=compose.defaults()) + FLAGS)
        for name in [word.removeprefix("system=") for word in words if word.startswith("system=")]:
            print(f"options of {name}:\n{describe(registry.system(name).config, 'run', 'system.')}")
        print(
            "system=ID --help adds the options of ID\nsystems: "
            + ", ".join(sorted(registry.systems))
            + "\nworkloads: "
            + ", ".join(compose.workloads())
        )
        return 0
    compose.register_groups(registry)
    parsed = _parse(words)
    parsed.overrides = compose.spelled(parsed.overrides, parsed.multirun)
    configs = []
    for job in compose.jobs(parsed.overrides, registry, parsed.multirun):
        try:
            configs.append(compose.resolve(job, registry))
        except UsageError as error:
            raise UsageError(f"{' '.join(job)}: {error}" if parsed.multirun else str(error)) from None
    if not (parsed.cfg or parsed.info):
        for folder in dict.fromkeys(config.out for config in configs):
            writable_folder(folder)
    rows: list[result.Row] = []
    failures: list[tuple[str, Exception]] = []

    @hydra.main(version_base="1.3", config_path=f"pkg://{compose.CONFIGS}", config_name="run")
    def task(composed: DictConfig) -> None:
        config = compose.from_hydra(composed, registry)
        try:
            rows.extend(run_cell(config))
        except Unwritten as error:
            rows.extend(error.rows)
            failures.append((" ".join(HydraConfig.get().overrides.task), error))
        except Exception as error:
            if config.debug:
                traceback.print_exc()
            failures.append((" ".join(HydraConfig.get().overrides.task), error))

    flags = [flag for flag, on in (("-m", parsed.multirun), ("--info", parsed.info)) if on]
    flags += ["--cfg", parsed.cfg] if parsed.cfg else []
    _under_hydra(task, [*parsed.overrides, *flags])
    if parsed.cfg or parsed.info:
        return 0
    if failures and not parsed.multirun:
        if rows:
            finish(rows)
        raise failures[0][1]
    for job_words, failure in failures:
        print(f"moebench: error: {job_words}: {' '.join(str(failure).split())}", file=sys.stderr)
    return finish(rows) or int(bool(failures))


def _under_hydra(task: Callable[[], None], words: list[str]) -> None:
    """Let hydra read ``words`` and run the task; what hydra itself refuses is one line, as any other wrong use."""
    before, shown = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["moebench run", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors are raised to us instead of printed with their traces
    try:
        task()
    except HydraException as error:
        raise UsageError(str(error).split("\n")[0]) from error
    finally:
        sys.argv = before
        os.environ.pop("HYDRA_FULL_ERROR")
        if shown is not None:
            os.environ["HYDRA_FULL_ERROR"] = shown


def run_cell(config: RunConfig, strict: bool = True) -> list[result.Row]:
    """Run one configuration and write what was run; returns all rows. ``strict`` as for ``harness.run``."""
    from moebench import harness

    rows = harness.run(config, strict)
    for row in rows:
        if row.workload["kind"] == "published":  # it stands in the system's own folder, nobody ran it here
            continue
        try:
            print(f"wrote {result.write(row, Path(config.out))}", file=sys.stderr)
        except OSError as error:
            raise Unwritten(f"{error}; the row stands in the table and in the document alone", rows) from error
    return rows


def finish(rows: Sequence[result.Row], asked: Collection[str] | None = None) -> int:
    """Print the table and, as the last line, the document; 1 when a row failed, of the systems ``asked`` if given."""
    print_table(rows, sys.stdout, forecasts=told(rows, home(), detect()))
    print(result.stdout_document(rows))
    return int(any(row.status == "failed" and (asked is None or row.system in asked) for row in rows))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--info", action="store_true")

    def refuse(message: str) -> None:
        raise UsageError(f"run: {message}; flags: -m, --cfg job, --info")

    parser.error = refuse  # type: ignore[method-assign,assignment]
    return parser.parse_intermixed_args(list(words))
