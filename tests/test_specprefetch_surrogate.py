"""Made-up predictions have the recall asked for, wrong ones are as popular as any, and nothing else is said."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specprefetch_fixtures import held_out

from moebench.errors import UsageError
from moebench.step import ABSENT, DECODE
from moebench.systems.specprefetch.equipment import measured
from moebench.systems.specprefetch.surrogate import chances, predicted
from moebench.trace.importers import import_npz
from moebench.trace.synthetic import SyntheticSpec, synthesize

FOLDER = Path(os.environ.get("MOEBENCH_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
ADAPTER = measured("", "adapter")[1]


def real(name):
    if not FOLDER.is_dir():
        pytest.skip(f"no recorded traces in {FOLDER}; set MOEBENCH_TRACES")
    return import_npz(FOLDER / name).take(slice(0, 3000))


@pytest.fixture(scope="module", params=["synthetic", "held_out", "gpt-oss-20b", "qwen3-30b-a3b_k6"])
def trace(request):
    if request.param == "synthetic":
        return synthesize(SyntheticSpec(layers=6, experts=64, top_k=8, sequences=4, prefill=4, decode=150))
    return held_out(600) if request.param == "held_out" else real(request.param)


def recalls(trace, channel):
    rows = trace.phase == DECODE
    own = trace.experts[rows]
    k = trace.top_k
    return [(own[..., None] == channel[rows][:, :, None, :m]).any(-1).mean() for m in (max(1, k // 2), k, k + 2)]


@pytest.mark.parametrize(
    "recall", [ADAPTER, measured("deepseek-vl2-tiny", "gate")[1], (0.3, 0.5, 0.55), (0.5, 1.0, 1.0)]
)
def test_recall_is_the_asked_one(trace, recall):
    found = recalls(trace, predicted(trace, recall, seed=1))
    rows = int((trace.phase == DECODE).sum()) * trace.layers * trace.top_k
    assert found == pytest.approx(recall, abs=4 * 0.5 / rows**0.5 + 1e-3)


def test_only_decoded_tokens_are_predicted_and_no_expert_twice(trace):
    channel = predicted(trace, ADAPTER, seed=0)
    decoded = trace.phase == DECODE
    assert channel.shape == (trace.tokens, trace.layers, trace.top_k + 2)
    assert (channel[~decoded] == ABSENT).all()
    ordered = np.sort(channel[decoded], axis=2)
    assert (ordered[:, :, 0] >= 0).all()
    assert (np.diff(ordered, axis=2) > 0).all()
    assert np.array_equal(channel, predicted(trace, ADAPTER, seed=0))
    assert not np.array_equal(channel, predicted(trace, ADAPTER, seed=1))


def test_wrong_ones_are_experts_that_the_sequence_uses(trace):
    """Nearly all are what the layer used at another token of the sequence: far more than strangers would be."""
    channel = predicted(trace, (0.0, 0.0, 0.0), seed=0)
    known = total = 0
    for sequence in np.unique(trace.sequence):
        rows = np.flatnonzero((trace.sequence == sequence) & (trace.phase == DECODE))
        for layer in range(trace.layers):
            used = np.unique(trace.experts[rows, layer])
            known += int(np.isin(channel[rows, layer], used).sum())
            total += channel[rows, layer].size
    assert known / total > 0.9


@settings(max_examples=100, deadline=None)
@given(k=st.integers(1, 12), shares=st.lists(st.floats(0, 1), min_size=3, max_size=3).map(sorted))
def test_chances_are_probabilities_that_add_up(k, shares):
    recall = (shares[0] / 2, shares[1], shares[2])
    first, second, third = chances(k, recall)
    assert all(0 <= p <= 1 for p in (first, second, third))
    if first * (k // 2) <= recall[1] * k <= first * (k // 2) + k - k // 2:
        assert first * (k // 2) + second * (k - k // 2) == pytest.approx(recall[1] * k)


def test_what_cannot_be_drawn_is_one_line():
    with pytest.raises(UsageError, match=r"recall .* must ascend within 0\.\.1"):
        predicted(held_out(60), (0.9, 0.5, 0.6), seed=0)
    few = synthesize(SyntheticSpec(layers=2, experts=8, top_k=4, sequences=1, prefill=2, decode=4, reach=1))
    with pytest.raises(UsageError, match="4 of 8 experts leave too few wrong ones"):
        predicted(few, ADAPTER, seed=0)
