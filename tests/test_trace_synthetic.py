"""Synthetic routing: a seed fixes it, each parameter moves its statistic, the defaults match their sources."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.trace.stats import next_layer, overlap, overlap_by_layer, statistics, top_share, unique_experts
from moebench.trace.synthetic import SyntheticSpec, synthesize, uniform

TINY = SyntheticSpec(layers=3, experts=12, top_k=2, sequences=2, prefill=3, decode=70, reach=0.5)
SMALL = SyntheticSpec(layers=6, experts=64, top_k=4, sequences=4, prefill=0, decode=250)
FLAT = replace(SMALL, skew=0.0, reach=1.0, persistence=0.0, layer_link=0.0)
CHANCE = 4 / 64


def test_golden_hashes():
    assert synthesize(TINY).hash == "1c5973132ffca9a35d28ae35c91480de"
    assert uniform(TINY).hash == "f5ff7ad216048d5e21ed2e447f0f28fa"
    assert synthesize(replace(TINY, seed=1)).hash != synthesize(TINY).hash


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(2, 40),
    share=st.floats(0, 1),
    skew=st.floats(0, 4),
    persistence=st.floats(0, 1),
    link=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_every_spec_yields_a_valid_trace(*, experts, share, skew, persistence, link, seed):
    k = 1 + int(share * (experts - 1) / 2)
    sizes = SyntheticSpec(layers=2, experts=experts, top_k=k, sequences=2, prefill=2, decode=5, reach=1.0, seed=seed)
    spec = replace(sizes, skew=skew, persistence=persistence, layer_link=link, topic_share=share)
    for trace in (synthesize(spec), uniform(spec)):  # the trace itself checks ids, ranges and duplicates
        assert trace.tokens == 14
        assert trace.phase.tolist() == [0, 0, 1, 1, 1, 1, 1] * 2
        weights = trace.weights.astype(np.float64)
        assert (weights > 0).all()
        assert (np.diff(weights, axis=-1) <= 0).all()
        assert np.allclose(weights.sum(axis=-1), 1, atol=0.01)


def test_another_text_is_other_requests_to_the_same_model():
    """Layers keep their popular experts and sequences differ; another seed is another model."""

    def popularity(spec):
        trace = synthesize(spec)
        layer = np.arange(spec.layers) * spec.experts
        counts = np.bincount((layer[None, :, None] + trace.experts).ravel(), minlength=spec.layers * spec.experts)
        return counts.astype(float), trace.hash

    spec = replace(SMALL, sequences=12, topic_share=0.3)
    (own, first), (other, second), (foreign, _) = (
        popularity(s) for s in (spec, replace(spec, text=1), replace(spec, seed=1))
    )
    assert first != second
    assert np.corrcoef(own, other)[0, 1] > np.corrcoef(own, foreign)[0, 1] + 0.5


def test_switched_off_it_is_at_chance():
    for trace in (synthesize(FLAT), uniform(FLAT)):
        for lag in (1, 4):
            assert overlap(trace, lag) == pytest.approx(CHANCE, abs=0.01)
        assert top_share(trace) == pytest.approx(0.25, abs=0.05)
        counts = np.bincount(trace.experts[:, 0].ravel(), minlength=64)
        assert ((counts - 62.5) ** 2 / 62.5).sum() < 63 + 4 * np.sqrt(2 * 63), "uniform over experts"


def test_persistence_raises_overlap_at_its_lags():
    seen = [synthesize(replace(FLAT, persistence=p)) for p in (0.0, 0.3, 0.6, 0.9)]
    lag1 = [overlap(trace, 1) for trace in seen]
    assert all(b > a + 0.05 for a, b in pairwise(lag1))
    assert overlap(seen[2], 1) > overlap(seen[2], 8) + 0.1
    short, long = (overlap(synthesize(replace(FLAT, persistence=0.6, memory=m)), 4) for m in (1, 8))
    assert long > short


def test_skew_and_reach_raise_popularity():
    shares = [top_share(synthesize(replace(FLAT, skew=s)), within_sequence=True) for s in (0.0, 0.7, 1.4)]
    assert all(b > a + 0.05 for a, b in pairwise(shares))
    wide, narrow = (unique_experts(synthesize(replace(FLAT, reach=r, topics_per_sequence=1)), 128) for r in (1.0, 0.25))
    assert narrow < wide
    even, uneven = (np.std(overlap_by_layer(synthesize(replace(SMALL, skew_spread=s)), 1)) for s in (0.0, 0.9))
    assert uneven > even


def test_topics_part_sequences_from_each_other():
    spec = replace(SMALL, sequences=12, topic_rate=0.0)
    apart, alike = (synthesize(replace(spec, topic_share=s)) for s in (1.0, 0.0))
    assert top_share(alike) > top_share(apart) + 0.1, "one topic for all concentrates the trace as a whole"
    still, moving = (
        top_share(synthesize(replace(spec, topic_share=1.0, topic_rate=r)), within_sequence=True) for r in (0, 0.05)
    )
    assert still > moving + 0.02, "drift within a sequence spreads it over more experts"
    few, many = (
        top_share(synthesize(replace(spec, topic_rate=0.05, topics_per_sequence=n)), within_sequence=True)
        for n in (1, 8)
    )
    assert few > many
    one, sixteen = (top_share(synthesize(replace(spec, topics=n, topics_per_sequence=1))) for n in (1, 16))
    assert one > sixteen


def test_layer_link_makes_the_next_layer_predictable():
    off, on = (next_layer(synthesize(replace(FLAT, layer_link=link))) for link in (0.0, 0.8))
    assert off["conditional"] == pytest.approx(CHANCE, abs=0.03)
    assert on["conditional"] > 0.3
    assert on["frequency"] < 0.15


def test_defaults_match_the_statistics_they_name():
    trace = synthesize(SyntheticSpec(layers=24, sequences=6))
    assert trace.metadata["fitted_to"]
    assert overlap(trace, 1) == pytest.approx(0.354, abs=0.03)
    qwen = synthesize(SyntheticSpec(layers=24, experts=128, sequences=6))
    assert overlap(qwen, 1) == pytest.approx(0.427, abs=0.04)
    for window, published in ((8, 29.0), (32, 52.8), (128, 75.2)):
        assert unique_experts(qwen, window) == pytest.approx(published, rel=0.1)
    assert "fitted_to" not in synthesize(replace(TINY, skew=0.3)).metadata
    assert "fitted_to" not in uniform(TINY).metadata


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 13},
        {"reach": 0.01},
        {"persistence": 1.1},
        {"decode": 0, "prefill": 0},
        {"topics_per_sequence": 99},
        {"layers": 0},
    ],
)
def test_bad_specs_are_refused(change):
    with pytest.raises(ValueError, match="synthetic trace"):
        replace(TINY, **change)


def test_statistics_of_a_trace_known_by_hand():
    spec = replace(TINY, sequences=1, prefill=0, decode=4, layers=1, top_k=2)
    trace = replace(uniform(spec), experts=np.array([[[0, 1]], [[1, 2]], [[1, -1]], [[0, 3]]], np.int16), weights=None)
    found = statistics(trace)
    assert found["overlap"]["1"] == pytest.approx(2 / 5)  # 1 of 2, 1 of 1, 0 of 2
    assert found["overlap"]["4"] is None
    assert found["unique_experts"]["1"] == pytest.approx(7 / 4)
    assert found["unique_experts"]["2"] == pytest.approx((3 + 3) / 2)  # 0, 1, 2 and 0, 1, 3
    assert found["unique_experts"]["8"] is None
    assert found["unique_experts_in_batch"]["1"] == pytest.approx(7 / 4)
    assert found["unique_experts_in_batch"]["2"] is None, "there is one sequence"
    assert found["reuse_distance"]["p50"] == 1  # distances 1, 1, 3
    assert found["reuse_distance"]["p99"] == 3
    assert found["reuse_distance"]["within"]["2"] == pytest.approx(2 / 7)
    assert found["next_token"]["repeat"] == pytest.approx(2 / 5)
    assert found["popularity"]["gini"] == pytest.approx((2 * (12 * 3 + 11 * 2 + 10 + 9) / 7 - 13) / 12)
    assert found["popularity"]["unused"] == pytest.approx(8 / 12)
    assert top_share(trace, 0.25) == pytest.approx(6 / 7)  # the busiest 3 of 12: 1 thrice, 0 twice, one more


def test_a_prediction_is_compared_with_as_many_of_the_routers_choices():
    spec = replace(TINY, sequences=1, prefill=0, decode=3, layers=2, top_k=2)
    experts = np.array([[[0, 1], [2, 3]], [[1, 2], [4, 5]], [[5, 0], [0, 1]]], np.int16)
    said = np.array([[[-1], [-1]], [[2], [4]], [[5], [7]]], np.int16)
    trace = replace(uniform(spec), experts=experts, weights=None, channels={"predicted.x": said})
    found = statistics(trace)["predicted.x"]
    assert found == {"rows": pytest.approx(4 / 6), "overlap": pytest.approx(2 / 4)}  # 2 is second there, 7 is absent
    silent = replace(trace, channels={"predicted.x": np.full_like(said, -1)})
    assert statistics(silent)["predicted.x"] == {"rows": 0, "overlap": None}
