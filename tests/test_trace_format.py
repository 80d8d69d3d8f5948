"""Trace files: what is saved is what is loaded, the hash is the content's, and no damaged file yields a trace."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moebench.step import DECODE, PREFILL, VERIFY, Routing, Step
from moebench.trace import format as trace_format
from moebench.trace.format import Trace, TraceError, load
from moebench.trace.record import Recorder

META = {"model": "toy", "source": "test"}


def make(lengths=(3, 2), *, layers=2, count=6, k=2, seed=0, weighted=True, extras=(), **changes):
    """A small random trace of sequences of the given lengths; a tenth of its ids are absent."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    ids = rng.random((tokens, layers, count)).argsort(axis=-1)[..., :k].astype(np.int16)
    ids[rng.random(ids.shape) < 0.1] = -1
    fields = {
        "experts": ids,
        "weights": rng.random(ids.shape).astype(np.float16) if weighted else None,
        "phase": rng.integers(0, 2, tokens).astype(np.int8),
        "sequence": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "position": np.concatenate([np.arange(n, dtype=np.int32) + 4 for n in lengths]),
        "channels": {name: CHANNELS[name](rng, ids) for name in extras},
        "metadata": {**META, "experts": count, "top_k": k},
    }
    return Trace(**{**fields, **changes})


CHANNELS = {
    "predicted.gate": lambda rng, ids: ids[..., :1].copy(),
    "hidden": lambda rng, ids: rng.random((len(ids), 3)).astype(np.float16),
    "drafts.accepted": lambda rng, ids: rng.integers(0, 4, len(ids)),
}


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    layers=st.integers(1, 3),
    k=st.integers(1, 3),
    seed=st.integers(0, 999),
    weights=st.booleans(),
    channels=st.sets(st.sampled_from(sorted(CHANNELS))),
)
def test_round_trip(tmp_path_factory, *, lengths, layers, k, seed, weights, channels):
    trace = make(lengths, layers=layers, count=3 + k, k=k, seed=seed, weighted=weights, extras=channels)
    path = trace.save(tmp_path_factory.mktemp("trace") / "t.safetensors")
    again = load(path)
    assert again.hash == trace.hash
    assert again.metadata == trace.metadata
    assert np.array_equal(again.experts, trace.experts)
    assert (again.weights is None) == (not weights)
    assert set(again.channels) == channels
    first = path.read_bytes()
    assert again.save(path).read_bytes() == first, "the same trace writes the same bytes"


def test_hash_is_of_the_content_only(tmp_path):
    trace = make(extras=("hidden",))
    reordered = make(experts=np.asfortranarray(trace.experts), extras=("hidden",))
    assert reordered.hash == trace.hash
    assert load(reordered.save(tmp_path / "t.safetensors")).hash == trace.hash
    assert make(extras=("hidden",), metadata={**trace.metadata, "licence": "MIT"}).hash == trace.hash
    for other in (
        make(),
        make(extras=("hidden",), metadata={**trace.metadata, "experts": 7}),
        make(extras=("hidden",), position=trace.position + np.int32(1)),
        make(extras=("hidden",), weights=None),
        make(lengths=(2, 3), extras=("hidden",)),
    ):
        assert other.hash != trace.hash


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": np.array([[[1, 1]]], np.int16)}, "token 0, layer 0 names expert 1 twice"),
        ({"experts": np.array([[[1, 6]]], np.int16)}, "token 0, layer 0 names expert 6 of 6"),
        ({"experts": np.array([[[1, -2]]], np.int16)}, "names expert -2"),
        ({"experts": np.array([[[1, 2]]], np.int32)}, "expected int16"),
        ({"weights": np.full((1, 1, 2), np.nan, np.float16)}, "token 0, layer 0"),
        ({"phase": np.array([2], np.int8)}, "phase"),
        ({"position": np.array([-1], np.int32)}, "negative"),
        ({"channels": {"guess": np.zeros(1)}}, "predicted.<name>"),
        ({"channels": {"hidden": np.zeros(2, np.float16)}}, "does not start with 1 tokens"),
        ({"channels": {"predicted.a": np.array([[[3, 3]]], np.int16)}}, "predicted.a: token 0, layer 0"),
        ({"metadata": {**META, "top_k": 2}}, "lacks experts"),
        ({"metadata": {**META, "experts": 6, "top_k": 3}}, "top_k 3"),
        ({"metadata": {**META, "experts": 6, "top_k": 2, "x": float("nan")}}, "not JSON"),
    ],
)
def test_contradictions_are_named(changes, message):
    with pytest.raises(TraceError, match=message.replace("(", r"\(")):
        make(lengths=(1,), layers=1, **{"weights": None, **changes})


def test_sequences_are_contiguous_and_ascend():
    with pytest.raises(TraceError, match="sequence 0 is not contiguous"):
        make(sequence=np.array([0, 0, 1, 1, 0], np.int32))
    with pytest.raises(TraceError, match="token 1 does not come after"):
        make(position=np.array([5, 5, 6, 0, 1], np.int32))


def test_damaged_and_foreign_files(tmp_path):
    path = make().save(tmp_path / "t.safetensors")
    good = path.read_bytes()
    with pytest.raises(TraceError, match="no such trace"):
        load(tmp_path / "absent")
    path.write_bytes(good[:-3])
    with pytest.raises(TraceError, match="not a readable"):
        load(path)
    path.write_bytes(pickle.dumps({"experts": 1}))
    with pytest.raises(TraceError, match="not a readable"):
        load(path)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(TraceError, match=r"t\.safetensors"):
        load(path)
    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(TraceError, match="not a moebench trace"):
        load(path)
    for header, message in (
        ({"schema": trace_format.SCHEMA + 1}, "newer moebench"),
        ({"schema": trace_format.SCHEMA}, "damaged"),
        ({}, "damaged"),
    ):
        save_file({"x": np.zeros(1)}, path, metadata={trace_format.HEADER: json.dumps(header)})
        with pytest.raises(TraceError, match=message):
            load(path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = make(seed=1).save(tmp_path / "t.safetensors")
    before = load(path).hash

    def broken(*_):
        raise OSError("no")

    monkeypatch.setattr("moebench.scratch.os.fsync", broken)
    with pytest.raises(OSError, match="no"):
        make(seed=2).save(path)
    assert load(path).hash == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_take_keeps_rows_together():
    trace = make(extras=tuple(CHANNELS))
    part = trace.take(slice(1, 4))
    assert np.array_equal(part.experts, trace.experts[1:4])
    assert np.array_equal(part.channels["hidden"], trace.channels["hidden"][1:4])
    assert part.metadata["rows"] == "1:4"


def test_recorder_regroups_interleaved_steps_and_drops_padding():
    want = make(lengths=(4, 4), k=2, extras=("hidden",))
    recorder = Recorder()
    for index in range(4):  # one row of each sequence, and a padding row, per step
        rows = [index, 4 + index, 0]
        valid = np.array([True, True, False])
        step = Step(index, PREFILL if index == 0 else DECODE, want.sequence[rows], want.position[rows], valid)
        routings = [Routing(want.experts[rows, layer], want.weights[rows, layer]) for layer in range(want.layers)]
        recorder.add_step(step, routings, {"hidden": want.channels["hidden"][rows]})
    got = recorder.trace({**META, "experts": 6})
    assert got.phase.tolist() == [0, 1, 1, 1] * 2
    assert np.array_equal(got.experts, want.experts)
    assert np.array_equal(got.weights, want.weights)
    assert np.array_equal(got.position, want.position)
    assert np.array_equal(got.channels["hidden"], want.channels["hidden"])


def test_recorder_refuses_what_it_cannot_record():
    one = np.zeros(1, np.int32)
    recorder = Recorder()
    routing = Routing(np.zeros((1, 1), np.int16), None)
    with pytest.raises(TraceError, match="nothing was recorded"):
        recorder.trace(META)
    with pytest.raises(TraceError, match="verify"):
        recorder.add_step(Step(0, VERIFY, one, one, one == 0), [routing])
    recorder.add_step(Step(0, DECODE, one, one, one == 0), [routing])
    with pytest.raises(TraceError, match="step 1: recorded"):
        recorder.add_step(Step(1, DECODE, one, one + 1, one == 0), [routing], {"hidden": np.zeros((1, 2), np.float16)})
