"""Repeats of one measured cell that ran in processes of their own, put together into one row. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moebench.harness.figures import over_repeats
from moebench.metrics import NAMES
from moebench.result import Metric, Row

PEAKS = ("peak_active_gib", "allocator_peak_gib", "process_peak_gib")


def one_row(rows: Sequence[Row]) -> Row:
    """The row of a cell whose repeats are ``rows``: medians of what is timed, the highest of the peaks, and from the
    first repeat what is asked once (quality, details). A failed repeat is the row.
    """
    first = rows[0]
    if failed := [row for row in rows if row.status == "failed"]:
        return failed[0]
    if len(rows) == 1:
        return first
    states = dict.fromkeys(str(row.protocol["page_cache"]) for row in rows)
    volatile = {**rows[-1].volatile, "seconds": round(sum(row.volatile["seconds"] for row in rows), 3)}
    return replace(
        first,
        config={**first.config, "repeats": len(rows)},
        protocol={
            **first.protocol,
            "repeats": len(rows),
            "interleaved": True,  # with the other systems of a comparison, each repeat in a process of its own
            "page_cache": "; ".join(states),
            "counters": rows[-1].protocol["counters"],
        },
        metrics={name: _together(name, [row.metrics[name] for row in rows]) for name in first.metrics},
        volatile=volatile,
    )


def _together(name: str, found: Sequence[Metric]) -> Metric:
    if name in NAMES:
        if missing := [metric for metric in found if metric.value is None]:
            return missing[0]
        return over_repeats(found[0], [float(metric.value) for metric in found])  # type: ignore[arg-type]
    if name in PEAKS:
        return max(found, key=lambda metric: -1.0 if metric.value is None else metric.value)
    return found[0]
