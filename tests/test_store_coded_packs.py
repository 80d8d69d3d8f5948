"""Packs whose experts are coded: the same experts in less room, resumed, and damage that never passes."""

from __future__ import annotations

import numpy as np
import pytest
from store_fixtures import SmallSource

from moebench.store.engines import StoreError
from moebench.store.layout import QuantSpec
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack
from moebench.units import PAGE


def make(out, kind="int4", layout="packed", codec="rans", source=None):
    order = np.random.default_rng(7).permutation(12) if layout == "ordered" else None
    return write_pack(
        out, source or SmallSource(), QuantSpec(kind), PlainLayout(), layout=layout, codec=codec, order=order
    )


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("layout", ["packed", "ordered"])
def test_a_coded_pack_holds_the_same_experts_in_less_room(tmp_path, kind, layout):
    plain, pack = make(tmp_path / "plain", kind, layout, "none"), make(tmp_path / "coded", kind, layout)
    assert pack.coded
    assert not plain.coded
    assert pack.manifest.hashes == plain.manifest.hashes
    assert pack.manifest.logical_hash == plain.manifest.logical_hash
    pack.verify()
    one, two = aligned_buffer(pack.slot_bytes), aligned_buffer(pack.slot_bytes)
    for key in range(pack.keys):
        two[:] = 0xFF
        plain.read(key, one)
        pack.read(key, two)
        assert np.array_equal(one[: pack.expert_bytes], two[: pack.expert_bytes])
    assert pack.mean_stored_bytes == np.mean(pack.manifest.lengths)
    assert pack.landing_bytes >= max(pack.manifest.lengths) > pack.landing_bytes - PAGE
    if kind == "none":
        assert 0.6 < pack.mean_stored_bytes / plain.mean_stored_bytes < 0.75
        assert pack.file_path.stat().st_size < plain.file_path.stat().st_size


@pytest.mark.parametrize("layout", ["packed", "ordered"])
def test_coded_extents_are_aligned_apart_and_without_room_between(tmp_path, layout):
    pack = make(tmp_path / "p", layout=layout)
    (pieces,) = zip(*(pack.segments(key) for key in range(pack.keys)), strict=True)
    starts = np.array([piece.offset for piece in pieces])
    assert np.array_equal(np.argsort(np.argsort(starts)), pack.position(np.arange(pack.keys)))
    ends = starts + -(-np.array(pack.manifest.lengths) // PAGE) * PAGE
    assert sorted(starts) == [0, *sorted(ends)[:-1]]
    assert pack.file_path.stat().st_size == ends.max()


@pytest.mark.parametrize("fail_at", [1, 6, 12])
@pytest.mark.parametrize("layout", ["packed", "ordered"])
def test_an_interrupted_coded_pack_resumes_to_the_same_bytes(tmp_path, layout, fail_at):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "p", layout=layout, source=SmallSource(fail_at=fail_at))
    with pytest.raises(StoreError, match="another request"):
        make(tmp_path / "p", layout=layout, codec="none")
    source = SmallSource()
    resumed, whole = make(tmp_path / "p", layout=layout, source=source), make(tmp_path / "q", layout=layout)
    assert len(source.asked) == 1 + 12 - (fail_at - 1) // 4 * 4
    assert resumed.manifest.to_json() == whole.manifest.to_json()
    assert resumed.file_path.read_bytes() == whole.file_path.read_bytes()


@pytest.mark.parametrize("kind", ["none", "int4"])
def test_damage_anywhere_is_an_error_or_does_no_harm(tmp_path, kind):
    pack = make(tmp_path / "p", kind)
    offset, length, _ = pack.segments(5)[0]
    stored = np.fromfile(pack.file_path, np.uint8)[offset : offset + length]
    buffer, right = aligned_buffer(pack.slot_bytes), aligned_buffer(pack.slot_bytes)
    pack.read(5, right)
    harmless = 0
    for place in range(0, length, 3):
        hurt = stored.copy()
        hurt[place] ^= 1 << place % 8
        try:
            pack.decode(5, hurt, buffer)
        except StoreError:
            continue
        harmless += 1
        assert np.array_equal(buffer[: pack.expert_bytes], right[: pack.expert_bytes])
    assert harmless <= 60  # paddings, and fields of records that raw planes leave empty


def test_damage_on_storage_names_file_expert_and_offset(tmp_path):
    pack = make(tmp_path / "p", "none")
    data, buffer = bytearray(pack.file_path.read_bytes()), aligned_buffer(pack.slot_bytes)
    offset, length, _ = pack.segments(5)[0]
    for place in (0, 5, 200, length // 2, length - 8):  # magic, header, states, words, raw bytes
        hurt = data.copy()
        hurt[offset + place] ^= 0x10
        pack.file_path.write_bytes(hurt)
        with pytest.raises(StoreError, match=rf"experts.bin: layer 1, expert 1, offset {offset}: .*damaged"):
            Pack.open(pack.path).read(5, buffer)
        Pack.open(pack.path).read(4, buffer)


@pytest.mark.parametrize("layout", ["checkpoint", "scattered", "packed_gate_up"])
def test_layouts_that_scatter_an_expert_refuse_a_codec(tmp_path, layout):
    with pytest.raises(StoreError, match=f"layout {layout} stores no coded experts; .* packed, ordered"):
        make(tmp_path / "p", layout=layout)
    with pytest.raises(StoreError, match="codec 'zip' is not one of none, rans"):
        make(tmp_path / "p", codec="zip")
    assert list(tmp_path.iterdir()) == []
