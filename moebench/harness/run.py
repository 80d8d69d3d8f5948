"""Run configurations: plan their cells, give each measured cell a fresh process, and keep failures as rows."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from moebench.config import RunConfig
from moebench.errors import MoebenchError, UsageError
from moebench.harness.cell import run_cell
from moebench.harness.isolate import isolated
from moebench.harness.plan import Cell, plan
from moebench.harness.relocation import overlays
from moebench.harness.rows import failed_row, published_rows
from moebench.plugins import Registry, load_plugins
from moebench.residency.ledger import BudgetError
from moebench.result import Row
from moebench.store.overlay import remove_dead


def run(config: RunConfig, strict: bool = True) -> list[Row]:
    """All rows of one configuration. A cell that fails while running becomes a failed row.

    Wrong use that shows in a cell, such as a budget it does not fit, raises; without ``strict`` it is a failed row too.
    """
    registry = load_plugins()
    rows = []
    for number, cell in enumerate(plan(config, registry)):
        rows += [_row(cell, config, number, registry, strict), *published_rows(cell.spec, cell.config, cell.model)]
    return rows


def _row(cell: Cell, config: RunConfig, number: int, registry: Registry, strict: bool) -> Row:
    """A modeled cell runs here, a measured one in a process of its own."""
    if cell.clock == "virtual":
        return attempt(cell, registry, strict)
    try:
        return isolated(planned, config, number, strict)
    except MoebenchError as error:
        if strict and isinstance(error, UsageError):
            raise
        return failed_row(cell, error)
    finally:  # whatever ended the process, its copy of a pack does not stay
        remove_dead(overlays())


def planned(config: RunConfig, number: int, strict: bool, quiet: bool = False) -> Row:
    """The row of the ``number``-th cell of a configuration, in this process; ``quiet`` where others run beside it."""
    registry = load_plugins(quiet=True)
    return attempt(plan(config, registry)[number], registry, strict, quiet)


def attempt(cell: Cell, registry: Registry, strict: bool, quiet: bool = False) -> Row:
    """The row of a cell, or the failed row that says why there is none."""
    with Status(not quiet) as status:
        try:
            return run_cell(cell, registry, status)
        except Exception as error:
            # what holds everything cannot be given less: that it does not fit is a result of this machine
            hopeless = isinstance(error, BudgetError) and cell.spec.sizing == "full" and cell.config.memory is None
            if strict and (cell.config.debug or (isinstance(error, UsageError) and not hopeless)):
                raise
            if cell.config.debug:
                traceback.print_exc()
            return failed_row(cell, error)


class Status:
    """A line on stderr that says what is going on, when stderr is a terminal."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._status: Callable[[str], None] | None = None

    def __enter__(self) -> Status:
        if self._wanted and sys.stderr.isatty():
            from rich.console import Console

            self._shown = Console(stderr=True).status("starting")
            self._shown.start()
            self._status = self._shown.update
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._shown.stop()

    def __call__(self, text: str) -> None:
        if self._status is not None:
            self._status(text)
