"""A manifest comes back from its JSON unchanged, and anything else than that JSON is one clear error, never a crash."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.store.engines import StoreError
from moebench.store.extents import Extents
from moebench.store.layout import QuantSpec, TensorSpec
from moebench.store.manifest import SCHEMA, PackManifest, WeightSpec

PARTS = (TensorSpec("w", (4, 32), "U8", 0, 128), TensorSpec("w.scales", (4,), "BF16", 128, 8))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=6,
)


def example(layout: str = "ordered", codec: str = "none") -> PackManifest:
    order = (5, 3, 1, 0, 2, 4) if layout == "ordered" else None
    lengths = (90, 91, 92, 93, 94, 95) if codec == "rans" else None
    extents = Extents(layout, 2, 3, PARTS, order, lengths)
    return PackManifest(
        model={"name": "m", "config": {"rope": 1e4}},
        layers=2,
        experts=3,
        quant=QuantSpec("int8"),
        byte_layout="plain",
        isa="any",
        layout=layout,
        codec=codec,
        order=order,
        weights=(WeightSpec("w", "int8", (4, 32)),),
        tensors=PARTS,
        expert_bytes=extents.expert_bytes,
        slot_bytes=extents.slot_bytes,
        offsets=tuple(extents.offsets.tolist()),
        lengths=lengths or (extents.stored_bytes,) * 6,
        hashes=tuple(f"{key:016x}" for key in range(6)),
        logical_hash="0" * 32,
        experts_file_bytes=extents.file_bytes,
        dense_bytes=10,
        dense_hash="f" * 16,
        created_by="moebench test",
    )


def sealed(body: dict) -> str:
    """JSON text of ``body`` with a right checksum, so that only the checks of the fields can refuse it."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "checksum": xxhash.xxh3_64_hexdigest(canonical)})


def body_of(manifest: PackManifest) -> dict:
    body = json.loads(manifest.to_json())
    del body["checksum"]
    return body


def refused_or_sound(text: str) -> None:
    try:
        manifest = PackManifest.from_json(text)
    except StoreError:
        return
    manifest.to_json()
    for key in range(manifest.layers * manifest.experts):
        assert sum(segment.nbytes for segment in manifest.extents.segments(key)) == manifest.lengths[key]


@pytest.mark.parametrize(
    ("layout", "codec"),
    [("checkpoint", "none"), ("scattered", "none"), ("packed", "none"), ("packed", "rans"), ("ordered", "rans")],
)
def test_json_round_trip(layout, codec):
    manifest = example(layout, codec)
    again = PackManifest.from_json(manifest.to_json())
    for field in fields(manifest):
        assert getattr(again, field.name) == getattr(manifest, field.name), field.name
    assert again.to_json() == manifest.to_json()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_text_is_refused(data):
    text = example().to_json()
    position = data.draw(st.integers(0, len(text) - 1))
    damaged = data.draw(
        st.sampled_from([text[:position], text[:position] + text[position + 1 :]])
        | st.characters().map(lambda c: text[:position] + c + text[position + 1 :])
    )
    try:
        same = json.loads(damaged) == json.loads(text)
    except ValueError:
        same = False
    if not same:
        with pytest.raises(StoreError):
            PackManifest.from_json(damaged)


@given(st.sampled_from(sorted(body_of(example()))), ANY_JSON, st.sampled_from(["none", "rans"]))
@settings(max_examples=200, deadline=None)
def test_any_value_in_any_field_is_refused_or_sound(name, value, codec):
    refused_or_sound(sealed({**body_of(example("ordered", codec)), name: value}))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_value_inside_a_field_is_refused_or_sound(data):
    body = body_of(example("ordered", data.draw(st.sampled_from(["none", "rans"]))))
    name = data.draw(st.sampled_from(["quant", "weights", "tensors", "offsets", "lengths", "hashes", "order"]))
    place = body[name]
    index = data.draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
    if isinstance(place[index], dict):
        place = place[index]
        index = data.draw(st.sampled_from(sorted(place)))
    place[index] = data.draw(ANY_JSON)
    refused_or_sound(sealed(body))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": SCHEMA + 1}, ["schema", str(SCHEMA + 1), "pack again"]),
        ({"codec": "zip"}, ["codec", "zip", "none", "rans"]),
        ({"codec": "rans", "layout": "checkpoint", "order": None}, ["checkpoint", "packed, ordered"]),
        ({"codec": "rans", "lengths": (500,) * 6}, ["lengths", "500"]),
        ({"codec": "rans", "lengths": (100,) * 5 + (0,)}, ["lengths", "0"]),
        ({"layout": "zipped"}, ["zipped", "packed, ordered"]),
        ({"order": (0, 0, 1, 2, 3, 4)}, ["permutation"]),
        ({"order": None}, ["ordered"]),
        ({"expert_bytes": 137}, ["expert_bytes", "ordered"]),
        ({"offsets": (0,) * 6}, ["offsets"]),
        ({"hashes": ("0" * 16,) * 5}, ["hashes", "5", "6"]),
        ({"logical_hash": "xyz"}, ["logical_hash", "xyz", "32"]),
        ({"dense_bytes": 0}, ["dense_bytes", "0"]),
        ({"tensors": (PARTS[0], replace(PARTS[1], dtype="F64"))}, ["w.scales", "F64"]),
        ({"tensors": (PARTS[0], replace(PARTS[1], nbytes=6))}, ["w.scales", "6", "8"]),
        ({"tensors": (PARTS[0], replace(PARTS[1], offset=64))}, ["w.scales", "64-byte"]),
        ({"model": {"config": object()}}, ["JSON"]),
    ],
)
def test_contradictions_are_named(change, words):
    with pytest.raises(StoreError) as caught:
        replace(example(), **change).to_json()
    assert all(word in str(caught.value) for word in words), caught.value


def test_unknown_and_missing_fields_are_named():
    body = body_of(example())
    with pytest.raises(StoreError, match="colour"):
        PackManifest.from_json(sealed({**body, "colour": 1}))
    del body["isa"]
    with pytest.raises(StoreError, match="isa"):
        PackManifest.from_json(sealed(body))


def test_a_newer_schema_is_refused_before_anything_else():
    with pytest.raises(StoreError, match=f"schema {SCHEMA + 1}"):
        PackManifest.from_json(json.dumps({"schema": SCHEMA + 1, "new": "fields"}))
    with pytest.raises(StoreError, match="not JSON"):
        PackManifest.from_json("[" * 100000)
