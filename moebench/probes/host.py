"""The profile of this machine from measurements, and the part of it that loop and library have.

Knows the form of a profile; how a thing is measured stands in the other modules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moebench.errors import MoebenchError
from moebench.geometry import EMBEDDED
from moebench.machine import detect
from moebench.probes import drive, passes, processor
from moebench.probes.file import ProbeFile
from moebench.probes.loop import Overheads, hook_call, overheads
from moebench.probes.record import Record
from moebench.probes.samples import Samples
from moebench.scratch import own_folder
from moebench.units import GIB, PAGE

TURNS = 5  # of loop and model, between the other parts
SYSTEM_TURNS = 2
BUSY = 0.05  # of the processors, taken by others: more than a system's own housekeeping


@dataclass(frozen=True)
class Where:
    """The folder on the drive to measure, the bytes of the file written there, and the model that computes."""

    folder: Path
    file_bytes: int
    model: Callable[[], Any]  # loads it: a harness.assets.LiveModel


def measure(where: Where, record: Record) -> dict[str, Any]:
    """The profile as plain data. Raises where not even random direct reads can be measured."""
    from moebench.backends.torch_threads import torch_threads

    machine, ram, threads, others = detect(), psutil.virtual_memory(), processor.computing(), Others()
    with own_folder(Path(where.folder) / ".moebench-calibrate") as folder, torch_threads(threads):
        file = ProbeFile(folder, where.file_bytes // PAGE * PAGE)
        loop, model = Loop(file, record), passes.Model(where.model, file, record)

        def turn() -> None:
            loop.turn()
            model.turn(0.06 / TURNS)

        writes = drive.written(file, record)
        bandwidth, compute = processor.memory(record), processor.compute(record)  # until the drive is at rest
        storage, reads = drive.storage(file, record)
        turn()
        processor.contention(file, folder / "writes", record, storage, compute)
        turn()
        replays, hooks = _systems(record, "replay of tinymoe's routing", computes=False)
        turn()
        live, live_hooks = _systems(record, "run of tinymoe", computes=True)
        turn()
        processor.sustained(record, compute)
        turn()
        storage |= writes
        stack = loop.entries() | _colder(replays, live, record)
        model.write(stack, storage)
    _absent(record, machine.gpu)
    if (share := others.share()) > BUSY:
        record.unmeasured["an idle machine"] = f"other processes took {share:.0%} of the processors meanwhile"
    return {
        "id": "host",
        "title": f"this machine: {machine.cpu}, {machine.ram_gib:.1f} GiB",
        "match": {"cpu": f"^{re.escape(machine.cpu)}$", "ram_gib": [machine.ram_gib - 0.5, machine.ram_gib + 0.5]},
        "model": "",
        "engine": "direct",
        "stack": "moebench",
        "unified": True,
        "memory": {
            "ram_gib": record.fact(ram.total / GIB, "GiB", "physical memory"),
            "reserve_gib": record.fact((ram.total - ram.available) / GIB, "GiB", "memory in use by others"),
        },
        "storage": storage,
        "bandwidth": bandwidth,
        "compute": compute,
        "read_curve": reads,
        "stacks": {"moebench": stack},
        "curves": record.curves,
        "hooks": hooks,
        "live_hooks": live_hooks,
        "unmeasured": record.unmeasured,
    }


class Others:
    """The processor time that other processes take from now on."""

    def __init__(self) -> None:
        self._begun = self._times()

    def share(self) -> float:
        """Their part of all that there was since."""
        whole, used, own = (now - before for now, before in zip(self._times(), self._begun, strict=True))
        return max(0.0, used - own) / whole if whole else 0.0

    @staticmethod
    def _times() -> tuple[float, float, float]:
        every, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = every.idle + getattr(every, "iowait", 0.0)
        return sum(every[:8]), sum(every[:8]) - idle, own.user + own.system


class Loop:
    """What the loop itself takes, measured in ``turn`` after turn."""

    def __init__(self, file: ProbeFile, record: Record) -> None:
        self._file, self._record = file, record
        self._found: list[Overheads] = []

    def turn(self) -> None:
        """A sample of each."""
        with self._record.part("loop", 0.03 / TURNS, needed=True):
            self._found.append(overheads(self._file))

    def entries(self) -> dict[str, Any]:
        """All of the loop in a profile."""
        record, found = self._record, {}
        step, layer, request, wait, load = (Samples(us) for us in zip(*self._found, strict=True))
        text = "the loop's own time for an expert of 4 KiB that is read, waits left out: layers of two and of eight"
        found["per_load_ms"] = record.number(Samples(tuple(us / 1e3 for us in load.values)), "ms", text)
        text = "what a layer that waits adds to the loop's own time, waits left out"
        found["wait_us"] = record.number(wait, "us", text)
        text = "the loop's own time in a replay, of a {}: differences of passes of other depth and width"
        words = {"step": "pass", "layer": "layer", "request": "resident expert"}
        for name, samples in (("step", step), ("layer", layer), ("request", request)):
            found[f"{name}_us"] = record.number(samples, "us", text.format(words[name]))
        with record.part("hook_us", 0.005) as seconds:
            text = "one bound hook that does nothing, timed as in runs"
            found["hook_us"] = record.number(hook_call(seconds), "us", text)
        found["host_sync_us"] = record.fact(0, "us", "the processor computes, so nothing is read back")
        return found


def _systems(record: Record, work: str, computes: bool) -> tuple[Any, dict[str, Any]]:
    """Runs of all systems, replays or with a model that ``computes``, and what one hook of each takes in them; two
    seconds a system and turn, beside what the other parts may take.
    """
    from moebench.probes.systems import run_all

    kind = "live hooks" if computes else "hooks"
    found: dict[str, Any] = {}
    with record.part(kind, 0.0):
        runs = run_all(SYSTEM_TURNS, computes)
        for name, us in runs.hooks().items():
            found[name] = record.number(us, "us", f"a hook of {name} in a measured {work}, mean over its hooks")
        record.unmeasured |= {f"{kind} of {name}": why for name, why in runs.refused.items()}
    return runs, found


def _colder(replays: Any, live: Any, record: Record) -> dict[str, Any]:
    """What the loop takes longer where a model computes."""
    from moebench.geometry import embedded_folder
    from moebench.harness.assets import folder_geometry
    from moebench.probes.systems import colder

    try:
        layer, load = colder(replays, live, folder_geometry(embedded_folder(), EMBEDDED, "int4").layers)
    except MoebenchError as error:
        record.unmeasured |= dict.fromkeys(("live_layer_us", "live_load_us"), str(error))
        return {}
    text = "what the loop's own time grows by where tinymoe computes between its parts, over a replay: {}"
    return {
        "live_layer_us": record.number(layer, "us", text.format("of a layer, nothing read")),
        "live_load_us": record.number(load, "us", text.format("of each expert loaded, all read")),
    }


def _absent(record: Record, gpu: str) -> None:
    """What this command never measures, or this machine does not show."""
    none = "this machine has no GPU that its driver names" if not gpu else f"{gpu}: device=cuda measures it"
    record.unmeasured["device memory, its link and its compute"] = none
    if not (getattr(psutil, "sensors_temperatures", dict)() or {}):
        record.unmeasured["temperatures"] = "this system shows no thermal sensors; compute.sustained shows their effect"
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    if frequency is None or not frequency.max:
        record.unmeasured["clock rate"] = "this system does not tell the processor's limits"
    record.unmeasured["caches beyond the page cache"] = (
        "a drive, hypervisor or controller may answer from memory of its own, which no read can tell from its medium"
    )
    if not hasattr(os, "posix_fadvise"):
        record.unmeasured["cold page cache"] = "this system has no posix_fadvise to empty a file's page cache"
