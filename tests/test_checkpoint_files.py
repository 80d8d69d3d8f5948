"""Hostile and broken safetensors folders: one clear line, no crash, nothing read outside the folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.checkpoint.files import DTYPES, INDEX, SINGLE, Checkpoint, read_header
from moebench.store.engines import StoreError

ENTRIES = {
    "a": {"dtype": "BF16", "shape": [4, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]},
    "c": {"dtype": "U8", "shape": [0, 5], "data_offsets": [28, 28]},
}
DATA = np.arange(28, dtype=np.uint8).tobytes()


def image(header=None, data=DATA, length=None):
    text = json.dumps(ENTRIES if header is None else header).encode() if not isinstance(header, bytes) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def folder(path, files, config="{}"):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config)
    for name, content in files.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_tensors_come_back_whole_and_by_rows(tmp_path):
    made = Checkpoint(folder(tmp_path / "m", {SINGLE: image({"__metadata__": {"format": "pt"}, **ENTRIES})}))
    assert list(made.tensors) == ["a", "b", "c"]
    whole = np.frombuffer(DATA[:24], "<u2").reshape(4, 3)
    np.testing.assert_array_equal(made.read("a"), whole)
    np.testing.assert_array_equal(made.read("a", 1, 3), whole[1:3])
    np.testing.assert_array_equal(made.read("a", 2, 99), whole[2:])
    assert made.read("b") == np.frombuffer(DATA[24:], "<f4")[0]
    assert made.read("c").shape == (0, 5)


def one(**entry):
    return {"a": {**ENTRIES["a"], **entry}}


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "cut short"),
        (b"\x00" * 7, "cut short"),
        (image(length=1 << 60), "cut short"),
        (image(b"[]", b""), "not a JSON object"),
        (image(b"{" * 2000, b""), "not JSON"),
        (image(b"[" * 200_000, b""), "not JSON"),
        (image(b'{"a": \xff}', b""), "not JSON"),
        (image(b'{"a": 1, "a": 2}', b""), "stands there twice"),
        (image({"a": []}), "not understood"),
        (image({"a": {"dtype": "BF16", "shape": [4, 3]}}), "not understood"),
        (image(one(dtype="F4")), "not understood"),
        (image(one(dtype=["BF16"])), "not understood"),
        (image(one(shape=3)), "not understood"),
        (image(one(shape=[4, -3])), "does not take bytes 0 to 24"),
        (image(one(shape=[4, 3.0])), "does not take bytes"),
        (image(one(shape=[True, 12])), "does not take bytes"),
        (image(one(shape=[2**61, 2**61])), "does not take bytes"),
        (image(one(data_offsets=[24, 0])), "does not take bytes"),
        (image(one(data_offsets=[0, 24, 28])), "not understood"),
        (image(one(data_offsets=[2**61, 2**61 + 24])), "starts at byte"),
        (image(one(data_offsets=[4, 28])), "starts at byte 4, the one before ends at 0"),
        (image(one()), "has 71 bytes|download complete"),
        (image({**ENTRIES, "d": ENTRIES["a"]}), "starts at byte 0, the one before ends at 24"),
        (image(data=DATA[:-1]), "is the download complete"),
        (image(data=DATA + b"x"), "is the download complete"),
    ],
)
def test_a_file_that_does_not_hold_together_is_one_line(content, hint, tmp_path):
    with pytest.raises(StoreError, match=hint) as caught:
        Checkpoint(folder(tmp_path / "m", {SINGLE: content}))
    assert str(tmp_path / "m") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@given(
    at=st.integers(0, 400), flips=st.binary(min_size=1, max_size=12), cut=st.integers(0, 40), more=st.binary(max_size=9)
)
@settings(max_examples=300, deadline=None)
def test_any_damage_is_an_error_or_leaves_every_tensor_inside_the_file(tmp_path_factory, at, flips, cut, more):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    content = bytearray(image())
    at %= len(content)
    content[at : at + len(flips)] = flips
    content = content[: len(content) - cut] + more
    path.write_bytes(content)
    try:
        found = read_header(path)
    except StoreError:
        return
    for stored in found.values():
        assert 8 <= stored.offset <= stored.offset + stored.nbytes <= len(content)
        assert stored.nbytes == DTYPES[stored.dtype].itemsize * int(np.prod(stored.shape))


SHARDS = {
    "x.safetensors": image({"a": ENTRIES["a"]}, DATA[:24]),
    "y.safetensors": image({"z": ENTRIES["a"]}, DATA[:24]),
}
MAP = {"a": "x.safetensors", "z": "y.safetensors"}


def test_an_index_names_the_shards(tmp_path):
    made = Checkpoint(folder(tmp_path / "m", {**SHARDS, INDEX: {"weight_map": MAP}, "other.safetensors": b"rubbish"}))
    assert {n: s.file.name for n, s in made.tensors.items()} == MAP


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({}, "holds no safetensors"),
        ({INDEX: b"{"}, "is not JSON"),
        ({INDEX: {}}, "has no weight_map"),
        ({INDEX: {"weight_map": []}}, "has no weight_map"),
        ({INDEX: {"weight_map": {"a": 3}}}, "no file of this folder"),
        ({INDEX: {"weight_map": {"a": "../x.safetensors"}}}, "no file of this folder"),
        ({INDEX: {"weight_map": {"a": "/etc/x.safetensors"}}}, "no file of this folder"),
        ({INDEX: {"weight_map": {"a": "sub/x.safetensors"}}}, "no file of this folder"),
        ({INDEX: {"weight_map": {"a": "config.json"}}}, "no file of this folder"),
        ({INDEX: {"weight_map": {"a": "..safetensors/.."}}}, "no file of this folder"),
        ({INDEX: {"weight_map": MAP}}, "x.safetensors is missing; is the download complete"),
        ({**SHARDS, INDEX: {"weight_map": {**MAP, "q": "x.safetensors"}}}, "tensor q is not in x.safetensors"),
        ({**SHARDS, INDEX: {"weight_map": {**MAP, "z": "x.safetensors", "a": "y.safetensors"}}}, "is not in"),
        ({**SHARDS, "y.safetensors": SHARDS["x.safetensors"], INDEX: {"weight_map": MAP}}, "a is in x.safe.* and in y"),
    ],
)  # fmt: skip
def test_an_index_that_lies_is_one_line(files, hint, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(SHARDS["x.safetensors"])  # what ../ would reach
    with pytest.raises(StoreError, match=hint) as caught:
        Checkpoint(folder(tmp_path / "m", files))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", ["", "[1]", "{", '{"a": 1, "a": 1}', "\x00"])
def test_a_configuration_that_is_none_is_one_line(config, tmp_path):
    with pytest.raises(StoreError, match=r"config\.json is not"):
        Checkpoint(folder(tmp_path / "m", {SINGLE: image()}, config))


def test_a_link_is_its_owners_and_followed(tmp_path):
    (tmp_path / "blob").write_bytes(image())
    made = folder(tmp_path / "m", {})
    (made / SINGLE).symlink_to(Path("..") / "blob")
    np.testing.assert_array_equal(
        Checkpoint(made).read("b"), Checkpoint(folder(tmp_path / "n", {SINGLE: image()})).read("b")
    )


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path):
    made = Checkpoint(folder(tmp_path / "m", {SINGLE: image()}))
    (tmp_path / "m" / SINGLE).write_bytes(image()[:-10])
    with pytest.raises(StoreError, match="was it changed meanwhile"):
        made.read("b")
