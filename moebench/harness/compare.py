"""The cells of several configurations: modeled ones side by side in processes of their own, measured ones in turn.

Measured arms are interleaved over their repeats, each in a fresh process, so that what drifts hits all alike. Knows
cells and rows; knows no table.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import psutil

from moebench.config import QualityConfig, RunConfig
from moebench.errors import MoebenchError
from moebench.harness.isolate import each, isolated
from moebench.harness.plan import Cell, plan
from moebench.harness.relocation import overlays
from moebench.harness.repeats import one_row
from moebench.harness.rows import failed_row, published_rows
from moebench.harness.run import planned
from moebench.plugins import Registry
from moebench.result import Row
from moebench.store.overlay import remove_dead
from moebench.units import GIB

PROCESS_BYTES = GIB  # of one that computes: Python, torch and a small model


@dataclass(frozen=True)
class Arm:
    """One cell of a comparison: the ``number``-th of its configuration."""

    config: RunConfig
    number: int
    cell: Cell

    @property
    def name(self) -> str:
        """For people: system and model."""
        return f"{self.cell.spec.id} on {self.cell.model}"


def arms(configs: Sequence[RunConfig], registry: Registry) -> list[Arm]:
    """All cells of ``configs``, in order; raises for what cannot be before anything runs."""
    return [Arm(config, n, cell) for config in configs for n, cell in enumerate(plan(config, registry))]


def run_arms(arms: Sequence[Arm], workers: int = 0) -> Generator[tuple[int, list[Row]], None, None]:
    """The place of an arm in ``arms`` and its rows, published ones after its own, as they come.

    What goes wrong in an arm is a failed row, also that its process died. ``workers``: modeled cells at a time; 0 as
    many as processors and memory allow. Close it, and no process is left.
    """
    measured = [at for at, arm in enumerate(arms) if arm.cell.clock == "wall"]
    modeled = [at for at in range(len(arms)) if at not in set(measured)]
    modeled.sort(key=lambda at: not arms[at].cell.live)  # what takes longest first
    tasks = [(arms[at].config, arms[at].number, False, True) for at in modeled]
    for number, found in each(planned, tasks, min(workers or side_by_side(arms), len(tasks))):
        yield modeled[number], _rows(arms[modeled[number]], [found])
    repeats: dict[int, list[Row | MoebenchError]] = {at: [] for at in measured}
    for number in range(max((arms[at].config.repeats for at in measured), default=0)):
        for at in list(repeats):
            repeats[at].append(found := _measure(arms[at], number))
            if len(repeats[at]) == arms[at].config.repeats or not _ok(found):
                yield at, _rows(arms[at], repeats.pop(at))


def side_by_side(arms: Sequence[Arm]) -> int:
    """Processes that modeled cells get, one thread each: as many as there are processors and room in memory."""
    folders = {arm.cell.folder for arm in arms if arm.cell.folder is not None}
    weights = max((sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders), default=0)
    room = psutil.virtual_memory().available // (PROCESS_BYTES + 2 * weights)  # the model, and the unmodified one
    return max(1, min(processors(), room))


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure(arm: Arm, repeat: int) -> Row | MoebenchError:
    """One repeat, in a process of its own; answers are asked for in the first one."""
    once = replace(arm.config, repeats=1)
    if repeat:
        once = replace(once, quality=QualityConfig("none"))
    try:
        return isolated(planned, once, arm.number, False, False)
    except MoebenchError as error:
        return error
    finally:  # whatever ended the process, its copy of a pack does not stay
        remove_dead(overlays())


def _ok(found: Row | MoebenchError) -> bool:
    return isinstance(found, Row) and found.status == "ok"


def _rows(arm: Arm, found: Sequence[Row | MoebenchError]) -> list[Row]:
    rows = [failed_row(arm.cell, one) if isinstance(one, MoebenchError) else one for one in found]
    return [one_row(rows), *published_rows(arm.cell.spec, arm.cell.config, arm.cell.model)]
