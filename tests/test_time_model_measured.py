"""What a calibration measured enters modeled time term by term: each adds what it says, and nothing where it is not
declared; a limit on the rate of reads holds its mean.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib import resources

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench import geometry as geometries
from moebench import hardware
from moebench.harness.costs import StorageUse, build, reads_only
from moebench.residency.places import Places
from moebench.timeline.base import COMPUTE, DEMAND, PREFETCH
from moebench.timeline.storage import LIMIT_SLICE_S
from moebench.timeline.virtual import VirtualTimeline
from moebench.units import GB, KIB, MIB

PLAIN = yaml.safe_load(resources.files("moebench.hardware_profiles").joinpath("m4pro.yaml").read_text())
GEOMETRY = geometries.load(resources.files("moebench.models").joinpath("olmoe-1b-7b.yaml"))
USE = StorageUse((GEOMETRY.slot_bytes,), "direct")
BARE = build(hardware.from_dict(PLAIN, "m4pro"), GEOMETRY, USE)
STACK = PLAIN["stack"]


def number(value: float, unit: str) -> dict:
    """An entry of a profile."""
    return {"value": value, "unit": unit, "source": "measured: made up"}


def curve(unit: str, rows, **axes) -> dict:
    """A curve of a profile."""
    return {"unit": unit, "source": "measured: made up", **axes, "rows": rows}


def costs(change, use=USE):
    """Costs on a machine that declares more than an m4pro."""
    data = copy.deepcopy(PLAIN)
    change(data)
    return build(hardware.from_dict(data, "more"), GEOMETRY, use)


def passed(found, layers: int = 3, experts: int = 2, rows: int = 1) -> float:
    """Modeled seconds of a pass whose experts are there."""
    clock = VirtualTimeline(found)
    for _ in range(layers):
        clock.compute_dense(1, rows, 1000, final=False)
        clock.compute_experts(experts, experts * rows)
    clock.compute_dense(0, rows, 1000, final=True)
    clock.hooked(5)
    return clock.now()


@pytest.mark.parametrize(
    ("name", "times"), [("step_us", 1), ("pass_us", 1), ("layer_us", 3), ("request_us", 6), ("hook_us", 5)]
)
def test_each_constant_of_the_loop_counts_as_often_as_it_happens(name, times):
    more = costs(lambda data: data["stacks"][STACK].update({name: number(10.0, "us")}))
    assert passed(more) - passed(BARE) == pytest.approx(times * 10e-6)


def test_layers_and_experts_are_taken_from_their_curves():
    def change(data):
        data["curves"] = {
            "layers": curve("us", [[100.0, 400.0], [100.0, 400.0]], context=[1.0, 64.0], row_counts=[1, 4]),
            "experts.int4": curve("us", [[50.0, 200.0]], sizes_kib=[GEOMETRY.expert_bytes / KIB], row_counts=[1, 4]),
        }

    measured = costs(change)
    one, four = passed(measured, rows=1), passed(measured, rows=4)
    streamed = 3 * (BARE.dense_layer_s + 1000 * BARE.state_byte_s) + BARE.head_s
    assert one == pytest.approx(3 * (100e-6 + 2 * 50e-6) + streamed)
    assert four - one == pytest.approx(3 * (300e-6 + 2 * 150e-6))


@pytest.mark.parametrize(("tokens", "rows", "us"), [(4, 4, 900.0), (5, 4, 400.0), (8, 8, 1800.0), (64, 1, 100.0)])
def test_a_pass_that_begins_its_sequences_has_a_curve_of_its_own(tokens, rows, us):
    def change(data):
        data["curves"] = {
            "layers": curve("us", [[100.0, 400.0], [100.0, 400.0]], context=[1.0, 64.0], row_counts=[1, 4]),
            "first_layers": curve("us", [[100.0, 900.0, 1800.0]], sequences=[1.0], row_counts=[1, 4, 8]),
        }

    clock, state = VirtualTimeline(costs(change)), tokens * GEOMETRY.kv_bytes_per_token
    clock.compute_dense(1, rows, state, final=False)
    dense = max(BARE.dense_layer_s, rows * BARE.dense_row_s) + state * BARE.state_byte_s
    assert clock.now() - dense == pytest.approx(us * 1e-6)


def test_where_nothing_computes_the_loop_takes_what_a_replay_took():
    more = costs(
        lambda data: data["stacks"][STACK].update(live_layer_us=number(10.0, "us"), live_load_us=number(7.0, "us"))
    )
    assert passed(more) - passed(BARE) == pytest.approx(3 * 10e-6)
    assert passed(reads_only(more)) == passed(reads_only(BARE))
    took = []
    for found in (more, BARE, reads_only(more), reads_only(BARE)):
        clock = VirtualTimeline(found)
        clock.read([0, 1], [0, 1], "device", DEMAND)
        took.append(clock.now())
    assert took[0] - took[1] == pytest.approx(2 * 7e-6)
    assert took[2] == took[3]


@pytest.mark.parametrize(("rows", "name"), [(1, "expert_us"), (4, "gather_us")])
def test_each_expert_takes_its_dispatch_beside_its_kernels(rows, name):
    more = costs(lambda data: data["stacks"][STACK].update({name: number(10.0, "us")}))
    assert passed(more, rows=rows) - passed(BARE, rows=rows) == pytest.approx(3 * 2 * 10e-6)
    assert passed(more, rows=5 - rows) == passed(BARE, rows=5 - rows)


def test_a_measured_loop_goes_through_experts_that_are_computed_where_they_are_mapped():
    mapped = replace(USE, engine="mmap", in_place=True)
    declared, measured = (
        costs(lambda data, own=own: data["stacks"][STACK].update(own), mapped).load_host_s
        for own in ({}, {"step_us": number(10.0, "us")})
    )
    assert (declared, measured) == (0, BARE.load_host_s)


@pytest.mark.parametrize("adapters", [0, 5])
def test_each_adapter_takes_what_was_measured_for_one(adapters):
    data = copy.deepcopy(PLAIN)
    data["stacks"][STACK]["adapter_us"] = number(10.0, "us")
    data["curves"] = {"layers": curve("us", [[100.0]], context=[1.0], row_counts=[1])}
    profile = hardware.from_dict(data, "more")
    found = [build(profile, GEOMETRY, USE, adapters=count) for count in (0, adapters)]
    took = [passed(one, layers=GEOMETRY.layers, experts=0) for one in found]
    assert took[1] - took[0] == pytest.approx(adapters * 10e-6)
    assert passed(reads_only(found[1])) == passed(reads_only(found[0]))


def test_compute_goes_slower_while_storage_reads_and_only_then():
    slowed = costs(lambda data: data["compute"].update({"beside_reads": number(0.5, "share")}))
    took = BARE.expert_s
    for found, factor in ((BARE, 1), (slowed, 2)):
        clock = VirtualTimeline(found)
        clock.read(list(range(8)), list(range(8)), "device", DEMAND)
        begun = clock.now()
        clock.compute_experts(1, 1)  # far shorter than the reads
        assert clock.now() - begun == pytest.approx(factor * took)
        clock.wait(clock.read([9], [9], "device", DEMAND)[0])
        begun = clock.now()
        clock.compute_experts(1, 1)
        assert clock.now() - begun == pytest.approx(took)


def test_of_a_small_expert_reads_take_nothing_by_the_second_and_of_a_large_one_as_of_kernels():
    def share(own: float) -> float:
        def change(data):
            sizes = [8.0, GEOMETRY.expert_bytes / KIB]
            data["curves"] = {"experts.int4": curve("us", [[10.0], [10.0 / own]], sizes_kib=sizes, row_counts=[1])}
            data["compute"]["beside_reads"] = number(0.8, "share")

        return costs(change).experts_beside[0]

    assert share(1.0) == pytest.approx(1.0)
    assert share(1e-6) == pytest.approx(0.8, rel=1e-4)
    assert 0.8 < share(0.5) < 1.0


def test_the_first_wait_of_a_layer_costs_more_than_the_next_and_no_wait_nothing():
    stack = {"cold_us": number(100.0, "us"), "again_us": number(10.0, "us")}
    found = costs(lambda data: data["stacks"][STACK].update(stack))
    for reads, expected in ((0, 0.0), (1, 100e-6), (3, 120e-6)):
        took = []
        for each in (BARE, found):
            clock = VirtualTimeline(each)
            for _ in range(2):
                clock.compute_dense(1, 1, 0, final=False)
                for ticket in clock.read(list(range(reads)), list(range(reads)), "device", DEMAND):
                    clock.wait(ticket)
            took.append(clock.spent[COMPUTE])
        assert took[1] - took[0] == pytest.approx(2 * expected)


@pytest.mark.parametrize("priority", [DEMAND, PREFETCH])
def test_a_read_that_lands_while_something_computes_is_charged_for_once_and_one_that_is_waited_for_never(priority):
    found = costs(lambda data: data["stacks"][STACK].update({"beside_us": number(50.0, "us")}))
    long = replace(found, dense_layer_s=0.0, dense_row_s=0.0, library_s=lambda state_bytes, rows: 1.0)
    clock = VirtualTimeline(long)
    clock.read([0, 1, 2], [0, 1, 2], "device", priority)
    begun = clock.now()
    for _ in range(2):
        clock.compute_dense(1, 1, 0, final=False)
    assert clock.now() - begun == pytest.approx(2.0 + 3 * 50e-6)
    clock = VirtualTimeline(replace(long, cold_s=1e-6))
    for ticket in clock.read([0, 1, 2], [0, 1, 2], "device", priority):
        clock.wait(ticket)
    begun = clock.now()
    clock.compute_dense(1, 1, 0, final=False)
    assert clock.now() - begun == pytest.approx(1.0, abs=1e-9)


def test_reads_beside_compute_end_later_by_what_they_lose():
    plain = replace(BARE, load_host_s=0.0)
    for share in (1.0, 0.5):
        clock = VirtualTimeline(replace(plain, experts_beside=(0.5, share)))
        (ticket,) = clock.read([0], [0], "device", DEMAND)
        clock.compute_experts(1, 1)
        clock.wait(ticket)
        beside = BARE.expert_s / 0.5
        assert clock.now() == pytest.approx(BARE.read_s[1] + (1 - share) * beside)


@pytest.mark.parametrize("full", [1.0, 2.0, 4.0])
def test_beside_demand_prefetches_get_what_a_full_queue_reaches_beyond_it(full):
    """A demand reaches 1 GB/s, a queue that is kept full ``full`` times as much."""

    def change(data):
        axes = {"sizes_kib": [GEOMETRY.slot_bytes / KIB], "depths": [1, 4]}
        data["read_curve"] = curve("GB/s", [[1.0, 1.0]], **axes)
        data["curves"] = {"ahead": curve("GB/s", [[full, full]], **axes)}

    found = costs(change)
    clock = VirtualTimeline(found)
    demand = clock.read([0, 1, 2, 3], [0, 1, 2, 3], "device", DEMAND)
    (ahead,) = clock.read([4], [4], "device", PREFETCH)
    begun = ahead.issued_s
    for ticket in demand:
        clock.wait(ticket)
    busy = clock.now() - begun
    clock.compute_dense(20, 1, 0, final=False)
    assert clock.is_ready(ahead)
    done, service = ahead.done_s - begun, found.ahead_s[1]
    beside = busy * (1 - 1 / full)  # of its service
    assert done == pytest.approx(service / (1 - 1 / full) if service < beside else busy + service - beside)
    assert done < busy if full > 1 else done > busy


@pytest.mark.parametrize("count", [1, 2, 4])
def test_prefetches_side_by_side_are_many_a_second_but_none_is_sooner_than_one_alone(count):
    """A queue of four is served four times as fast as one read."""

    def change(data):
        axes = {"sizes_kib": [GEOMETRY.slot_bytes / KIB], "depths": [1, 4]}
        data["curves"] = {"ahead": curve("GB/s", [[0.5, 2.0]], **axes)}

    clock = VirtualTimeline(replace(costs(change), load_host_s=0.0))
    tickets = clock.read(list(range(count)), list(range(count)), "device", PREFETCH)
    clock.compute_dense(100, 1, 0, final=False)
    assert all(clock.is_ready(ticket) for ticket in tickets)
    alone = GEOMETRY.slot_bytes / (0.5 * GB)
    assert [ticket.done_s for ticket in tickets] == pytest.approx([alone] * count)
    assert clock.now() > alone


def test_engines_have_curves_of_their_own():
    def change(data):
        rows = [[0.5, 2.0]]
        axes = {"sizes_kib": [GEOMETRY.slot_bytes / KIB], "depths": [1, 4]}
        data["curves"] = {
            "reads.mmap": curve("GB/s", rows, **axes),
            "cached.mmap": curve("GB/s", [[8.0, 8.0]], **axes),
            "ahead": curve("GB/s", rows, **axes),
        }

    nbytes = GEOMETRY.slot_bytes
    mapped = costs(change, replace(USE, engine="mmap", page_cache_bytes=10 * nbytes))
    assert mapped.read_s[1] == pytest.approx(nbytes / (0.5 * GB))
    assert mapped.read_s[4] == pytest.approx(nbytes / (2.0 * GB))
    assert mapped.cached_s == pytest.approx(nbytes / (8.0 * GB))
    direct = costs(change)
    assert direct.read_s == BARE.read_s
    clock = VirtualTimeline(replace(direct, load_host_s=0.0))
    tickets = clock.read(list(range(4)), list(range(4)), "device", PREFETCH)
    for ticket in tickets:
        clock.wait(ticket)
    assert clock.now() == pytest.approx(4 * nbytes / (2.0 * GB))


def test_faults_bring_the_neighbours_that_readahead_reaches():
    def change(data):
        data["storage"]["readahead_kib"]["value"] = 3 * GEOMETRY.slot_bytes / KIB  # one and a half on either side
        axes = {"sizes_kib": [4.0], "depths": [1]}
        data["curves"] = {"reads.mmap": curve("GB/s", [[1.0]], **axes), "cached.mmap": curve("GB/s", [[9.0]], **axes)}

    found = costs(change, replace(USE, engine="mmap", page_cache_bytes=100 * GEOMETRY.slot_bytes))
    for declared, cold in ((found, 1), (replace(found, around_bytes=0), 3)):
        clock = VirtualTimeline(declared, Places.in_order(GEOMETRY.keys))
        for key in (10, 9, 11):
            clock.wait(clock.read([key], [0], "device", DEMAND)[0])
        assert clock.storage_requests == cold


def test_reads_alone_compute_nothing():
    bare = reads_only(BARE)
    assert passed(bare) == 0
    clock = VirtualTimeline(bare)
    clock.wait(clock.read([0], [0], "device", DEMAND)[0])
    assert clock.now() == pytest.approx(bare.read_s[1] + bare.load_host_s)


@settings(max_examples=60)
@given(
    st.floats(0.02, 2.0), st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.floats(0, 0.2)), min_size=1,
    max_size=12), st.integers(1, 4),
)  # fmt: skip
def test_a_limit_holds_the_mean_and_takes_nothing_where_it_is_not_reached(rate, bursts, size):
    nbytes = size * MIB
    quick = replace(BARE, read_bytes=nbytes, read_s=(0.0, 1e-5), block_s=0.0, load_host_s=0.0)
    limited = replace(quick, limit_byte_s=1 / (rate * GB))
    clock, key = VirtualTimeline(limited), 0
    for count, ahead, pause in bursts:
        keys = list(range(key, key + count))
        tickets = clock.read(keys, keys, "device", PREFETCH if ahead else DEMAND)
        key += count
        clock._now += pause
        for ticket in tickets:
            clock.wait(ticket)
        assert key * nbytes <= rate * GB * (clock.now() + LIMIT_SLICE_S) * (1 + 1e-9)
    free = VirtualTimeline(quick)
    tickets = free.read(list(range(key)), list(range(key)), "device", DEMAND)
    for ticket in tickets:
        free.wait(ticket)
    wide = VirtualTimeline(replace(quick, limit_byte_s=1e-15))
    for ticket in wide.read(list(range(key)), list(range(key)), "device", DEMAND):
        wide.wait(ticket)
    assert wide.now() == free.now()
