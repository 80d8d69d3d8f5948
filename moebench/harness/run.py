"""Run configurations: plan their cells, give each measured cell a fresh process, and keep failures as rows."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from moebench.config import RunConfig
from moebench.errors import UsageError
from moebench.harness.cell import failed_row, run_cell
from moebench.harness.plan import Cell, plan
from moebench.plugins import load_plugins
from moebench.residency.ledger import BudgetError
from moebench.result import Row


def run(config: RunConfig) -> list[Row]:
    """All rows of one configuration. Wrong use raises; a cell that fails while running becomes a failed row."""
    registry = load_plugins()
    rows = []
    with Status() as status:
        for cell in plan(config, registry):
            try:
                rows.append(_isolated(cell) if cell.clock == "wall" else run_cell(cell, registry, status))
            except Exception as error:
                # what holds everything cannot be given less: that it does not fit is a result of this machine
                hopeless = isinstance(error, BudgetError) and cell.spec.sizing == "full" and config.memory is None
                if isinstance(error, UsageError) and not hopeless:
                    raise
                if config.debug:
                    raise
                rows.append(failed_row(cell, error))
    return rows


def _isolated(cell: Cell) -> Row:
    """Run a measured cell in a process of its own, so that no earlier cell's memory or threads are in its numbers."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_child, cell).result()


def _child(cell: Cell) -> Row:
    with Status() as status:
        return run_cell(cell, load_plugins(), status)


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
