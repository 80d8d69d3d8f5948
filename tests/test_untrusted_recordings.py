"""Recordings, published adapters and texts that somebody else wrote: understood, or refused in one line."""

from __future__ import annotations

import gzip
import io
import json
import zipfile

import numpy as np
import pytest
import torch
from artefact_fixtures import model_folder
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from untrusted_fixtures import PLAIN, TRICKS, damaged, damaged_bytes, fuzz, joined, one_line, split

from moebench.harness.assets import load_tokenizer, read_prompts
from moebench.jsonl import read_jsonl
from moebench.quality import parity
from moebench.systems.edge0 import importer as edge0
from moebench.systems.edge0.prepare import PrepareOptions as Edge0Options
from moebench.systems.specprefetch import importer as specprefetch
from moebench.systems.specprefetch.prepare import PrepareOptions as SpecOptions
from moebench.trace.importers import import_npz
from moebench.trace.rows import Shape, import_csv, import_jsonl

META = {"model": "toy", "source": "test"}
ARRAYS = {
    "experts": np.array([[[0, 1]], [[2, 1]], [[3, 0]]]),
    "offsets": np.array([0, 2, 3]),
    "weights": np.full((3, 1, 2), 0.5),
    "phase": np.array([0, 1, 1]),
}
SAID = {
    "model": "toy",
    "num_experts_per_layer": 4,
    "phase": "decode only",
    "native_top_k": 2,
    "layer_ids": [0],
    "sequences": [{"prompt_tokens": 7}, {"prompt_tokens": 5}],
    "prefill_tokens_total": 9,
}
ROWS = [
    {"token": 0, "layer": 1, "experts": [0, 1], "weights": [0.5, 0.5], "sequence": "a", "phase": "prefill"},
    {"token": 1, "layer": 1, "experts": [3], "sequence": "a"},
]
ODD = st.one_of(
    st.sampled_from([np.zeros(0), np.array(3), np.array([None], object), np.array(["x"]), np.array([1.5, np.nan, 3])]),
    st.sampled_from([np.array([0, 1]), np.array([0, 2**40, 3]), np.array([[0, 2, 3]]), np.full((3, 1, 2), -7)]),
    st.sampled_from([np.full((3, 1, 2), 2**40), np.zeros((3, 0, 2), int), np.zeros((3, 1, 0), int)]),
    st.sampled_from([np.full((3, 1, 2), np.inf), np.array([2, 2, 2]), np.zeros(3, "M8[s]")]),
)  # fmt: skip


def understood(trace) -> None:
    assert (trace.experts >= -1).all()
    assert trace.hash
    assert json.dumps(trace.metadata, allow_nan=False)


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@fuzz(60)
@given(st.data())
def test_npz(tmp_path, data):
    arrays, said = ARRAYS, data.draw(st.one_of(st.just(SAID), damaged(SAID, PLAIN)))
    if data.draw(st.booleans()):
        arrays = {**ARRAYS, data.draw(st.sampled_from(sorted(ARRAYS))): data.draw(ODD)}
    content = npz(**arrays)
    if data.draw(st.integers(0, 3)) == 0:
        content = data.draw(damaged_bytes(content))
    (tmp_path / "trace.npz").write_bytes(content)
    (tmp_path / "meta.json").write_text(json.dumps(said))
    one_line(lambda: understood(import_npz(tmp_path)))


def promising(shape):
    """An npz whose array says that it has this shape, and has no numbers."""
    file, header = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("experts", "offsets"):
            archive.writestr(f"{name}.npy", header.getvalue())
    return file.getvalue()


@pytest.mark.parametrize("shape", [(2**60,), (2**40, 1, 1), (-1,), (3, 2**62, 4)])
def test_an_array_that_promises_too_much_makes_none(tmp_path, shape):
    (tmp_path / "trace.npz").write_bytes(promising(shape))
    (tmp_path / "meta.json").write_text(json.dumps(SAID))
    assert not one_line(lambda: import_npz(tmp_path))


@fuzz(60)
@given(st.data())
def test_rows(tmp_path, data):
    shape = Shape(4, layers=data.draw(st.sampled_from([0, 2])))
    rows = data.draw(damaged(ROWS, PLAIN))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    one_line(lambda: understood(import_jsonl(tmp_path / "a.jsonl", shape, META)))
    names = list(ROWS[0])
    lines = [",".join(json.dumps(row.get(n, "")) for n in names) for row in rows if isinstance(row, dict)]
    content = "\n".join([",".join(names), *lines]).encode()
    (tmp_path / "a.csv").write_bytes(content := data.draw(st.one_of(st.just(content), damaged_bytes(content))))
    one_line(lambda: understood(import_csv(tmp_path / "a.csv", shape, META)))
    (tmp_path / "a.csv.gz").write_bytes(data.draw(damaged_bytes(gzip.compress(content))))
    one_line(lambda: understood(import_csv(tmp_path / "a.csv.gz", shape, META)))


@pytest.mark.parametrize("content", [*TRICKS, b'token,layer,experts\n0,0,"' + b"1 " * 200_000 + b'"\n'])
def test_known_tricks(tmp_path, content):
    for name in ("a.jsonl", "a.csv", "a.csv.gz", "meta.json", "trace.npz"):
        (tmp_path / name).write_bytes(content)
    assert not one_line(lambda: import_jsonl(tmp_path / "a.jsonl", Shape(4), META))
    assert not one_line(lambda: import_csv(tmp_path / "a.csv", Shape(4), META))
    assert not one_line(lambda: import_csv(tmp_path / "a.csv.gz", Shape(4), META))
    assert not one_line(lambda: import_npz(tmp_path))
    assert not one_line(lambda: read_prompts(tmp_path / "a.jsonl", 2, 0))
    (tmp_path / "trace.npz").write_bytes(npz(**ARRAYS))
    assert not one_line(lambda: import_npz(tmp_path))
    (tmp_path / "meta.json").write_text(json.dumps(SAID))
    (tmp_path / "trace.npz").write_bytes(content)
    assert not one_line(lambda: import_npz(tmp_path))


@fuzz(40)
@given(st.data())
def test_texts(tmp_path, folder, data):
    items = data.draw(damaged([{"prompt": "a b", "completion": "c"}, {"prompt": "d", "completion": "e"}], PLAIN))
    content = "".join(json.dumps(item) + "\n" for item in items).encode()
    (tmp_path / "a.jsonl").write_bytes(data.draw(st.one_of(st.just(content), damaged_bytes(content))))
    (tmp_path / "a.txt").write_bytes(data.draw(damaged_bytes(content)))
    one_line(lambda: read_jsonl(tmp_path / "a.jsonl"))
    one_line(lambda: read_prompts(tmp_path / "a.jsonl", 2, data.draw(st.integers(0, 9))))
    for name in ("a.jsonl", "a.txt"):
        one_line(lambda name=name: parity.held_out(str(tmp_path / name), [], load_tokenizer(folder)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with a tokenizer."""
    return model_folder(tmp_path_factory.mktemp("model"))


def published():
    """Heads and adapters as Edge0 and SpecPrefetch publish them, for that model."""
    hidden, experts, width = 64, 8, 64 + 16
    heads = {
        f"layers.1.{part}.weight": torch.ones(shape, dtype=torch.float16)
        for part, shape in {"fc1": (512, width), "fc2": (experts, 512), "linear_init": (experts, width)}.items()
    }
    sides = {"model.layers.0.self_attn.q_proj.lora_A": (2, hidden), "model.layers.0.self_attn.q_proj.lora_B": (64, 2)}
    lora = {name: torch.ones(shape, dtype=torch.float16) for name, shape in sides.items()}
    shapes = {"A": (4, hidden), "B": (experts, 4)}
    pairs = {f"lora_{s}.layer{n}_h1": torch.ones(shapes[s]) for n in range(3) for s in "AB"}
    return {
        "prerouter_x": save(heads, {"K": "1", "owners": "[1]"}),
        "lora_x": save(lora, {"K": "1", "r": "2", "alpha": "4"}),
        "adapters": save(pairs),
    }


@fuzz(25)
@given(st.data())
@pytest.mark.parametrize("name", ["prerouter_x", "lora_x", "adapters"])
def test_published_files(tmp_path, folder, name, data):
    files, source, out = published(), tmp_path / "source", tmp_path / "out"
    source.mkdir(exist_ok=True)
    header, tensors = split(files[name])
    how = data.draw(st.sampled_from(["header", "bytes", "whole"]))
    if how == "header":
        files[name] = joined(data.draw(damaged(header, PLAIN)), tensors)
    elif how == "bytes":
        files[name] = data.draw(damaged_bytes(files[name]))
    chosen = ["adapters"] if name == "adapters" else ["prerouter_x", "lora_x"]
    for each in chosen:
        (source / f"{each}.safetensors").write_bytes(files[each])
    convert, options = (specprefetch.convert, SpecOptions()) if name == "adapters" else (edge0.convert, Edge0Options())
    done = one_line(lambda: convert(options, source, folder, "small", out))
    assert done or how != "whole"
    left = [path.name for path in out.rglob("*")] if out.exists() else []
    assert not [entry for entry in left if entry.startswith(".")]
