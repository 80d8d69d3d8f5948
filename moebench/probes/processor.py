"""The part of a profile that processor and memory have: which kernels and copies are measured, in which sizes, and what
they leave of each other and of reads.

Knows the form of a profile; how a thing is measured stands in the other modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebench.machine import cores
from moebench.probes import beside, drift, kernels
from moebench.probes import memory as main_memory
from moebench.probes.beside import Background
from moebench.probes.file import ProbeFile
from moebench.probes.reads import grid
from moebench.probes.record import Record
from moebench.probes.samples import Samples, timed
from moebench.units import KIB

COPIES = tuple(kib * KIB for kib in (16, 64, 1024, 4096))
WIDTHS, DENSE_ROWS = (128, 256, 512, 1024, 2048, 4096), (1, 4, 16, 64)
# hidden and intermediate size of experts: tinymoe's, two between, qwen3-30b-a3b's and gpt-oss-20b's
SHAPES, EXPERT_ROWS = ((128, 64), (512, 256), (1024, 512), (2048, 768), (2880, 2880)), (1, 2, 4, 8, 32)
QUANTS = ("none", "int8", "int4")


def computing() -> int:
    """Processor threads that compute in a measured run that is not told otherwise."""
    return max(1, cores() - 1)


def memory(record: Record) -> dict[str, Any]:
    """Bandwidths."""
    found = {}
    with record.part("bandwidth.dram_gb_s", 0.01, needed=True) as seconds:
        copied = main_memory.copied(seconds)
        found["dram_gb_s"] = record.number(copied, "GB/s", "copies of 256 MiB, one thread, bytes read plus written")
    with record.part("bandwidth.stream_gb_s", 0.01) as seconds:
        found["stream_gb_s"] = record.number(
            main_memory.streamed(seconds), "GB/s", "largest of 256 MiB of words, one thread"
        )
    with record.part("copy", 0.02) as seconds:
        points = [(size, threads) for size in COPIES for threads in (1, 2)]
        record.curve("copy", grid(points, main_memory.Copies().copy, seconds), "copies within 2 x 256 MiB", KIB)
    return found | {"device_gb_s": _stream(record)}


def _stream(record: Record) -> dict[str, Any]:
    """What weights stream at where the processor is the device."""
    with record.part("bandwidth.device_gb_s", 0.01, needed=True) as seconds:
        stored = kernels.Expert("int4", 2048, 768).gb_s(seconds)
    return record.number(
        stored, "GB/s", f"stored bytes of int4 experts of 2048 x 768 on one row, threads: {computing()}"
    )


def compute(record: Record) -> dict[str, Any]:
    """Rates of arithmetic and decoding; curves of experts and dense products."""
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
        text = f"bf16 products, weights gone through in turn, threads: {computing()}"
        squares = {2 * width * width: kernels.Squares(width) for width in WIDTHS}
        record.curve("dense", _in_turn(squares, DENSE_ROWS, seconds), text, KIB)
    for kind in QUANTS:
        with record.part(f"experts.{kind}", 0.035) as seconds:
            experts = {expert.nbytes: expert for expert in (kernels.Expert(kind, *shape) for shape in SHAPES)}
            text = f"{kind} experts by moebench's experts function in turn, threads: {computing()}, sizes: "
            text += ", ".join(f"{h} x {i}" for h, i in SHAPES)
            record.curve(f"experts.{kind}", _in_turn(experts, EXPERT_ROWS, seconds), text, KIB)
    return found


def _in_turn(
    kernel: Mapping[int, kernels.Squares | kernels.Expert], rows: tuple[int, ...], seconds: float
) -> dict[tuple[int, int], Samples]:
    """Microseconds of kernels by bytes, on so many rows."""
    points = [(nbytes, count) for nbytes in kernel for count in rows]
    return grid(points, lambda nbytes, count, each: kernel[nbytes].times(count, each).median, seconds)


def contention(file: ProbeFile, path: Path, record: Record, storage: dict[str, Any], compute: dict[str, Any]) -> None:
    """Adds what compute, copies, reads and writes (into ``path``) leave of each other."""
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


def sustained(record: Record, compute: dict[str, Any]) -> None:
    """Adds what a time under load leaves."""
    with record.part("compute.sustained", 0.27) as seconds:
        text = f"int4 experts on every core, rate at the end of {seconds:.0f} s under load over the rate at its start"
        compute["sustained"] = record.number(drift.sustained(seconds), "share", text)
