"""Modeled time of compressed experts: decoded once, where they arrive; what came down decoded is not decoded again."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from engine_fixtures import GEOMETRY, costs

from moebench import hardware
from moebench.harness.costs import StorageUse, build
from moebench.timeline.base import DEMAND, PREFETCH
from moebench.timeline.virtual import VirtualTimeline
from moebench.units import GB

PROFILES = Path(str(resources.files("moebench.hardware_profiles")))
DECODE_S, CODED_S = 2e-3, 1e-4  # longer than a read; shorter than copy_s


@pytest.fixture
def timeline():
    return VirtualTimeline(costs(decode_s=DECODE_S, copy_coded_s=CODED_S, page_cache_bytes=10 * GEOMETRY.slot_bytes))


def up(timeline, key, after=None):
    """Seconds from now until a copy to the device is complete."""
    start = timeline.now()
    timeline.wait(timeline.copy(key, ("host", 0), ("device", 0), after))
    return timeline.now() - start


def test_on_one_memory_experts_are_decoded_one_after_another_as_they_arrive(timeline):
    for ticket in timeline.read([1, 2, 3], [0, 1, 2], "device", DEMAND):
        timeline.wait(ticket)
    first = 1e-3  # the others arrive while it is decoded
    assert timeline.now() == pytest.approx(first + 3 * DECODE_S)
    (again,) = timeline.read([1], [0], "device", DEMAND)
    assert timeline.wait(again) == pytest.approx(1e-5 + DECODE_S)  # the page cache has it compressed


def test_a_prefetch_that_is_taken_back_is_not_decoded(timeline):
    (ahead,) = timeline.read([1], [0], "device", PREFETCH)
    assert timeline.cancel(ahead, None)
    (other,) = timeline.read([2], [0], "device", DEMAND)
    assert timeline.wait(other) == pytest.approx(1e-3 + DECODE_S)


def test_the_host_holds_what_is_stored_and_the_way_up_decodes(timeline):
    latency = timeline.costs.copy_latency_s
    (read,) = timeline.read([1], [0], "host", DEMAND)
    assert timeline.wait(read) == pytest.approx(1e-3)
    assert up(timeline, 1) == pytest.approx(CODED_S + latency + DECODE_S)
    timeline.wait(timeline.copy(1, ("device", 0), ("host", 0), None))
    assert up(timeline, 1) == pytest.approx(timeline.costs.copy_s + latency)  # it came down decoded
    timeline.wait(*timeline.read([1], [0], "host", DEMAND))
    assert up(timeline, 1) == pytest.approx(CODED_S + latency + DECODE_S)  # and lies there as stored again


def test_a_machine_decodes_at_its_own_rate_and_copies_what_is_stored():
    card, stored = hardware.load(PROFILES / "rtx5090_32gb.yaml"), GEOMETRY.slot_bytes // 2
    plain, coded = (
        build(card, GEOMETRY, StorageUse((nbytes,), "direct", stored_bytes=nbytes if nbytes == stored else 0), tiers=2)
        for nbytes in (GEOMETRY.slot_bytes, stored)
    )
    assert (plain.decode_s, plain.copy_coded_s) == (0, 0)
    assert coded.decode_s == pytest.approx(GEOMETRY.expert_bytes / (card.rans_gb_s * GB))
    assert coded.copy_coded_s == pytest.approx(plain.copy_s * stored / GEOMETRY.expert_bytes)
    assert coded.copy_s == plain.copy_s
    assert coded.cached_s < plain.cached_s
