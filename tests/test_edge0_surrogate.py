"""Made-up predictions agree with the router as often as asked, keep a trace's popularity and touch nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.errors import UsageError
from moebench.step import ABSENT, DECODE
from moebench.systems.edge0.surrogate import predicted
from moebench.trace.format import Trace
from moebench.trace.importers import import_npz
from moebench.trace.stats import agreement
from moebench.trace.stats import overlap as neighbours
from moebench.trace.synthetic import SyntheticSpec, synthesize

FOLDER = Path(os.environ.get("MOEBENCH_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
GOLDEN = "a62f42628ccf5d12dfc7be5ae88144ba"
SPEC = SyntheticSpec(layers=8, experts=64, top_k=6, sequences=4, prefill=8, decode=96)


def real(name):
    if not FOLDER.is_dir():
        pytest.skip(f"no recorded traces in {FOLDER}; set MOEBENCH_TRACES")
    return import_npz(FOLDER / name).take(slice(0, 4000))


@pytest.fixture(scope="module", params=["synthetic", "gpt-oss-20b", "qwen3-30b-a3b_k6"])
def trace(request):
    return synthesize(SPEC) if request.param == "synthetic" else real(request.param)


def decoded(trace, channel, layers):
    return channel[trace.phase == DECODE][:, layers]


@pytest.mark.parametrize(("k", "wanted"), [(4, 0.6), (4, 0.25), (3, 0.9), (2, 0.0), (4, 1.0)])
def test_overlap_is_the_asked_one(trace, k, wanted):
    layers = list(range(2, trace.layers - 1))
    channel = predicted(trace, k, layers, wanted, seed=1)
    places = decoded(trace, channel, layers).size
    noise = 5 * (wanted * (1 - wanted) / places) ** 0.5 + (wanted % 1 > 0) / 2**16
    assert agreement(trace.experts[:, layers], channel[:, layers]) == pytest.approx(wanted, abs=noise)
    if wanted == 1:
        assert np.array_equal(decoded(trace, channel, layers), decoded(trace, trace.experts[..., :k], layers))


def test_popularity_stays_and_neighbours_share_no_more(trace):
    layers = list(range(1, trace.layers))
    channel = predicted(trace, 4, layers, 0.6, seed=0)
    own = trace.experts[..., :4]
    distance = []
    for layer in layers:
        used = [decoded(trace, a, layer).ravel() for a in (own, channel)]
        shares = [np.bincount(ids, minlength=trace.expert_count) / len(ids) for ids in used]
        distance.append(abs(shares[0] - shares[1]).sum() / 2)
    assert np.mean(distance) < 0.13  # a uniform fill is 0.16 to 0.30 off
    parts = [
        Trace(
            experts=np.ascontiguousarray(decoded(trace, a, layers)),
            phase=trace.phase[trace.phase == DECODE],
            sequence=trace.sequence[trace.phase == DECODE],
            position=trace.position[trace.phase == DECODE],
            metadata={**trace.metadata, "top_k": 4},
        )
        for a in (own, channel)
    ]
    assert neighbours(parts[1], 1) < neighbours(parts[0], 1)


@settings(max_examples=30)
@given(
    experts=st.integers(2, 24),
    share=st.floats(0, 1),
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=4),
    wanted=st.floats(0, 1),
    absent=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_prediction_is_valid_and_stands_where_it_may(*, experts, share, lengths, wanted, absent, seed):
    lengths = [(p, d + (p == d == 0)) for p, d in lengths]
    top_k = 1 + int(share * (experts // 2 - 1))
    rng = np.random.default_rng(seed)
    phase = np.concatenate([np.repeat([0, 1], pair) for pair in lengths]).astype(np.int8)
    ids = rng.random((len(phase), 4, experts)).argsort(-1)[..., : experts // 2 + 1].astype(np.int16)
    if absent:
        ids[rng.random(ids.shape) < 0.2] = ABSENT
    trace = Trace(
        experts=ids,
        phase=phase,
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32)[::-1], [sum(pair) for pair in lengths]),
        position=np.concatenate([np.arange(sum(pair), dtype=np.int32) for pair in lengths]),
        metadata={"model": "toy", "source": "test", "experts": experts, "top_k": ids.shape[2]},
    )
    channel = predicted(trace, top_k, (1, 3), wanted, seed)
    replace(trace, channels={"predicted.edge0": channel})  # a trace checks type, shape, range and duplicates
    assert (channel[phase != DECODE] == ABSENT).all()
    assert (channel[:, [0, 2]] == ABSENT).all()
    present = decoded(trace, ids[..., :top_k], [1, 3]) != ABSENT
    assert np.array_equal(decoded(trace, channel, [1, 3]) != ABSENT, present)


def test_a_seed_fixes_it():
    trace = synthesize(SPEC)
    one, same, other = (predicted(trace, 4, range(1, 7), 0.6, seed) for seed in (3, 3, 4))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert replace(trace, channels={"predicted.edge0": one}).hash == GOLDEN  # the same on every machine


def test_a_sequence_is_filled_from_itself():
    """Two sequences that share no expert: neither is given one of the other's, but for the lowest unused at a pinch."""
    spec = replace(SPEC, experts=30, top_k=3, sequences=2, reach=1.0)
    trace = synthesize(spec)
    halves = trace.experts + 30 * (trace.sequence == 1)[:, None, None].astype(np.int16)
    trace = replace(trace, experts=halves, metadata={**trace.metadata, "experts": 60})
    channel = predicted(trace, 3, range(8), 0.0, seed=0)
    rows = trace.phase == DECODE
    foreign = channel[rows] // 30 != trace.sequence[rows][:, None, None]
    assert foreign.mean() < 0.05
    assert (channel[rows][foreign] < 6).all()


def test_an_only_token_is_filled_with_the_lowest_unused():
    trace = synthesize(replace(SPEC, sequences=1, prefill=2, decode=1))
    (got,) = predicted(trace, 2, [5], 0.0, seed=0)[trace.phase == DECODE, 5]
    own = trace.experts[-1, 5, :2].tolist()
    assert got.tolist() == [e for e in range(4) if e not in own][:2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "valid: 1..6"),
        ({"top_k": 0}, "valid: 1..6"),
        ({"consumers": (8,)}, "within 0..7"),
        ({"overlap": 1.1}, "0..1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        predicted(**{"trace": synthesize(SPEC), "top_k": 4, "consumers": (1,), "overlap": 0.6, "seed": 0, **change})


def test_nothing_predicted_has_no_overlap():
    trace = synthesize(SPEC)
    assert agreement(trace.experts[:, [1]], np.full((trace.tokens, 1, 2), ABSENT, np.int16)) is None
