"""Imported recordings: nothing is invented, gaps are declared, and known published statistics come out again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from moebench.residency.replay import replay
from moebench.trace.format import TraceError
from moebench.trace.importers import import_csv, import_jsonl, import_npz
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
    assert trace.metadata["gaps"] == ["12 prompt tokens were not recorded"]
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
    trace = import_csv(tmp_path / "a.csv", 4, META)
    assert trace.hash == import_jsonl(tmp_path / "a.jsonl", 4, META).hash
    assert np.array_equal(import_csv(tmp_path / "ranks.csv", 4, META).experts, trace.experts)
    assert trace.experts.tolist() == [[[1, 2], [0, 1]], [[-1, -1], [3, 1]]]
    assert trace.position.tolist() == [0, 2]
    assert trace.metadata["layer_ids"] == [3, 5]
    assert trace.metadata["gaps"] == ["1 of 4 (token, layer) pairs absent"]


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
    ],
)
def test_csv_faults(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(TraceError, match=message):
        import_csv(tmp_path / "a.csv", 4, META)


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
    assert trace.metadata["gaps"] == ["27 prompt tokens were not recorded"]
    assert overlap(trace, 1) == pytest.approx(0.380, abs=0.005)
    # 3000 and 4000 MiB of experts of 2.87 MB each: published 70.6 and 80.3 % for one LRU over all layers
    assert replay(trace, "lru", 1096).hit_rate == pytest.approx(0.706, abs=0.015)
    assert replay(trace, "lru", 1461).hit_rate == pytest.approx(0.803, abs=0.015)
    assert replay(trace, "slru", 1461).hit_rate > replay(trace, "lru", 1461).hit_rate
