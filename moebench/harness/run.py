"""Run configurations: plan their cells, give each measured cell a fresh process, and keep failures as rows."""

from __future__ import annotations

import sys
from collections.abc import Callable

from moebench.config import RunConfig
from moebench.errors import MoebenchError, UsageError
from moebench.harness.cell import run_cell
from moebench.harness.isolate import isolated
from moebench.harness.plan import Cell, plan
from moebench.harness.relocation import overlays
from moebench.harness.rows import failed_row, published_row
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
        rows.append(_row(cell, config, number, registry, strict))
        rows += [
            published_row(cell, found)
            for found in cell.spec.published
            if (found.hw, found.model) == (config.hw, cell.model) and found.where(config.knobs, config)
        ]
    return rows


def _row(cell: Cell, config: RunConfig, number: int, registry: Registry, strict: bool) -> Row:
    """A modeled cell runs here, a measured one in a process of its own."""
    if cell.clock == "virtual":
        return _attempt(cell, registry, strict)
    try:
        return isolated(_planned, config, number, strict)
    except MoebenchError as error:
        if strict and isinstance(error, UsageError):
            raise
        return failed_row(cell, error)
    finally:  # whatever ended the process, its copy of a pack does not stay
        remove_dead(overlays())


def _planned(config: RunConfig, number: int, strict: bool) -> Row:
    registry = load_plugins()
    return _attempt(plan(config, registry)[number], registry, strict)


def _attempt(cell: Cell, registry: Registry, strict: bool) -> Row:
    """The row of a cell, or the failed row that says why there is none."""
    with Status() as status:
        try:
            return run_cell(cell, registry, status)
        except Exception as error:
            # what holds everything cannot be given less: that it does not fit is a result of this machine
            hopeless = isinstance(error, BudgetError) and cell.spec.sizing == "full" and cell.config.memory is None
            if cell.config.debug or (strict and isinstance(error, UsageError) and not hopeless):
                raise
            return failed_row(cell, error)


class Status:
    """A line on stderr that says what is going on, when stderr is a terminal."""

    def __init__(self) -> None:
        self._status: Callable[[str], None] | None = None

    def __enter__(self) -> Status:
        if sys.stderr.isatty():
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
