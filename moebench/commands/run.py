"""``moebench run``: one system, one machine, one workload; ``-m`` sweeps, ``--cfg job`` shows what would run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from moebench import result
from moebench.commands import compose
from moebench.commands.words import describe
from moebench.config import RunConfig
from moebench.errors import UsageError
from moebench.plugins import load_plugins
from moebench.report.table import print_table

FLAGS = """
flags:
  -m, --multirun   run every combination of comma-separated values, such as system=lru,lfu
  --cfg job        print the resolved configuration and stop
  --info           print where the configuration comes from and stop
"""


def main(words: Sequence[str]) -> int:
    """Check everything first, then let hydra run the job or the jobs; prints the table and the document."""
    registry = load_plugins()
    if any(word in ("-h", "--help") for word in words):
        print(describe(RunConfig, "run", defaults=compose.defaults()) + FLAGS)
        print("systems: " + ", ".join(sorted(registry.systems)) + "\nworkloads: " + ", ".join(compose.workloads()))
        return 0
    compose.register_groups(registry)
    parsed = _parse(words)
    for job in compose.jobs(parsed.overrides, registry, parsed.multirun):
        compose.resolve(job, registry)
    rows: list[result.Row] = []
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=f"pkg://{compose.CONFIGS}", config_name="run")
    def task(composed: DictConfig) -> None:
        config = compose.from_hydra(composed, registry)
        try:
            rows.extend(run_cell(config))
        except Exception as error:
            if config.debug:
                raise
            failures.append(error)

    before = sys.argv
    flags = [word for word in words if word not in parsed.overrides]
    sys.argv = ["moebench run", *parsed.overrides, *flags]  # hydra wants them apart
    try:
        task()
    except SystemExit as stop:
        if stop.code:
            return 1
    finally:
        sys.argv = before
    if parsed.cfg or parsed.info:
        return 0
    if failures and not rows:
        raise failures[0]
    for error in failures:
        print(f"moebench: error: {' '.join(str(error).split())}", file=sys.stderr)
    return finish(rows) or int(bool(failures))


def run_cell(config: RunConfig) -> list[result.Row]:
    """Run one cell and write its rows; returns them."""
    from moebench import harness

    rows = harness.run(config)
    for row in rows:
        print(f"wrote {result.write(row, Path(config.out))}", file=sys.stderr)
    return rows


def finish(rows: Sequence[result.Row]) -> int:
    """Print the table and, as the last line, the document; 1 when a row failed."""
    print_table(rows, sys.stdout)
    print(result.stdout_document(rows))
    return int(any(row.status == "failed" for row in rows))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise UsageError(f"run: {message}; flags: -m, --cfg job, --info")

    parser.error = refuse  # type: ignore[method-assign,assignment]
    return parser.parse_intermixed_args(list(words))
