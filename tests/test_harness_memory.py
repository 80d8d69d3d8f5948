"""A budget buys exactly the slots it pays for: the smallest legal one is stated and runs, one byte less does not."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path

import numpy as np
import psutil
import pytest
from harness_fixtures import MINI, SHORT, mini, plugin  # noqa: F401 - fixtures
from hypothesis import assume, given
from hypothesis import strategies as st

import moebench
from moebench import hardware
from moebench.geometry import Geometry
from moebench.harness.memory import Sizes, StateWatch, make_tiers, size, staging_slots
from moebench.plugins import load_plugins
from moebench.residency.ledger import BudgetError, Ledger
from moebench.step import DECODE, Step
from moebench.systemspec import Handling
from moebench.units import GIB, MIB

GEOMETRY = Geometry(**MINI)
SLOT = GEOMETRY.slot_bytes
PROFILES = Path(str(resources.files("moebench.hardware_profiles")))
SYSTEMS = load_plugins().systems
MAC, CARD = hardware.load(PROFILES / "m4pro.yaml"), hardware.load(PROFILES / "rtx5090_32gb.yaml")


def ask(budget, scope="shared", profile=MAC, staging=0, fixed=0, tiers=1, system="lru", geometry=GEOMETRY):
    return size(geometry, geometry.slot_bytes, SYSTEMS[system], budget, scope, profile, staging, fixed, tiers)


def stated(error) -> str:
    """The smallest legal budget that a refusal names."""
    return re.search(r"budget=(\d+B)", str(error.value))[1]


@given(st.sampled_from(["shared", "per_layer"]), st.integers(0, 10**6), st.sampled_from([1, 2]))
def test_the_smallest_legal_budget_is_stated_exactly(scope, staging, tiers):
    with pytest.raises(BudgetError) as refused:
        ask("1B", scope, CARD if tiers == 2 else MAC, staging, tiers=tiers)
    least = int(stated(refused)[:-1])
    one = {"scope": scope, "profile": CARD if tiers == 2 else MAC, "staging": staging, "tiers": tiers}
    sizes = ask(f"{least}B", **one)
    assert sizes.device == GEOMETRY.top_k * (GEOMETRY.layers if scope == "per_layer" else 1)
    assert (sizes.device + sizes.host) * SLOT + staging == least
    with pytest.raises(BudgetError) as again:
        ask(f"{least - 1}B", **one)
    assert stated(again) == f"{least}B"


@pytest.mark.parametrize("scope", ["shared", "per_layer"])
def test_the_stated_budget_runs_and_one_byte_less_is_refused(mini, scope):  # noqa: F811
    options = {"model": "mini", "hw": "m4pro", "system": "lru", "scope": scope, **SHORT}
    with pytest.raises(BudgetError) as refused:
        moebench.run(budget="1B", **options)
    least = stated(refused)
    (row,) = moebench.run(budget=least, **options)
    assert row.status == "ok"
    assert row.protocol["slots"]["device"] * SLOT == int(least[:-1])
    with pytest.raises(BudgetError):
        moebench.run(budget=f"{int(least[:-1]) - 1}B", **options)


@given(st.floats(0.2, 1.0), st.integers(0, 5 * SLOT))
def test_slots_and_staging_never_exceed_the_budget(fraction, staging):
    sizes = ask(str(fraction), staging=staging, tiers=1)
    budget = int(fraction * GEOMETRY.routed_bytes)
    assert sizes.device * SLOT + staging <= budget
    assert sizes.device == GEOMETRY.keys or (sizes.device + 1) * SLOT + staging > budget
    assert sizes.host == 0


@given(
    st.floats(0.5, 1.0), st.floats(0.1, 1.0), st.integers(0, 40), st.booleans(), st.booleans(), st.integers(0, 2 * SLOT)
)
def test_all_slots_of_two_tiers_on_one_memory_stay_within_the_budget(fraction, part, pool, on_host, keeps, staging):
    handling = Handling(pool=pool, on_host=on_host, host_cache=keeps)
    try:
        sizes = size(
            GEOMETRY, SLOT, SYSTEMS["lru"], str(fraction), "shared", MAC, staging, 0, 2, str(part), handling
        )  # fmt: skip
    except BudgetError:
        assume(False)
    assert (sizes.device + sizes.host + sizes.scratch) * SLOT + staging <= int(fraction * GEOMETRY.routed_bytes)
    assert sizes.host >= max(staging_slots(GEOMETRY), pool)
    assert sizes.scratch == GEOMETRY.top_k * on_host


def test_staging_is_paid_from_the_budget():
    assert ask(f"{20 * SLOT}B").device == 20
    assert ask(f"{20 * SLOT}B", staging=1).device == 19
    assert ask(f"{20 * SLOT}B", staging=3 * SLOT).device == 17


def test_slots_per_layer_are_equal_and_whole():
    sizes = ask(f"{11 * SLOT}B", "per_layer")
    (tier,) = make_tiers(GEOMETRY, SLOT, sizes, "per_layer", False, Ledger())
    assert (tier.group_slots, tier.slots) == (2, 8)  # 11 slots among 4 layers
    assert tier.capacity_bytes <= 11 * SLOT


def test_slots_of_a_measured_run_are_in_memory_before_it_begins():
    big = 4 * MIB  # bytes of a slot, so that all of them are far more than what else happens
    before = psutil.Process().memory_info().rss
    (tier,) = make_tiers(GEOMETRY, big, Sizes(16, 0), "shared", True, Ledger())
    assert psutil.Process().memory_info().rss - before >= 0.9 * tier.capacity_bytes
    assert not any(row.any() for row in tier.rows)


def test_more_than_all_experts_is_never_taken():
    assert ask("1.0").device <= GEOMETRY.keys
    assert ask("3GiB").device == GEOMETRY.keys


@pytest.mark.parametrize(("system", "slots"), [("resident", GEOMETRY.keys), ("ondemand", GEOMETRY.top_k)])
def test_floor_and_ceiling_ignore_the_budget(system, slots):
    assert ask("0.3", system=system).device == ask("0.9", system=system).device == slots


def test_two_tiers_fill_the_device_first_and_keep_the_rest_on_the_host():
    staging = staging_slots(GEOMETRY)
    roomy = ask(f"{(40 + staging) * SLOT}B", profile=CARD, tiers=2)
    assert (roomy.device, roomy.host) == (40, staging)
    full = int(CARD.device_gib * GIB) - 15 * SLOT - 7
    tight = ask(f"{(40 + staging) * SLOT}B", profile=CARD, tiers=2, fixed=full)
    assert (tight.device, tight.host) == (15, 25 + staging)
    with pytest.raises(BudgetError, match="no room for one layer's experts of mini"):
        ask("0.5", profile=CARD, tiers=2, fixed=full + 14 * SLOT)


def test_a_large_model_on_a_card_overflows_to_the_host():
    large = dataclasses.replace(GEOMETRY, layers=40, experts=128, hidden=2048, intermediate=2048)
    wanted = large.routed_bytes
    assert 32 * GIB < wanted < 60 * GIB
    sizes = ask("1.0", profile=CARD, tiers=2, geometry=large, fixed=GIB)
    assert sizes.device == (31 * GIB) // large.slot_bytes
    assert sizes.host > staging_slots(large)
    assert (sizes.device + sizes.host) * large.slot_bytes <= wanted


def test_what_the_machine_cannot_hold_is_refused_with_both_numbers():
    with pytest.raises(
        BudgetError, match=r"mini under resident holds 24\.0 GiB, more than the 19\.0 GiB that Mac mini"
    ):
        ask("0.5", system="resident", fixed=int(24 * GIB) - SLOT)


def test_the_peak_is_the_sum_of_what_is_booked(mini):  # noqa: F811
    (row,) = moebench.run(model="mini", hw="m4pro", system="lru", budget=f"{20 * SLOT}B", **SHORT)
    (more,) = moebench.run(model="mini", hw="m4pro", system="lru", budget=f"{30 * SLOT}B", **SHORT)
    peak, larger = (round(r.metrics["peak_active_gib"].value * GIB) for r in (row, more))
    assert larger - peak == 10 * SLOT
    # 2 requests of 8 + 24 tokens, one at a time; the last token is emitted and never fed
    state = (8 + 23) * GEOMETRY.kv_bytes_per_token + GEOMETRY.fixed_state_bytes
    rows, hidden, width = 8, GEOMETRY.hidden, GEOMETRY.intermediate
    activations = rows * 2 * (hidden * (4 + 2) + 2 * width * 2) + GEOMETRY.vocabulary * 4
    assert peak == 20 * SLOT + GEOMETRY.dense_bytes + state + activations
    assert row.metrics["allocator_peak_gib"].value == row.metrics["peak_active_gib"].value


def test_host_slots_are_memory_but_not_the_devices(mini):  # noqa: F811
    (row,) = moebench.run(model="mini", hw="rtx5090_32gb", system="lru", budget="0.9", **SHORT)
    host = row.protocol["slots"]["host"] * SLOT
    both = row.metrics["peak_active_gib"].value - row.metrics["allocator_peak_gib"].value
    assert round(both * GIB) == host > 0


def test_a_memory_cap_refuses_with_the_numbers(mini):  # noqa: F811
    options = {"model": "mini", "hw": "m4pro", "system": "lru", "budget": "0.5", **SHORT}
    (free,) = moebench.run(**options)
    peak = round(free.metrics["peak_active_gib"].value * GIB)
    (capped,) = moebench.run(memory=f"{peak}B", **options)
    assert capped.metrics["decode_tok_s"].value == free.metrics["decode_tok_s"].value
    with pytest.raises(BudgetError, match=r"memory cap of .* is too small: kv needs .* raise memory="):
        moebench.run(memory=f"{peak - 1}B", **options)
    with pytest.raises(BudgetError, match="expert slots needs"):
        moebench.run(memory=f"{20 * SLOT}B", **options)


def step(sequences, positions) -> Step:
    return Step(
        0, DECODE, np.array(sequences, np.int32), np.array(positions, np.int32), np.ones(len(sequences), bool), 1
    )


def test_state_follows_the_longest_position_of_each_sequence():
    ledger = Ledger()
    watch = StateWatch(ledger, GEOMETRY)
    token, fixed = GEOMETRY.kv_bytes_per_token, GEOMETRY.fixed_state_bytes
    watch.end_step(step([0, 0, 1], [0, 1, 4]), None, None)
    assert ledger.current["kv"] == (2 + 5) * token + 2 * fixed
    watch.end_step(step([1], [5]), None, None)
    assert ledger.current["kv"] == (2 + 6) * token + 2 * fixed
    watch.begin_request([2], None)
    watch.end_step(step([2], [0]), None, None)
    assert ledger.current["kv"] == token + fixed
    assert ledger.peak_bytes == 8 * token + 2 * fixed
    ledger.check_integrity()


def test_siblings_of_a_draft_each_have_state():
    ledger = Ledger()
    watch = StateWatch(ledger, GEOMETRY)
    watch.end_step(step([0] * 7, [9, 10, 10, 11, 11, 11, 11]), None, None)
    assert ledger.current["kv"] == 16 * GEOMETRY.kv_bytes_per_token + GEOMETRY.fixed_state_bytes


def test_a_backends_own_count_of_state_wins():
    ledger = Ledger()
    StateWatch(ledger, GEOMETRY, lambda: 12345).end_step(step([0], [7]), None, None)
    assert ledger.current["kv"] == 12345
