"""Tiers of ssd_llama in the loop, on the committed trace and on made ones: who stays, who passes through, where to."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from ssd_llama_fixtures import ALL, HELD_OUT, TINY, build, decode_trace, options, run, total

from moebench.engine.loop import replay
from moebench.harness.matrices import by_matrix
from moebench.hookspecs import hookimpl
from moebench.step import DECODE, PREFILL
from moebench.systems.ssd_llama import MATRICES, placement
from moebench.timeline.base import DEMAND
from moebench.trace.format import Trace

WIDE = replace(TINY, layers=2, experts=200, top_k=3)  # room for many experts that are used once
HOT, SCAN = 24, 60  # tokens


@functools.cache
def held_out(**changes):
    """The committed trace with device slots for a quarter of the experts and host slots for a sixth."""
    return run(options(**changes), slots=64, host=44)


def hot_then_scan():
    """Two layers whose first six experts take turns, then experts that are used once and never again."""
    hot = [[[(t + i) % 6 for i in range(3)]] * 2 for t in range(HOT)]
    scan = [[[6 + 3 * t + i for i in range(3)]] * 2 for t in range(SCAN)]
    return decode_trace(np.array(hot + scan), WIDE)


def test_a_scan_of_one_off_experts_leaves_the_hot_set_where_it_is():
    """Whatever the score is; without temporary slots last use alone gives the hot set away."""
    hot = [layer * WIDE.experts + e for layer in range(2) for e in range(6)]
    for score in ("frequency_recency", "frequency", "recency"):
        _, watch, _ = run(options(temporary=3, score=score), hot_then_scan(), geometry=WIDE, slots=15, host=8)
        held = np.array([step[0] for step in watch.held])
        assert held[HOT - 1, hot].all()
        assert np.array_equal(held[HOT:], np.broadcast_to(held[HOT - 1], held[HOT:].shape))


def test_recency_alone_gives_the_hot_set_away():
    """The same scan in lasting slots: the score keeps what was used often, last use alone does not."""
    hot = [layer * WIDE.experts + e for layer in range(2) for e in range(6)]
    kept = {}
    for score in ("frequency_recency", "recency"):
        _, watch, _ = run(options(temporary=0, score=score), hot_then_scan(), geometry=WIDE, slots=15, host=8)
        kept[score] = watch.held[-1][0, hot].sum()
    assert kept["frequency_recency"] > kept["recency"] == 0


def test_an_expert_is_promoted_at_the_use_that_earns_it():
    """A cold expert that is used again and again gets a lasting slot at its ``promote_after``-th use, not before."""
    first = [[[(t + i) % 6 for i in range(3)]] for t in range(6)]  # fills the lasting slots, two or three uses each
    again = [[[0, 1, 50]]] * 12
    trace = decode_trace(np.array(first + again), replace(WIDE, layers=1))
    for needed in (2, 7):
        config = options(temporary=3, promote_after=needed, half_life=1.0)
        _, watch, _ = run(config, trace, geometry=replace(WIDE, layers=1), slots=9, host=20)
        resident = np.array([step[0, 50] for step in watch.held[6:]])
        assert resident.argmax() == needed - 1
        assert resident[needed - 1 :].all()


class Order:
    """Checks each departure: device to host, host to nowhere, the least recently used of those the host alone holds."""

    def __init__(self) -> None:
        self.used, self.clock, self.left, self.view = {}, 0, [], None

    @hookimpl
    def acquired(self, keys):
        self.clock += 1
        self.used.update(dict.fromkeys(keys, self.clock))


def test_what_leaves_the_device_goes_to_the_host_and_from_there_the_oldest_is_dropped():
    order = Order()
    _, watch, experts = build(options(), slots=40, host=60, plugins=[order])
    evict, dropped = experts.hooks.evict, []

    def observed(tier, need, candidates, view):
        victims = np.asarray(evict(tier, need, candidates, view))
        if tier == "host":
            stay = np.setdiff1d(candidates, victims)
            assert max(order.used[k] for k in victims.tolist()) <= min(
                (order.used[k] for k in stay.tolist()), default=ALL
            )
            assert not experts.host.free_slots(0)  # it is full
            dropped.extend(victims.tolist())
        return victims

    experts.hooks.evict = observed
    demote, copy, gone, down = experts._demote, experts.timeline.copy, [], []

    def copying(key, source, target, after):
        down.extend([key] * (target[0] == "host"))
        return copy(key, source, target, after)

    def demoting(victims):
        there = [k for k in victims if k in experts.host]
        down.clear()
        demote(victims)
        assert sorted([*there, *down]) == sorted(victims)  # the host has it, or it is copied down
        gone.extend(victims)

    experts._demote, experts.timeline.copy = demoting, copying
    replay(HELD_OUT, experts, 1, ALL)
    assert len(gone) == total(watch, "evictions") - len(dropped) > 0
    assert dropped


def test_without_a_host_tier_more_is_read():
    three, two = held_out()[1], run(options(tiers="two"), slots=64, host=16)[1]
    assert total(two, "demand_reads") == total(three, "demand_reads")  # the device decides alike
    assert total(two, "read_bytes") > total(three, "read_bytes")
    assert not any(step[1].any() for step in two.held)  # the host keeps nothing between steps


def test_every_mechanism_moves_its_own_observable_on_the_committed_trace():
    """Switched off: without temporary slots none is used; without a bound nobody waits for a buffer."""
    base, open_door, unbounded = held_out(), held_out(temporary=0), held_out(pool=0)
    assert base[0].report()["temporary"] > 0 == open_door[0].report()["temporary"]
    assert total(base[1], "evictions") < total(open_door[1], "evictions")
    assert (
        total(held_out(pool=1)[1], "pool_waits") > total(base[1], "pool_waits") > total(unbounded[1], "pool_waits") == 0
    )
    assert total(held_out(pool=1)[1], "stall_s") > total(unbounded[1], "stall_s")
    assert total(base[1], "read_bytes", DECODE) < total(held_out(score="recency", temporary=0)[1], "read_bytes", DECODE)
    assert held_out(granularity="none")[0].report()["kept"] == 0 < base[0].report()["kept"]


@pytest.mark.parametrize("config", [{}, {"temporary": 0}, {"pool": 1}, {"promote_after": 5}, {"tiers": "two"}])
def test_a_prompt_pass_loads_each_active_expert_once(config):
    """One pass over the prompt; cut into chunks, experts that left in between are loaded again."""
    geometry = replace(TINY, layers=4)
    rng = np.random.default_rng(5)
    rows = np.array([[rng.permutation(32)[:4] for _ in range(4)] for _ in range(40)], np.int16)
    known = {"model": "made", "experts": 32, "top_k": 4, "source": "test"}
    columns = (np.zeros(40, np.int8), np.zeros(40, np.int32), np.arange(40, dtype=np.int32))
    trace = Trace(rows, *columns, metadata=known)
    active = sum(len(np.unique(rows[:, layer])) for layer in range(4))
    whole = run(options(**config), trace, geometry=geometry, slots=20, host=18)[1]
    cut = run(options(**config), trace, chunk=10, geometry=geometry, slots=20, host=18)[1]
    assert total(whole, "demand_reads", PREFILL) == active
    assert total(cut, "demand_reads", PREFILL) > active


def test_temporary_slots_bound_the_waves_of_a_prompt_pass():
    *_, experts = build(options(temporary=4), slots=24, host=40)
    fetch, most = experts._fetch, []

    def fetching(keys, priority):
        if priority == DEMAND:
            most.append(len(keys))
        fetch(keys, priority)

    experts._fetch = fetching
    replay(HELD_OUT, experts, 1, ALL)
    assert max(most) <= 4


# --- placement ---------------------------------------------------------------------------------------------------


def test_residency_is_the_same_wherever_experts_run(monkeypatch):
    monkeypatch.setattr(placement, "HOLD", 40)
    _, base, _ = held_out()
    for choice in ("1", "3", "4", "auto"):
        _, watch, experts = run(options(placement=choice), slots=64, host=44)
        assert np.array_equal(np.array(watch.held), np.array(base.held))
        assert total(watch, "read_bytes") == total(base, "read_bytes")
        assert total(watch, "on_host", DECODE) > 0
        assert total(watch, "on_host", PREFILL) == 0
        if choice.isdecimal():
            assert total(watch, "on_host") == int(choice) * TINY.layers * sum(
                r.step.phase == DECODE for r in base.records
            )
        experts.scratch.check_integrity()
        assert not (experts.scratch.slot_of >= 0).any()


@pytest.mark.parametrize(("host", "device", "few"), [(2e-2, 1e-4, True), (1e-6, 2e-2, False)])
def test_auto_finds_the_faster_side(monkeypatch, host, device, few):
    """A slow host gets nothing, a fast one everything; and the choice shows in the time of a token."""
    system, *_ = run(
        options(placement="auto"), slots=200, host=60, host_expert_s=host, expert_s=device, copy_back_s=1e-6
    )
    assert system.report()["splits_tried"] >= 1
    assert (system.placement.count == 0) if few else (system.placement.count >= 3)


# --- granularity -------------------------------------------------------------------------------------------------


def matrices(trace=HELD_OUT, geometry=TINY):
    return by_matrix(geometry, trace, "packed", "none")


def test_whole_experts_in_single_slots_are_the_same_reads_and_hits():
    """Keeping all three matrices of an expert, the transformed trace reads and hits what the plain one does.

    With the pool and the waves in matrices too; the score of an expert's three matrices is one, so they come and go
    together.
    """
    geometry, trace = matrices()
    plain = run(options(temporary=4, pool=2), slots=60)[1]
    config = options(temporary=4, pool=2, granularity="gate_up")
    system, watch, experts = build(config, slots=180, geometry=geometry)
    system.admission.lasting[:] = True
    replay(trace, experts, 1, ALL)
    assert geometry.expert_bytes * 3 == TINY.expert_bytes
    assert total(watch, "read_bytes") == total(plain, "read_bytes")
    for units, experts_ in zip(watch.records, plain.records, strict=True):
        assert units.hits == [3 * n for n in experts_.hits]


def test_keeping_parts_of_experts_costs_requests_or_hits():
    """Bytes of slots alike: gates alone hit more often by request and save fewer bytes; nothing kept saves none."""
    read, asked, hits = {}, {}, {}
    geometry, trace = matrices()
    for name in ("expert", "gate_up", "gate", "none"):
        split = name in ("gate_up", "gate")
        shape, steps, units = (geometry, trace, MATRICES) if split else (TINY, HELD_OUT, 1)
        config = options(granularity=name, temporary=4, tiers="two")
        _, watch, experts = run(config, steps, geometry=shape, slots=64 * units, host=16 * units)
        read[name], asked[name] = total(watch, "read_bytes", DECODE), experts.timeline.storage_requests
        hits[name] = np.mean([sum(r.hits) / sum(r.requests) for r in watch.records if r.step.phase == DECODE])
    assert read["expert"] < read["gate_up"] < read["none"]
    assert read["expert"] < read["gate"] < read["none"]
    assert asked["expert"] < min(asked["gate"], asked["none"])
    assert hits["gate"] > 0
    assert hits["none"] == 0


def test_missing_matrices_of_one_expert_are_one_request():
    geometry, trace = matrices()
    _, watch, experts = run(options(granularity="gate"), trace, geometry=geometry, slots=192, host=132)
    runs = total(watch, "demand_reads")
    assert experts.timeline.storage_requests < runs
    config = options(granularity="gate")
    system, _, experts = build(config, slots=192, host=132, geometry=geometry)
    experts.begin(next(iter(watch.records)).step)
    assert system.plan_reads([1, 2, 3, 5, 6, 7, 8, 10], experts.view) == [(1, 2), (3,), (5,), (6, 7, 8), (10,)]
