"""The timelines of rows as one trace in Chrome's trace-event format, which Perfetto opens.

A row is a process and a lane a thread. Slices of a thread must nest, so what overlaps in a lane (reads in flight
together) gets further threads of the same name. Format: "Trace Event Format", the Chromium project's document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moebench.report.groups import Group, Named


def trace(groups: Sequence[Group]) -> str:
    """The trace of all rows that have a timeline, microseconds from each row's first drawn step."""
    events: list[dict[str, Any]] = []
    pid = 0
    for group in groups:
        for named in group.rows:
            if named.row.details.get("timeline"):
                pid += 1
                events += _row(named, f"{named.name}: {group.title}, {named.workload}", pid)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, sort_keys=True, separators=(",", ":")) + "\n"


def _row(named: Named, title: str, pid: int) -> list[dict[str, Any]]:
    drawn = named.row.details["timeline"]
    events = [_name("process", title, pid, 0)]
    steps = [("steps", f"step {at}", start, length) for at, (start, length) in enumerate(drawn["steps"])]
    lanes = [(str(drawn["lanes"][lane]), str(label), start, length) for lane, label, start, length in drawn["events"]]
    tid = 0
    for lane in ["steps", *map(str, drawn["lanes"])]:
        slices = [event[1:] for event in [*steps, *lanes] if event[0] == lane]
        for number, thread in enumerate(_threads(slices)):
            tid += 1
            events.append(_name("thread", lane if not number else f"{lane} {number + 1}", pid, tid))
            events += [
                {"ph": "X", "name": label, "cat": lane, "pid": pid, "tid": tid, "ts": start, "dur": length}
                for label, start, length in thread
            ]
    return events


def _threads(slices: Sequence[tuple[str, float, float]]) -> list[list[tuple[str, float, float]]]:
    """Slices by start, each in the first thread that is free by then."""
    threads: list[list[tuple[str, float, float]]] = []
    for event in sorted(slices, key=lambda event: (event[1], -event[2], event[0])):
        for thread in threads:
            if thread[-1][1] + thread[-1][2] <= event[1]:
                thread.append(event)
                break
        else:
            threads.append([event])
    return threads


def _name(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
