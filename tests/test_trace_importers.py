"""Imported recordings: nothing is invented, gaps are declared, and known published statistics come out again."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from moebench.residency.replay import replay
from moebench.trace.format import TraceError
from moebench.trace.importers import import_npz
from moebench.trace.rows import Shape, import_csv, import_jsonl
from moebench.trace.stats import next_layer, overlap

FOLDER = Path(os.environ.get("MOEBENCH_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
META = {"model": "toy", "source": "test"}
recordings = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recorded traces in {FOLDER}; set MOEBENCH_TRACES")


def write_npz(folder, meta=None, **arrays):
    folder.mkdir(exist_ok=True)
    defaults = {"experts": np.array([[[0, 1]], [[2, 1]], [[3, 0]]]), "offsets": np.array([0, 2, 3])}
    np.savez(folder / "trace.npz", **{name: a for name, a in {**defaults, **arrays}.items() if a is not None})
    known = {"model": "toy", "num_experts_per_layer": 4, "phase": "decode only"}
    (folder / "meta.json").write_text(json.dumps({**known, **(meta or {})}))
    return folder


def test_npz_keeps_sequences_and_declares_unrecorded_prompts(tmp_path):
    sequences = [{"prompt_tokens": 7}, {"prompt_tokens": 5}]
    trace = import_npz(write_npz(tmp_path, {"sequences": sequences, "native_top_k": 8}))
    assert trace.sequence.tolist() == [0, 0, 1]
    assert trace.position.tolist() == [7, 8, 5]
    assert trace.phase.tolist() == [1, 1, 1]
    assert trace.metadata["gaps"] == ["12 prompt tokens were not recorded", "2 of the model's own 8 experts a token"]
    assert trace.metadata["native_top_k"] == 8
    assert import_npz(write_npz(tmp_path)).metadata["gaps"] == []


@pytest.mark.parametrize(
    ("meta", "arrays", "message"),
    [
        ({"phase": "mixed"}, {}, "no phase array"),
        ({"sequences": [{}]}, {}, "describes 1 sequences"),
        ({}, {"offsets": np.array([0, 2])}, "do not cut"),
        ({}, {"offsets": None}, "lacks the array offsets"),
        ({"num_experts_per_layer": 3}, {}, "names expert 3 of 3"),
        ({}, {"experts": np.array([{"an": "object"}], dtype=object)}, "not a readable recording"),
    ],
)
def test_npz_faults(tmp_path, meta, arrays, message):
    with pytest.raises(TraceError, match=message):
        import_npz(write_npz(tmp_path, meta, **arrays))


def test_csv_and_json_lines_agree_and_declare_gaps(tmp_path):
    (tmp_path / "a.csv").write_text(
        "token,layer,experts,weights\n0,3,1 2,0.5 0.5\n0,5,0 1,0.75 0.25\n2,5,3 1,0.5 0.5\n"
    )
    rows = [
        {"token": 2, "layer": 5, "experts": [3, 1], "weights": [0.5, 0.5]},
        {"token": 0, "layer": 3, "experts": [1, 2], "weights": [0.5, 0.5]},
        {"token": 0, "layer": 5, "experts": [0, 1], "weights": [0.75, 0.25]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "ranks.csv").write_text("token,layer,expert_0,expert_1\n0,3,1,2\n0,5,0,1\n2,5,3,1\n")
    trace = import_csv(tmp_path / "a.csv", Shape(4), META)
    assert trace.hash == import_jsonl(tmp_path / "a.jsonl", Shape(4), META).hash
    assert np.array_equal(import_csv(tmp_path / "ranks.csv", Shape(4), META).experts, trace.experts)
    assert trace.experts.tolist() == [[[1, 2], [0, 1]], [[-1, -1], [3, 1]]]
    assert trace.position.tolist() == [0, 2]
    assert trace.metadata["layer_ids"] == [3, 5]
    assert trace.metadata["gaps"] == [
        "no rows of layer 4 of 3..5",
        "1 tokens between recorded ones",
        "1 of 4 (token, layer) pairs absent",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("token,experts\n0,1\n", "needs columns"),
        ("token,layer,experts\n", "holds no rows"),
        ("token,layer,experts\n0,0,1 9\n", "outside 0..3"),
        ("token,layer,experts\n0,0,1 x\n", "invalid literal"),
        ("token,layer,experts\n0,0,1 1\n", "expert 1 twice"),
        ("token,layer,experts\n0,0,1\n0,0,2\n", "stands there twice"),
        ("token,layer,experts,phase\n0,0,1,warm\n", "prefill, decode"),
        ("token,layer,experts,weights\n0,0,1 2,0.5\n", "1 weights for 2 experts"),
    ],
)
def test_csv_faults(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(TraceError, match=message):
        import_csv(tmp_path / "a.csv", Shape(4), META)


def test_rows_in_any_order_of_named_sequences_and_packed_files_are_one_trace(tmp_path):
    rows = [(s, t, layer, [(t + layer + e) % 4 for e in range(2)]) for s in "ba" for t in (0, 1, 2) for layer in (7, 8)]
    for name, order in (("plain", rows), ("shuffled", [rows[i] for i in np.random.default_rng(0).permutation(12)])):
        lines = [json.dumps(dict(zip(("sequence", "token", "layer", "experts"), row, strict=True))) for row in order]
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines))
        text = "".join(f"{s},{t},{layer},{e}\n" for s, t, layer, e in ((*r[:3], f'"{r[3]}"') for r in order))
        (tmp_path / f"{name}.csv").write_text("\ufeffsequence,token,layer,experts\n" + text)
    found = [import_jsonl(tmp_path / f"{n}.jsonl.gz", Shape(4), META) for n in ("plain", "shuffled")]
    found += [import_csv(tmp_path / f"{n}.csv", Shape(4), META) for n in ("plain", "shuffled")]
    assert found[0].hash == found[2].hash
    assert [trace.metadata["gaps"] for trace in found] == [[]] * 4
    assert found[0].metadata["sequence_names"] == ["b", "a"]
    names = found[1].metadata["sequence_names"]
    assert sorted(names) == ["a", "b"]
    if names == ["b", "a"]:
        assert found[1].hash == found[0].hash
    assert found[0].sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert found[0].metadata["layer_ids"] == [7, 8]
    (tmp_path / "broken.csv.gz").write_bytes((tmp_path / "plain.jsonl.gz").read_bytes()[:30])
    with pytest.raises(TraceError, match="cannot be read"):
        import_csv(tmp_path / "broken.csv.gz", Shape(4), META)
    with pytest.raises(TraceError, match="cannot be read"):
        import_csv(tmp_path / "none.csv", Shape(4), META)


def test_what_the_model_has_and_the_rows_lack_stays_absent_and_is_declared(tmp_path):
    (tmp_path / "a.csv").write_text("token,layer,experts\n5,3,1\n5,5,0\n6,3,2\n6,5,3\n")
    trace = import_csv(tmp_path / "a.csv", Shape(4, native_top_k=2, layers=4, first_layer=2), META)
    assert trace.experts[:, :, 0].tolist() == [[-1, 1, -1, 0], [-1, 2, -1, 3]]
    assert trace.metadata["layer_ids"] == [2, 3, 4, 5]
    assert trace.metadata["native_top_k"] == 2
    assert trace.metadata["gaps"] == [
        "1 of the model's own 2 experts a token",
        "no rows of layer 2, 4 of 2..5",
        "5 tokens before the first recorded one of their sequence",
    ]
    with pytest.raises(TraceError, match=r"layer 5 is none of 3\.\.4"):
        import_csv(tmp_path / "a.csv", Shape(4, layers=2), META)
    with pytest.raises(TraceError, match="first_layer has no effect"):
        Shape(4, first_layer=1)
    (tmp_path / "b.csv").write_text("token,layer,experts\n0,0,1 2\n")
    with pytest.raises(TraceError, match="more than native_top_k 1"):
        import_csv(tmp_path / "b.csv", Shape(4, native_top_k=1), META)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"token": 0, "layer": 0, "experts": [1.5]}', "1.5 is not a whole number"),
        ('{"token": 0, "layer": 0, "experts": "12"}', "line 1: experts and weights are lists"),
        ('{"token": 0, "layer": 0, "experts": [true]}', "True is not a whole number"),
        ('{"token": 0, "layer": 0}', "line 1 lacks"),
        ("{", "line 1 is not JSON"),
    ],
)
def test_json_line_faults(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(TraceError, match=message):
        import_jsonl(tmp_path / "a.jsonl", Shape(4), META)


def test_weights_beside_some_rows_are_left_out_and_declared(tmp_path):
    (tmp_path / "a.csv").write_text("token,layer,experts,weights\n0,0,1,1.0\n1,0,2,\n")
    trace = import_csv(tmp_path / "a.csv", Shape(4), META)
    assert trace.weights is None
    assert trace.metadata["gaps"] == ["weights stand beside some rows only and were left out"]


@recordings
def test_gpt_oss_recording_has_its_published_overlap():
    trace = import_npz(FOLDER / "gpt-oss-20b")
    assert (trace.layers, trace.expert_count, trace.top_k) == (24, 32, 4)
    part = trace.take(slice(0, 8159))
    assert overlap(part, 1) == pytest.approx(0.459, abs=0.02)  # "step-to-step consistency 45.9 %"
    found = next_layer(part)
    assert found["conditional"] > found["frequency"] + 0.2


@recordings
def test_qwen3_recording_has_its_published_overlap_and_hit_rates():
    trace = import_npz(FOLDER / "qwen3-30b-a3b_k6")
    assert (trace.top_k, trace.metadata["native_top_k"]) == (6, 8)
    assert trace.metadata["gaps"] == ["27 prompt tokens were not recorded", "6 of the model's own 8 experts a token"]
    assert overlap(trace, 1) == pytest.approx(0.380, abs=0.005)
    # 3000 and 4000 MiB of experts of 2.87 MB each: published 70.6 and 80.3 % for one LRU over all layers
    assert replay(trace, "lru", 1096).hit_rate == pytest.approx(0.706, abs=0.015)
    assert replay(trace, "lru", 1461).hit_rate == pytest.approx(0.803, abs=0.015)
    assert replay(trace, "slru", 1461).hit_rate > replay(trace, "lru", 1461).hit_rate
