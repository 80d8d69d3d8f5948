"""A duel counts whose victim is used later: a policy ties with itself, and a planted decision counts."""

from __future__ import annotations

import numpy as np
import pytest

from moebench.residency.duel import Duel, duel
from moebench.residency.replay import events
from moebench.trace.format import Trace
from moebench.trace.synthetic import SyntheticSpec, synthesize


@pytest.fixture(scope="module")
def todo():
    return events(synthesize(SyntheticSpec(layers=3, experts=24, top_k=3, sequences=2, prefill=8, decode=60)), 8)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_policy_ties_with_itself(todo, policy):
    found = duel(todo, policy, policy, 6 * 3)
    assert found.decisions > 100
    assert found.differing == found.better == 0


def test_two_policies_divide_what_differs_between_them(todo):
    found = duel(todo, "lru", "lfu", 6 * 3)
    assert 0 < found.better < found.differing < found.decisions


def test_one_decision_of_a_known_future():
    demands = np.array([0, 0, 1, 2, 1], np.int16)  # two slots: at 2 LRU drops 0, LFU drops 1, and 1 is wanted first
    rows = np.arange(len(demands), dtype=np.int32)
    metadata = {"model": "made up", "experts": 3, "top_k": 1, "source": "a test"}
    decode, sequence = np.ones(len(rows), np.int8), np.zeros(len(rows), np.int32)
    known = events(Trace(demands[:, None, None], decode, sequence, rows, metadata=metadata))
    assert duel(known, "lru", "lfu", 2) == Duel(decisions=1, differing=1, better=1)
    assert duel(known, "lfu", "lru", 2) == Duel(decisions=2, differing=1, better=0)
