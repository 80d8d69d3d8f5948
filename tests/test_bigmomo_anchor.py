"""The anchor arithmetic: the swap found is the best of all, and the remembered rounds never cost more after it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.errors import UsageError
from moebench.systems.bigmomo.anchor import Rounds, best_swap, cost_s, requests, slots_of


def plain_region(needed, slots, size):
    """First slot of the anchor region by trying every run, and how many of ``needed`` it holds."""
    taken = {int(slots[e]) for e in needed}
    held = [len(taken & set(range(s, s + size))) for s in range(len(slots) - size + 1)]
    return held.index(max(held)), max(held)


def plain_requests(sets, slots):
    total = 0
    for row in sets:
        needed = np.flatnonzero(row).tolist()
        total += 1 + len(needed) - plain_region(needed, slots, len(needed))[1]
    return total


def plain_best(sets, slots, resident):
    """Every legal swap of the newest round tried in full: how much the best one saves."""
    needed = np.flatnonzero(sets[-1]).tolist()
    start, _ = plain_region(needed, slots, len(needed))
    region = range(start, start + len(needed))
    best = 0
    for i, j in itertools.product(needed, range(len(slots))):
        if slots[i] in region or j in needed or slots[j] not in region or not (resident[i] and resident[j]):
            continue
        moved = slots.copy()
        moved[[i, j]] = moved[[j, i]]
        best = max(best, plain_requests(sets, slots) - plain_requests(sets, moved))
    return best


@st.composite
def layers(draw):
    experts, rounds = draw(st.integers(2, 14)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    sets = rng.random((rounds, experts)) < draw(st.sampled_from([0.15, 0.4, 0.7]))
    sets[~sets.any(1), 0] = True
    resident = rng.random(experts) < draw(st.sampled_from([0.5, 1.0]))
    return sets, rng.permutation(experts), resident


@settings(max_examples=300, deadline=None)
@given(layers())
def test_the_swap_found_is_the_best_of_all_legal_ones(layer):
    sets, slots, resident = layer
    assert requests(sets, slots) == plain_requests(sets, slots)
    swap, best = best_swap(sets, slots, resident), plain_best(sets, slots, resident)
    if swap is None:
        assert best == 0
        return
    assert swap.saved == best > 0
    needed = np.flatnonzero(sets[-1])
    start, _ = plain_region(needed, slots, len(needed))
    region = range(start, start + len(needed))
    assert resident[swap.needed]
    assert resident[swap.idle]
    assert sets[-1][swap.needed]
    assert slots[swap.needed] not in region
    assert not sets[-1][swap.idle]
    assert slots[swap.idle] in region


@settings(max_examples=200, deadline=None)
@given(layers(), st.floats(1e-6, 1e-2), st.floats(1e8, 1e10))
def test_replaying_the_rounds_after_the_swap_costs_less_and_takes_fewer_requests(layer, latency, rate):
    sets, slots, resident = layer
    if (swap := best_swap(sets, slots, resident)) is None:
        return

    def read_s(nbytes):
        return latency + nbytes / rate

    moved = slots.copy()
    moved[[swap.needed, swap.idle]] = moved[[swap.idle, swap.needed]]
    assert requests(sets, moved) == requests(sets, slots) - swap.saved
    gain = cost_s(sets, slots, 4096, read_s) - cost_s(sets, moved, 4096, read_s)
    assert gain == pytest.approx(swap.saved * read_s(4096))


def test_swaps_gather_a_set_that_is_always_read_together_until_none_is_left():
    rng = np.random.default_rng(0)
    sets = np.zeros((4, 32), bool)
    sets[:, rng.choice(32, 8, replace=False)] = True
    slots, everyone, swaps = rng.permutation(32), np.ones(32, bool), 0
    while (swap := best_swap(sets, slots, everyone)) is not None:
        slots[[swap.needed, swap.idle]] = slots[[swap.idle, swap.needed]]
        swaps += 1
    assert requests(sets, slots) == len(sets)  # one request a round
    assert swaps <= 8


def test_what_one_round_gains_and_another_loses_is_left_alone():
    sets = np.array([[1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]], bool)
    assert best_swap(sets[:1], np.arange(6), np.ones(6, bool)) is not None
    sets = np.array([[1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]], bool)
    assert best_swap(sets, np.arange(6), np.ones(6, bool)) is None


def test_rounds_keep_the_last_ones_of_each_layer_and_none_that_read_nothing():
    rounds = Rounds(2, 4, 3)
    assert rounds.of(0).shape == (0, 4)
    assert best_swap(rounds.of(0), np.arange(4), np.ones(4, bool)) is None
    for expert in range(4):
        rounds.add(1, [expert, 3])
        rounds.add(1, [])
    assert [np.flatnonzero(row).tolist() for row in rounds.of(1)] == [[1, 3], [2, 3], [3]]
    assert not len(rounds.of(0))
    with pytest.raises(ValueError, match="at least one round"):
        Rounds(2, 4, 0)


def test_a_layer_that_is_scattered_over_storage_is_refused():
    assert slots_of(np.array([9, 8, 10])).tolist() == [1, 0, 2]
    with pytest.raises(UsageError, match="side by side"):
        slots_of(np.array([9, 8, 11]))
