"""The profile of this machine from measurements: which ones, in which sizes, and what share of the time each gets.

Knows the form of a profile; how a thing is measured stands in the other modules.
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moebench.machine import cores, detect
from moebench.probes import beside, drift, faults, kernels, memory
from moebench.probes.beside import Background
from moebench.probes.file import ProbeFile
from moebench.probes.loop import hook_call, overheads
from moebench.probes.reads import Reader, grid
from moebench.probes.record import Record
from moebench.probes.samples import Samples, timed
from moebench.units import GIB, KIB, PAGE

SIZES = tuple(kib * KIB for kib in (4, 16, 64, 256, 1024, 4096, 16384))  # of experts
DEPTHS = (1, 2, 4, 8, 16)
FEW_SIZES, FEW_DEPTHS = tuple(kib * KIB for kib in (16, 64, 1024, 4096)), (1, 4, 8)
STRETCHES, THREADS = tuple(kib * KIB for kib in (4, 64, 1024, 4096)), (1, 2, 4)
WIDTHS, DENSE_ROWS = (128, 256, 512, 1024, 2048, 4096), (1, 4, 16, 64)
# hidden and intermediate size of experts: tinymoe's, two between, qwen3-30b-a3b's and gpt-oss-20b's
SHAPES, EXPERT_ROWS = ((128, 64), (512, 256), (1024, 512), (2048, 768), (2880, 2880)), (1, 2, 4, 8, 32)
CONTEXTS, PASS_ROWS = (1, 64, 512), (1, 4, 32)
PASS_CONTEXT, SMALL_READ, SMALL_DEPTH = 32, 16 * KIB, 4  # of a small model that decodes beside reads
QUANTS = ("none", "int8", "int4")
LOOP_TURNS = 5


@dataclass(frozen=True)
class Where:
    """The folder on the drive to measure, the bytes of the file written there, and the model that computes."""

    folder: Path
    file_bytes: int
    model: Callable[[], Any]  # loads it: a harness.assets.LiveModel


def measure(where: Where, record: Record) -> dict[str, Any]:
    """The profile as plain data. Raises where not even random direct reads can be measured."""
    from moebench.backends.torch_threads import torch_threads

    machine, ram, threads = detect(), psutil.virtual_memory(), computing()
    with tempfile.TemporaryDirectory(dir=where.folder, prefix=".moebench-") as folder, torch_threads(threads):
        file = ProbeFile(Path(folder), where.file_bytes // PAGE * PAGE)
        storage, reads = _storage(file, record)
        bandwidth, compute = _memory(record), _compute(record)
        _contention(file, Path(folder) / "writes", record, storage, compute)
        stack = _loop(file, record)
        _live(where.model, file, record, stack, storage, compute)
    _sustained(record, compute)
    _absent(record, machine.gpu)
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
        "unmeasured": record.unmeasured,
    }


def computing() -> int:
    """Processor threads that compute in a measured run that is not told otherwise."""
    return max(1, cores() - 1)


def _storage(file: ProbeFile, record: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    with record.part("storage.write_gb_s", 0.0, needed=True):
        found = {"write_gb_s": record.number(file.write(), "GB/s", "sequential writes, synced each 128 MiB")}
    direct, method = Reader(file, "direct"), "random experts by engine {}, hashed; a demand of so many at a time"
    with record.part("read_curve", 0.16, needed=True) as seconds:
        points = grid(_points(SIZES, DEPTHS, file), direct.cold, seconds)
        reads = record.table(points, method.format("direct"), ("sizes_kib", "depths"), "GB/s", KIB)
    few = _points(FEW_SIZES, FEW_DEPTHS, file)
    for name, engine, state in (
        ("reads.uring", "uring", "cold"),
        ("reads.pread", "pread", "cold"),
        ("reads.mmap", "mmap", "cold"),
        ("cached.pread", "pread", "warm"),
        ("cached.mmap", "mmap", "warm"),
        ("ahead", "direct", "ahead"),
        ("sequential", "direct", "sequential"),
    ):
        with record.part(name, 0.02) as seconds:
            text = method.format(engine)
            text += {"cold": "", "warm": ", all cached", "ahead": ", as prefetches", "sequential": ", in order"}[state]
            work = getattr(Reader(file, engine), state)
            record.curve(name, grid(few, work, seconds), text, KIB)
    with record.part("storage.page_fault_us", 0.005):
        single = faults.single(file, min(400, file.nbytes // (4 * PAGE)))
        found["page_fault_us"] = record.number(single, "us", "single major faults of a mapping, their page read")
    if "page_fault_us" not in found:
        size, _ = least = min(points)
        page = Samples(tuple(size / rate / 1e3 for rate in points[least].values))
        text = f"a direct read of {size // KIB} KiB, as no page could be dropped from the page cache"
        found["page_fault_us"] = record.number(page, "us", text, "estimate")
    for name, advice in (("faults", mmap.MADV_RANDOM), ("faults_ahead", mmap.MADV_NORMAL)):
        with record.part(name, 0.015) as seconds:
            work = faults.Stretches(file, advice).touch
            text = "stretches of a cold mapping copied out, one a thread"
            record.curve(name, grid(_points(STRETCHES, THREADS, file), work, seconds), text, KIB)
    found["page_kib"] = record.fact(mmap.PAGESIZE / KIB, "KiB", "page size")
    found["readahead_kib"] = record.fact(faults.readahead_kib(file.path), "KiB", "setting of the drive")
    return found, reads


def _points(sizes: tuple[int, ...], counts: tuple[int, ...], file: ProbeFile) -> list[tuple[int, int]]:
    """All of both axes, but for sizes of which the file holds too few."""
    return [(size, count) for size in sizes for count in counts if size * max(counts) <= file.nbytes]


def _memory(record: Record) -> dict[str, Any]:
    found = {}
    with record.part("bandwidth.dram_gb_s", 0.01, needed=True) as seconds:
        copied = memory.copied(seconds)
        found["dram_gb_s"] = record.number(copied, "GB/s", "copies of 256 MiB, one thread, bytes read plus written")
    with record.part("bandwidth.stream_gb_s", 0.01) as seconds:
        found["stream_gb_s"] = record.number(
            memory.streamed(seconds), "GB/s", "largest of 256 MiB of words, one thread"
        )
    with record.part("copy", 0.02) as seconds:
        points = [(size, threads) for size in FEW_SIZES for threads in (1, 2)]
        record.curve("copy", grid(points, memory.Copies().copy, seconds), "copies within 2 x 256 MiB", KIB)
    return found | {"device_gb_s": _stream(record)}


def _stream(record: Record) -> dict[str, Any]:
    """What weights stream at where the processor is the device."""
    with record.part("bandwidth.device_gb_s", 0.01, needed=True) as seconds:
        stored = kernels.Expert("int4", 2048, 768).gb_s(seconds)
    return record.number(
        stored, "GB/s", f"stored bytes of int4 experts of 2048 x 768 on one row, threads: {computing()}"
    )


def _compute(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with record.part("compute.bf16_tflops", 0.01, needed=True) as seconds:
        bf16 = kernels.products(seconds)
        found["bf16_tflops"] = record.number(
            bf16, "TFLOP/s", f"products of 512 rows with 2048 x 2048, threads: {computing()}"
        )
    with record.part("compute.int4_tflops", 0.01, needed=True) as seconds:
        int4 = kernels.Expert("int4", 2048, 768).tflops(32, seconds)
        found["int4_tflops"] = record.number(
            int4, "TFLOP/s", f"int4 experts of 2048 x 768 on 32 rows, threads: {computing()}"
        )
        found["cpu_tflops"] = dict(found["int4_tflops"])  # the processor is the device here
    with record.part("compute.rans_gb_s", 0.01) as seconds:
        text = "decoded bytes of int4 experts, one thread on each core"
        found["rans_gb_s"] = record.number(kernels.rans_decoding(seconds), "GB/s", text)
    with record.part("dense", 0.03) as seconds:
        each = seconds / len(WIDTHS) / len(DENSE_ROWS)
        points: dict[tuple[int, int], Samples] = {}
        for width in WIDTHS:
            squares = kernels.Squares(width)
            points |= {(2 * width * width, rows): squares.times(rows, each) for rows in DENSE_ROWS}
        record.curve("dense", points, f"bf16 products, weights gone through in turn, threads: {computing()}", KIB)
    for kind in QUANTS:
        with record.part(f"experts.{kind}", 0.035) as seconds:
            each, points = seconds / len(SHAPES) / len(EXPERT_ROWS), {}
            for hidden, intermediate in SHAPES:
                expert = kernels.Expert(kind, hidden, intermediate)
                points |= {(expert.nbytes, rows): expert.times(rows, each) for rows in EXPERT_ROWS}
            text = f"{kind} experts by moebench's experts function in turn, threads: {computing()}, sizes: "
            record.curve(f"experts.{kind}", points, text + ", ".join(f"{h} x {i}" for h, i in SHAPES), KIB)
    return found


def _contention(file: ProbeFile, path: Path, record: Record, storage: dict[str, Any], compute: dict[str, Any]) -> None:
    experts = kernels.Expert("int4", 2048, 768).work(1)

    def speed(seconds: float) -> float:
        turns = spent = 0.0
        while not turns or spent < seconds:
            spent += timed(experts)
            turns += 1
        return turns / spent

    def both(background: Background, seconds: float) -> beside.Both:
        return beside.shares(speed, background, seconds)

    what = f"int4 experts of 2048 x 768, threads: {computing()}"
    with record.part("compute.beside_reads", 0.03) as seconds:
        found = both(beside.reading(file), seconds)
        text = "over its rate alone, beside direct reads of 1 MiB, 8 queued"
        compute["beside_reads"] = record.number(found.first, "share", f"{what}, rate {text}")
        text = f"direct reads of 1 MiB, 8 queued, rate over their rate alone, beside {what}"
        storage["read_beside_compute"] = record.number(found.second, "share", text)
    with record.part("compute.beside_copies", 0.03) as seconds:
        found = both(beside.copying(), seconds)
        text = f"{what}, rate over its rate alone, beside copies by one thread"
        compute["beside_copies"] = record.number(found.first, "share", text)
    with record.part("storage.durable_write_gb_s", 0.01) as seconds:
        writer = beside.Writer(path, beside.WRITTEN)
        durable = writer.durable(seconds)
        storage["durable_write_gb_s"] = record.number(durable, "GB/s", "writes of 256 KiB, each synced")
    with record.part("storage.write_beside_reads_gb_s", 0.03) as seconds:
        written, kept = beside.writes_beside_reads(file, path, seconds)
        text = "writes of 8 MiB, each synced, beside direct reads of 1 MiB, 8 queued"
        storage["write_beside_reads_gb_s"] = record.number(written, "GB/s", text)
        text = "direct reads of 1 MiB, 8 queued, rate over their rate alone, beside synced writes of 8 MiB"
        storage["read_beside_writes"] = record.number(kept, "share", text)


def _loop(file: ProbeFile, record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with record.part("loop", 0.03, needed=True):
        cost = overheads(file, LOOP_TURNS)
        load = Samples(tuple(us / 1e3 for us in cost.load.values))
        text = "the loop's own time for an expert of 4 KiB read from the page cache, waits left out"
        found["per_load_ms"] = record.number(load, "ms", text)
        text = "the loop's own time in a replay, of a {}: differences of passes of other depth and width"
        for name, samples in (("step", cost.step), ("layer", cost.layer), ("request", cost.request)):
            words = {"step": "pass", "layer": "layer", "request": "resident expert"}[name]
            found[f"{name}_us"] = record.number(samples, "us", text.format(words))
    with record.part("hook_us", 0.005) as seconds:
        found["hook_us"] = record.number(hook_call(seconds), "us", "one bound hook that does nothing, timed as in runs")
    found["host_sync_us"] = record.fact(0, "us", "the processor computes, so nothing is read back")
    return found


def _live(
    load: Callable[[], Any], file: ProbeFile, record: Record, stack: dict[str, Any], storage: dict[str, Any],
    compute: dict[str, Any],
) -> None:  # fmt: skip
    with record.part("layers", 0.06) as seconds:
        from moebench.harness.backend import open_backend
        from moebench.probes.live import Passes

        model = load()
        passes = Passes(open_backend("torch", model, threads=computing()), model.pack, model.geometry.vocabulary)
        contexts = [context for context in CONTEXTS if context + 8 * max(PASS_ROWS) <= model.positions]
        points = [(context, rows) for context in contexts for rows in PASS_ROWS]
        layers, rest = {}, []
        for context, rows in points:
            each = passes.sample(context, rows, seconds / 2 / len(points))
            layers[context, rows] = Samples(tuple(layer for layer, _ in each))
            rest += [beyond for _, beyond in each] if rows == 1 else []
        name = model.geometry.name
        record.curve(
            "layers", layers, f"layers of {name}, row-invariant, without their experts, threads: {computing()}"
        )
        floor = layers[contexts[min(1, len(contexts) - 1)], 1]
        text = f"a layer of {name} on one row without its experts: the library's own time, {contexts[1]} tokens cached"
        stack["layer_floor_us"] = record.number(floor, "us", text)
        text = f"a pass of {name} on one row beside its layers: masks, embedding, head, choice of the token"
        stack["pass_us"] = record.number(Samples(tuple(rest)), "us", text)
        background = beside.reading(file, SMALL_READ, SMALL_DEPTH)
        both = beside.shares(lambda time: passes.speed(PASS_CONTEXT, time), background, seconds / 2)
        what = f"decode passes of {name} without reads of their own"
        reads = f"direct reads of {SMALL_READ // KIB} KiB, {SMALL_DEPTH} queued"
        text = f"{what}, rate over their rate alone, beside {reads}"
        compute["layers_beside_reads"] = record.number(both.first, "share", text)
        text = f"{reads}, rate over their rate alone, beside {what}"
        storage["read_beside_layers"] = record.number(both.second, "share", text)
    if "layer_floor_us" not in stack:
        dispatch = kernels.small_operation(0.1)
        text = f"60 tensor operations at {dispatch.median:.2f} us, as no model's layer could be measured"
        sixty = Samples(tuple(60 * us for us in dispatch.values))
        stack["layer_floor_us"] = record.number(sixty, "us", text, "estimate")


def _sustained(record: Record, compute: dict[str, Any]) -> None:
    with record.part("compute.sustained", 0.24) as seconds:
        text = f"int4 experts on every core, rate at the end of {seconds:.0f} s under load over the rate at its start"
        compute["sustained"] = record.number(drift.sustained(seconds), "share", text)


def _absent(record: Record, gpu: str) -> None:
    """What this command never measures, or this machine does not show."""
    none = "this machine has no GPU that its driver names" if not gpu else f"{gpu} is not measured by this command"
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
