"""The profile of this machine from measurements, and the part of it that loop and library have.

Knows the form of a profile; how a thing is measured stands in the other modules.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moebench.curves import TimeCurve
from moebench.machine import detect
from moebench.probes import beside, drive, kernels, processor
from moebench.probes.file import ProbeFile
from moebench.probes.loop import hook_call, overheads
from moebench.probes.reads import grid
from moebench.probes.record import Record
from moebench.probes.samples import Samples
from moebench.scratch import own_folder
from moebench.sourced import curves
from moebench.store.engines import open_engine
from moebench.units import GIB, KIB, PAGE

CONTEXTS, PASS_ROWS = (1, 64, 512), (1, 4, 32)
PASS_CONTEXT, SMALL_READ, SMALL_DEPTH = 32, 16 * KIB, 4  # of a small model that decodes beside reads
LANDING = 8  # reads in a pass
LOOP_TURNS = 5
HOOK_TURNS = 2
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
        writes = drive.written(file, record)
        bandwidth, compute = processor.memory(record), processor.compute(record)  # until the drive is at rest
        storage, reads = drive.storage(file, record)
        storage |= writes
        processor.contention(file, folder / "writes", record, storage, compute)
        stack = _loop(file, record)
        _live(where.model, file, record, stack, storage)
    hooks, live_hooks = _hooks(record)
    processor.sustained(record, compute)
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


def _loop(file: ProbeFile, record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with record.part("loop", 0.03, needed=True):
        cost = overheads(file, LOOP_TURNS)
        load = Samples(tuple(us / 1e3 for us in cost.load.values))
        text = "the loop's own time for an expert of 4 KiB that is read, waits left out: layers of two and of eight"
        found["per_load_ms"] = record.number(load, "ms", text)
        text = "what a layer that waits adds to the loop's own time, waits left out"
        found["wait_us"] = record.number(cost.wait, "us", text)
        text = "the loop's own time in a replay, of a {}: differences of passes of other depth and width"
        for name, samples in (("step", cost.step), ("layer", cost.layer), ("request", cost.request)):
            words = {"step": "pass", "layer": "layer", "request": "resident expert"}[name]
            found[f"{name}_us"] = record.number(samples, "us", text.format(words))
    with record.part("hook_us", 0.005) as seconds:
        found["hook_us"] = record.number(hook_call(seconds), "us", "one bound hook that does nothing, timed as in runs")
    found["host_sync_us"] = record.fact(0, "us", "the processor computes, so nothing is read back")
    return found


def _hooks(record: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one hook of each system takes, in replays and where a model computes; two seconds a system and turn, beside
    what the other parts may take.
    """
    from moebench.probes.systems import hook_calls

    found: list[dict[str, Any]] = [{}, {}]
    for at, (what, kind) in enumerate((("replay of tinymoe's routing", "hooks"), ("run of tinymoe", "live hooks"))):
        with record.part(kind, 0.0):
            taken, refused = hook_calls(HOOK_TURNS, computes=kind == "live hooks")
            text = f"a hook of {{}} in a measured {what}, mean over its hooks"
            found[at] = {name: record.number(us, "us", text.format(name)) for name, us in taken.items()}
            record.unmeasured |= {f"{kind} of {name}": why for name, why in refused.items()}
    return found[0], found[1]


def _live(
    load: Callable[[], Any], file: ProbeFile, record: Record, stack: dict[str, Any], storage: dict[str, Any]
) -> None:
    with record.part("layers", 0.06) as seconds:
        from moebench.harness.backend import open_backend
        from moebench.probes.live import Passes

        model = load()
        backend = open_backend("torch", model, threads=processor.computing())
        expert_s = _expert_s(record, model.geometry)
        passes = Passes(backend, model.pack, model.geometry.vocabulary, expert_s)
        contexts = [context for context in CONTEXTS if context + 8 * max(PASS_ROWS) <= model.positions]
        points = [(context, rows) for context in contexts for rows in PASS_ROWS]
        rest: list[float] = []

        def layer(context: int, rows: int, each: float) -> float:
            found = passes.sample(context, rows, each)
            rest.extend(beyond for _, beyond in found if rows == 1)
            return statistics.median(without for without, _ in found)

        layers = grid(points, layer, seconds / 2)
        name = model.geometry.name
        record.curve(
            "layers",
            layers,
            f"layers of {name}, row-invariant, without their experts, threads: {processor.computing()}",
        )
        floor = layers[contexts[min(1, len(contexts) - 1)], 1]
        text = f"a layer of {name} on one row without its experts: the library's own time, {contexts[1]} tokens cached"
        stack["layer_floor_us"] = record.number(floor, "us", text)
        text = f"a pass of {name} on one row beside its layers: masks, embedding, head, choice of the token"
        stack["pass_us"] = record.number(Samples(tuple(rest)), "us", text)
        with open_engine("direct", file.pack(SMALL_READ)) as engine:
            first, more = passes.waits(engine, PASS_CONTEXT, seconds / 6)
            longer = passes.beside(engine, LANDING, PASS_CONTEXT, seconds / 6)
        text = (
            f"what a layer of {name} takes longer that waits for a read of {SMALL_READ // KIB} KiB, the wait left out"
        )
        stack["cold_us"] = record.number(first, "us", text)
        text = "the same for each further read of a layer, begun with the first and waited for after it"
        stack["again_us"] = record.number(more, "us", text)
        reads = f"{LANDING} direct reads of {SMALL_READ // KIB} KiB"
        text = f"what a pass of {name} takes longer for each of {reads} that were begun before it"
        stack["beside_us"] = record.number(longer, "us", text)
        background = beside.reading(file, SMALL_READ, SMALL_DEPTH)
        both = beside.shares(lambda time: passes.speed(PASS_CONTEXT, time), background, seconds / 6)
        what = f"decode passes of {name} without reads of their own"
        reads = f"direct reads of {SMALL_READ // KIB} KiB, {SMALL_DEPTH} queued"
        text = f"{reads}, rate over their rate alone, beside {what}"
        storage["read_beside_layers"] = record.number(both.second, "share", text)
    if "layer_floor_us" not in stack:
        dispatch = kernels.small_operation(0.1)
        text = f"60 tensor operations at {dispatch.median:.2f} us, as no model's layer could be measured"
        sixty = Samples(tuple(60 * us for us in dispatch.values))
        stack["layer_floor_us"] = record.number(sixty, "us", text, "estimate")


def _expert_s(record: Record, geometry: Any) -> Callable[[int], float]:
    """What an expert of the model takes by its rows, from the curve that was just measured; nothing without one."""
    name = f"experts.{geometry.quant}"
    if name not in record.curves:
        return lambda rows: 0.0
    curve = curves({name: record.curves[name]}, "calibrate")[name]
    assert isinstance(curve, TimeCurve)
    return lambda rows: curve.seconds(geometry.expert_bytes / KIB, rows)


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
