"""Cross-stage scheduling: the rule, the modeled stages against an event simulator of their own, and a live run in which
reads are late.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_fixtures import costs, make_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live_identity import Lab, check_same

from moebench import geometry as geometries
from moebench import hardware
from moebench.geometry import Geometry
from moebench.harness.costs import StorageUse, build
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.step import VERIFY, Routing, Step
from moebench.systems.bigmomo.schedule import FIRST_GROUP, Schedule, group_size
from moebench.timeline.base import DEMAND
from moebench.timeline.virtual import VirtualTimeline

SHAPE = Geometry("one", layers=1, experts=40, top_k=4, hidden=64, intermediate=64, other_parameters=1000)
SECONDS = st.integers(0, 40).map(lambda n: n * 1e-4)
COSTLY = st.integers(1, 40).map(lambda n: n * 2e-5)


class Scheduled:
    """A system that does nothing but schedule; ``None`` leaves the order to the loop."""

    def __init__(self, mode, experts=SHAPE.experts) -> None:
        self.schedule, self.asked = Schedule(mode, experts), []

    @hookimpl
    def route(self, step, native):
        self.schedule.window(native.experts[step.valid])

    @hookimpl
    def order_compute(self, ready, pending, view):
        answer = self.schedule.next(ready, pending, view)
        self.asked.append((list(ready), list(pending), answer, view.now))
        return answer


class Logged(VirtualTimeline):
    """Remembers when demands were issued and will arrive, and what was computed."""

    def __init__(self, chosen) -> None:
        super().__init__(chosen)
        self.clear()

    def clear(self) -> None:
        self.arrivals, self.computed, self.issued = [], [], None

    def read(self, *args, **kwargs):
        tickets = super().read(*args, **kwargs)
        self.arrivals += [ticket.done_s for ticket in tickets]
        self.issued = self.now()
        return tickets

    def compute_experts(self, count, rows, overlap=False):
        self.computed.append(count)
        super().compute_experts(count, rows, overlap)


class Served(NamedTuple):
    """What one layer took, and who took part."""

    start: float
    end: float
    timeline: Logged
    counted: dict[str, int] | None
    record: Any


def served(mode, chosen, hits, misses, rows=1):
    """One layer with ``hits`` experts at hand and ``misses`` to read."""
    plugin, timeline = Scheduled(mode) if mode else None, Logged(chosen)
    experts = make_experts([plugin] if plugin else [], 40, timeline=timeline, geometry=SHAPE)
    here, all_of_them = np.arange(hits), np.arange(hits + misses)

    def serve(ids):
        step = Step(0, VERIFY, np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32), np.ones(rows, bool))
        experts.begin(step)
        found = experts.serve(0, None, Routing(np.tile(ids, (rows, 1)), None))[1]
        timeline.clear()
        start = timeline.now()
        assert sorted(e for e, _ in found) == ids.tolist()
        return start, timeline.now()

    if hits:
        serve(here)
        if plugin:
            plugin.schedule = Schedule(mode, SHAPE.experts)
    start, end = serve(all_of_them)
    return Served(start, end, timeline, plugin and plugin.schedule.counted, experts.record)


def simulate(releases, parts, copy, work, buffers=2, gate=False):
    """When the last part of the last expert is computed: first come first served through a chip with ``buffers``."""
    releases = sorted(releases)
    if gate:
        releases = [releases[-1]] * len(releases)
    waiting, filled, free, copying, computing = 0, 0, buffers, False, False
    events = [(at, "arrive") for at in releases]
    heapq.heapify(events)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            what = heapq.heappop(events)[1]
            if what == "arrive":
                waiting += parts
            elif what == "copied":
                copying, filled = False, filled + 1
            else:
                computing, free = False, free + 1
        if filled and not computing:
            filled, computing = filled - 1, True
            heapq.heappush(events, (now + work, "computed"))
        if waiting and free and not copying:
            waiting, free, copying = waiting - 1, free - 1, True
            heapq.heappush(events, (now + copy, "copied"))
        assert filled + copying + computing + free == buffers
    return now


def chip(on_chip_s, expert_row_s, map_s=0.0, parts=1, tile_rows=4, **more):
    return costs(
        on_chip_s=on_chip_s, expert_row_s=expert_row_s, map_s=map_s, chip_parts=parts, tile_rows=tile_rows, **more
    )


def releases(hits, timeline, start):
    """When each expert of a layer is mapped."""
    return [timeline.issued or start] * hits + timeline.arrivals


INSTANCE = dict(
    hits=st.integers(0, 14), misses=st.integers(0, 14), on_chip=COSTLY, work=COSTLY, map_s=SECONDS,
    parts=st.integers(1, 3), rows=st.integers(1, 9), load=st.sampled_from([0.0, 5e-5]),
)  # fmt: skip


@settings(max_examples=120)
@given(**INSTANCE)
def test_the_clock_agrees_with_a_simulation_of_two_buffers(hits, misses, on_chip, work, map_s, parts, rows, load):
    if not hits + misses:
        return
    chosen = chip(on_chip, work / 4, map_s, parts, load_host_s=load)
    tiles, ends = -(-rows // 4), {}
    for mode in ("stages", "arrival", "wait_all", None):
        start, end, timeline, *_ = served(mode, chosen, hits, misses, rows)
        ends[mode] = end - start
        compute_s, arrived = (hits + misses) * tiles * work, releases(hits, timeline, start)
        if mode:
            gate = mode == "wait_all"
            expected = simulate(arrived, parts, on_chip / parts, tiles * work / parts, gate=gate)
            assert end == pytest.approx(expected, rel=1e-9)
        assert ends[mode] >= max(compute_s, (hits + misses) * on_chip, max(arrived) - start) * (1 - 1e-9)
        assert sum(timeline.computed) == hits + misses
    least = min(ends.values()) * (1 + 1e-9)
    assert ends["stages"] <= least  # whatever is grouped: nothing waits while an expert is mapped
    assert ends["arrival"] <= least


def test_the_simulation_can_tell_two_buffers_from_one_and_three():
    late = [0.0, 0.0, 0.0, 1.0]
    ends = [simulate(late, 2, 0.5, 0.25, buffers) for buffers in (1, 2)]
    assert ends[1] < ends[0]
    chosen = chip(5e-4, 2.5e-5)
    start, end, timeline, *_ = served("arrival", chosen, 5, 3)
    arrived = releases(5, timeline, start)
    assert end == pytest.approx(simulate(arrived, 1, 5e-4, 1e-4))
    assert end != pytest.approx(simulate(arrived, 1, 5e-4, 1e-4, buffers=1))


def test_waiting_for_all_exposes_the_arithmetic_that_stages_hide():
    chosen = chip(1e-4, 1e-4, map_s=2e-4)
    waited, staged = (served(mode, chosen, 10, 6) for mode in ("wait_all", "stages"))
    assert waited.end - staged.end >= 10 * 4e-4 - 1e-12  # ten experts compute while six arrive
    assert waited.timeline.computed == [16]
    assert staged.record.stall_s < waited.record.stall_s


def test_an_expert_that_arrives_while_others_compute_stalls_nobody():
    chosen = chip(1e-4, 1e-3)  # computes for 4 ms, the read takes 1
    assert served("arrival", chosen, 1, 1).record.stall_s == 0
    assert served("wait_all", chosen, 1, 1).record.stall_s == pytest.approx(1e-3)


def test_groups_need_fewer_launches_than_single_experts():
    chosen = chip(4e-5, 5e-6, map_s=1.5e-4)
    counted = {mode: served(mode, chosen, 20, 4).counted for mode in ("stages", "arrival", "wait_all")}
    assert counted["arrival"]["groups"] == 24
    assert counted["wait_all"]["groups"] == 1
    assert counted["stages"]["groups"] <= 8
    assert {c["grouped_experts"] for c in counted.values()} == {24}


@settings(max_examples=200)
@given(
    st.integers(1, 20), st.integers(0, 30), st.integers(0, 30), st.integers(0, 200), st.integers(0, 400)
)  # fmt: skip
def test_the_rule(count, copy, compute, busy, until):
    groups = np.arange(1, count + 1)
    size = group_size(groups * copy, groups * compute, busy, until)
    hidden = [n for n in groups if n * copy <= busy]
    lasting = [n for n in hidden if n * compute >= max(0, until - busy)]
    if lasting:
        assert size == min(lasting, key=lambda n: n * compute)
    elif hidden:
        assert size * compute == max(n * compute for n in hidden)
        assert size in hidden
    else:
        assert size == min(FIRST_GROUP, count)


class Fake:
    """A view with fixed answers."""

    busy_s = 0.03

    def __init__(self, left) -> None:
        self.left = left

    def remaining(self, keys):
        return np.array([self.left[k] for k in keys])

    def stages(self, count, rows):
        return 0.01 * count, 0.002 * rows


def test_most_rows_go_first_and_the_first_to_come_is_waited_for():
    schedule, view = Schedule("stages", 6), Fake({4: 0.5, 5: 0.037})
    schedule.window(np.array([[0, 1, 3], [3, 1, -1], [3, 4, 5], [2, 3, -1]]))  # rows 1 2 1 4 1 1: two each, rounded up
    assert schedule.next([0, 1, 2, 3], [4, 5], view) == [3, 1]  # 7 ms to fill at 4 ms an expert
    assert schedule.next([0, 1, 2, 3], [4], view) == [3, 1, 0]  # the copies of three are hidden, no more
    assert schedule.next([], [4, 5], view) == [5]
    assert sorted(schedule.next([0, 1, 2, 3], [], view)) == [0, 1, 2, 3]
    assert Schedule("wait_all", 6).next([0, 1], [4, 5], view) == [5]
    assert Schedule("arrival", 6).next([2, 0], [4, 5], view) == [2]


def test_keys_of_later_layers_count_their_own_rows():
    schedule = Schedule("stages", 6)
    schedule.window(np.array([[0, 1], [1, 2]]))
    view = Fake({17: 0.035})
    assert schedule.next([12, 13, 14], [17], view) == [13, 12]


def test_a_group_takes_as_many_tiles_as_its_experts_one_by_one():
    """Means of rows that are no whole numbers: 13 pairs over 3 experts."""
    pairs = np.array([[0, 1]] * 6 + [[2, -1]])
    step = Step(0, VERIFY, np.zeros(7, np.int32), np.arange(7, dtype=np.int32), np.ones(7, bool))
    ends = []
    for mode in ("arrival", "stages"):
        timeline = Logged(chip(1e-5, 1e-3))
        experts = make_experts([Scheduled(mode)], 40, timeline=timeline, geometry=SHAPE)
        experts.begin(step)
        list(experts.serve(0, None, Routing(pairs, None))[1])
        ends.append(timeline.now())
    assert ends[0] == pytest.approx(ends[1])


def test_an_expert_that_exceeds_a_buffer_passes_the_chip_in_parts():
    registry = load_plugins()
    phone = hardware.load(registry.hardware_path("snapdragon_8_gen3"))
    found = {}
    for name in ("qwen3-30b-a3b", "lfm2-24b-a2b"):
        shape = geometries.load(registry.model_path(name))
        found[name] = build(phone, shape, StorageUse((shape.slot_bytes,), "direct"))
        assert shape.expert_bytes / found[name].chip_parts <= (8 * 2**20 - 128 * 2**10) / 2
    assert [c.chip_parts for c in found.values()] == [1, 2]
    timeline = VirtualTimeline(found["lfm2-24b-a2b"])
    timeline.compute_experts(1, 1, overlap=True)
    copy, compute = timeline.stage_s(1, 1)
    assert timeline.now() == pytest.approx(copy)  # the second half's copy ends when its arithmetic begins ...
    assert timeline.busy_s() == pytest.approx(compute / 2)  # ... and the first half's is over


def test_the_wait_for_one_ticket_counts_only_what_nothing_covers():
    timeline = VirtualTimeline(chip(1e-4, 1e-4))
    timeline.compute_experts(1, 1, overlap=True)  # 0.4 ms of arithmetic
    (ticket,) = timeline.read([1], [0], "device", DEMAND)
    assert timeline.wait(ticket) == pytest.approx(1e-3 - 4e-4)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), "int4")


@pytest.mark.parametrize("mode", ["stages", "arrival", "wait_all"])
def test_late_reads_are_waited_for_last_and_never_show(lab, mode):
    plugin = Scheduled(mode, lab.geometry.experts)
    late = {"engine": "faulty", "delay_s": 0.003, "reorder": 3, "seed": 1, "threads": 3}
    check_same(lab.run([plugin], 11, **late), lab.run(full=True))
    both = [(ready, answer) for ready, pending, answer, _ in plugin.asked if ready and pending]
    assert len(both) > 10
    at_once = [answer[0] in ready for ready, answer in both]
    assert all(at_once) if mode != "wait_all" else not any(at_once)
    if mode == "stages":
        assert any(len(answer) > 1 for _, answer in both)
