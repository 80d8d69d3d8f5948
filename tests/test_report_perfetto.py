"""The trace is what Perfetto opens: complete slices that nest in their thread, every event of every row, names."""

from __future__ import annotations

import itertools
import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import ROLES, comparison, row

from moebench.report.groups import groups
from moebench.report.perfetto import trace

SPANS = st.tuples(st.integers(0, 1), st.integers(0, 100), st.integers(0, 30))


def slices(rows):
    events = json.loads(trace(groups(rows, ROLES)))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found: dict = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    assert found.keys() <= names.keys()
    return found, names


def test_every_event_of_every_row_is_there_under_its_row_and_lane():
    rows = comparison()
    found, names = slices(rows)
    drawn = [r for r in rows if r.details]
    assert len({pid for pid, _ in found}) == len(drawn)
    wanted = Counter(
        (lane, label, start, length)
        for r in drawn
        for lane, label, start, length in [
            *((r.details["timeline"]["lanes"][e[0]], *e[1:]) for e in r.details["timeline"]["events"]),
            *(("steps", f"step {n}", *step) for n, step in enumerate(r.details["timeline"]["steps"])),
        ]
    )
    got = Counter((e["cat"], e["name"], e["ts"], e["dur"]) for events in found.values() for e in events)
    assert got == wanted
    assert all(names[thread].startswith(event["cat"]) for thread, events in found.items() for event in events)


@given(st.lists(SPANS, max_size=40))
def test_slices_of_a_thread_never_overlap(spans):
    timeline = {
        "lanes": ["compute", "storage"],
        "events": [[lane, "x", a, b] for lane, a, b in spans],
        "steps": [[0, 9]],
    }
    found, _ = slices([row("lru", details={"timeline": timeline})])
    assert sum(len(events) for events in found.values()) == len(spans) + 1
    for events in found.values():
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"]
