"""From sessions to the metrics of a row, each with its provenance or the reason why it is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moebench.harness.plan import Cell
from moebench.harness.session import Session
from moebench.metrics import NAMES
from moebench.result import METRICS, Metric, metric
from moebench.units import GIB

TABLE = tuple(METRICS)
THROUGH_PAGE_CACHE = ("mmap", "pread", "faulty")
COMPUTED = ("decode_tok_s", "ttft_s", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms")  # mean nothing without compute


def speed(cell: Cell, runs: Sequence[Session]) -> dict[str, Metric]:
    """Timing and traffic. Over several runs the value is the median, with the runs' values as samples and their range
    as interval.
    """
    provenance = "measured" if cell.clock == "wall" else "modeled"
    each = [run.metrics.numbers() for run in runs]
    found = {}
    for name in NAMES:
        values = [numbers[name][0] for numbers in each]
        _, reason, n = each[0][name]
        if name in COMPUTED and not cell.computes:
            found[name] = metric(name, None, None, 0, "a measured replay reads experts and computes nothing")
            continue
        if (
            name in ("ssd_mib_per_token", "storage_requests_per_token", "effective_gb_s")
            and cell.clock == "wall"
            and cell.engine in THROUGH_PAGE_CACHE
        ):
            reason = (
                f"engine {cell.engine} reads through the page cache; what storage delivered is not counted per step"
            )
            found[name] = metric(name, None, None, 0, reason)
        elif any(v is None for v in values):
            found[name] = metric(name, None, None, n, reason)
        else:
            one = metric(name, values[0], provenance, n)
            found[name] = over_repeats(one, values) if len(values) > 1 else one
    return found


def over_repeats(first: Metric, values: Sequence[float]) -> Metric:
    """A metric whose ``values`` are those of several repeats: their median, and from three on their range."""
    interval = (min(values), max(values)) if len(values) >= 3 else None
    return replace(first, value=float(np.median(values)), n=len(values), samples=tuple(values), ci=interval)


def memory(cell: Cell, runs: Sequence[Session], process: bool, allocator: int | None = None) -> dict[str, Metric]:
    """Peak active memory by the ledger; what an allocator would show, or did (``allocator``, in bytes); what the
    process took.
    """
    provenance = "measured" if cell.clock == "wall" else "modeled"
    ledger = max((run.ledger for run in runs), key=lambda found: found.peak_bytes)
    device = {name: held for name, held in ledger.at_peak.items() if name != "host slots"}
    found = {"peak_active_gib": metric("peak_active_gib", ledger.peak_bytes / GIB, provenance)}
    if cell.clock == "wall" and allocator is not None:
        found["allocator_peak_gib"] = metric("allocator_peak_gib", allocator / GIB, "measured")
    elif cell.clock == "wall":
        reason = "torch keeps no allocator statistics on the CPU"
        found["allocator_peak_gib"] = metric("allocator_peak_gib", None, None, 0, reason)
    else:
        found["allocator_peak_gib"] = metric("allocator_peak_gib", sum(device.values()) / GIB, "modeled")
    if process:
        peak = process_peak_bytes()
        reason = "" if peak else "this operating system does not report a process's peak"
        found["process_peak_gib"] = metric(
            "process_peak_gib", peak / GIB if peak else None, "measured", 1 if peak else 0, reason
        )
    else:
        reason = "a modeled machine has no process"
        found["process_peak_gib"] = metric("process_peak_gib", None, None, 0, reason)
    return found


def process_peak_bytes() -> int | None:
    """High-water mark of this process's resident memory: VmHWM on Linux, ru_maxrss on macOS, else None.

    Linux's ru_maxrss will not do: it remembers the parent that this process was forked from.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None
