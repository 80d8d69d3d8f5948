"""A pack holds its source's weights in every disk layout, is complete or clearly not, and is never overwritten."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from store_fixtures import SHAPES, SmallSource

from moebench.geometry import Geometry
from moebench.store import partial as partial_module
from moebench.store.engines import StoreError
from moebench.store.layout import QuantSpec
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer, drop_page_cache, page_cache_bytes
from moebench.store.plain import PlainLayout
from moebench.store.quant import dequantize, expert_digest, logical_hash, quantize
from moebench.store.writer import write_pack, write_random_pack
from moebench.units import PAGE

ORDER = np.random.default_rng(7).permutation(12)


def make(out, kind="int4", layout="packed", source=None, **options):
    order = ORDER if layout == "ordered" else None
    source = source or SmallSource()
    return write_pack(out, source, QuantSpec(kind), PlainLayout(), layout=layout, order=order, **options)


def experts_of(pack):
    for key in range(pack.keys):
        buffer = aligned_buffer(pack.slot_bytes)
        pack.read(key, buffer)
        yield buffer[: pack.expert_bytes]


def tree(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_layouts_hold_the_same_experts(tmp_path, kind):
    packs = [make(tmp_path / layout, kind, layout) for layout in ("packed", "ordered", "checkpoint")]
    assert len({pack.manifest.logical_hash for pack in packs}) == 1
    assert len({pack.manifest.hashes for pack in packs}) == 1
    for experts in zip(*map(experts_of, packs), strict=True):
        assert np.array_equal(experts[0], experts[1])
        assert np.array_equal(experts[0], experts[2])
    assert len({pack.file_path.read_bytes() for pack in packs}) == 3
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {
        "manifest.json",
        "experts.bin",
        "dense.safetensors",
    }


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_views_decode_to_the_quantised_source(tmp_path, kind):
    pack, source, layout = make(tmp_path / "p", kind, "ordered"), SmallSource(), PlainLayout()
    digests = []
    for key, buffer in enumerate(experts_of(pack)):
        views = pack.views(buffer)
        assert all(np.shares_memory(view, buffer) for view in views.values())
        tensors = [layout.decode(w.name, w.kind, w.shape, views) for w in pack.manifest.weights]
        digests.append(expert_digest(tensors))
        for tensor in tensors:
            weights = source.expert(*divmod(key, pack.experts))[tensor.name]
            assert tensor.shape == SHAPES[tensor.name]
            assert np.array_equal(dequantize(tensor), dequantize(quantize(tensor.name, weights, QuantSpec(kind))))
    assert logical_hash(digests) == pack.manifest.logical_hash


def test_extents_are_aligned_in_the_order_asked_for(tmp_path):
    pack = make(tmp_path / "p", layout="ordered")
    offsets = np.array([pack.segments(key)[0].offset for key in range(pack.keys)])
    assert np.array_equal(np.argsort(offsets), ORDER)
    assert np.all(offsets % PAGE == 0)
    assert pack.file_path.stat().st_size == pack.keys * pack.slot_bytes


def test_checkpoint_segments_tile_the_file_without_overlap(tmp_path):
    pack = make(tmp_path / "p", layout="checkpoint")
    pieces = sorted(piece for key in range(pack.keys) for piece in pack.segments(key))
    ends = [piece.offset + piece.nbytes for piece in pieces]
    assert [piece.offset for piece in pieces] == [0, *ends[:-1]]
    assert 0 <= pack.file_path.stat().st_size - ends[-1] < PAGE
    assert len(pack.segments(0)) == len(pack.manifest.tensors) > 1


def test_dense_and_experts_are_verified(tmp_path):
    pack = make(tmp_path / "p")
    seen = []
    pack.verify(lambda done, total: seen.append((done, total)))
    assert seen == [(key + 1, 12) for key in range(12)]
    for path, words in ((pack.file_path, "layer 1, expert 1"), (pack.dense_path, "dense.safetensors")):
        data = bytearray(path.read_bytes())
        data[5 * pack.slot_bytes if path == pack.file_path else 3] ^= 4
        path.write_bytes(data)
        with pytest.raises(StoreError, match=words):
            Pack.open(tmp_path / "p").verify()


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", ["experts.bin", "dense.safetensors"])
def test_a_file_of_the_wrong_size_is_named_with_both_sizes(tmp_path, name, change):
    path = make(tmp_path / "p").path / name
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(StoreError) as caught:
        Pack.open(tmp_path / "p")
    assert all(word in str(caught.value) for word in (name, str(size), str(size + change)))


def test_missing_and_foreign_packs_are_refused(tmp_path):
    with pytest.raises(StoreError, match="no expert pack at"):
        Pack.open(tmp_path / "nothing")
    with pytest.raises(StoreError, match="has no manifest"):
        Pack.open(tmp_path)
    pack = make(tmp_path / "p")
    pack.dense_path.unlink()
    with pytest.raises(StoreError, match=r"dense\.safetensors is missing"):
        Pack.open(pack.path)
    (pack.path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(StoreError, match="not a text file"):
        Pack.open(pack.path)


def test_an_equal_request_reuses_the_pack_and_another_is_refused(tmp_path):
    first = make(tmp_path / "p")
    before, source = tree(first.path), SmallSource()
    assert make(tmp_path / "p", source=source).manifest.to_json() == first.manifest.to_json()
    assert source.asked == []
    for options, word in (
        ({"kind": "int8"}, "quant"),
        ({"layout": "checkpoint"}, "layout"),
        ({"source": SmallSource(seed=1)}, "model"),
    ):
        with pytest.raises(StoreError, match=f"exists with another {word}; remove it or choose another out="):
            make(tmp_path / "p", **options)
    assert tree(first.path) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="not an expert pack"):
        make(tmp_path / "other")


@pytest.mark.parametrize("fail_at", [1, 3, 6, 12])
@pytest.mark.parametrize("layout", ["packed", "ordered", "checkpoint"])
def test_an_interrupted_pack_resumes_to_the_same_bytes(tmp_path, layout, fail_at):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "p", layout=layout, source=SmallSource(fail_at=fail_at))
    assert not (tmp_path / "p").exists()
    for path in ("p", "p.partial"):
        with pytest.raises(StoreError, match="interrupted"):
            Pack.open(tmp_path / path)
    source = SmallSource()
    resumed = make(tmp_path / "p", layout=layout, source=source)
    finished = (fail_at - 1) // 4 * 4  # whole batches; the very first expert is asked for once more, for its shapes
    order = ORDER if layout == "ordered" else np.arange(12)
    assert source.asked[1:] == [divmod(key, 4) for key in order[finished:].tolist()]
    resumed.verify()
    whole = make(tmp_path / "q", layout=layout)
    assert tree(resumed.path) == tree(whole.path)


def test_a_torn_journal_line_is_written_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "p", source=SmallSource(fail_at=10))
    journal = tmp_path / "p.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-7])
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "p", source=SmallSource(fail_at=6))  # finishes the torn layer 1, then stops in layer 2
    source = SmallSource()
    make(tmp_path / "p", source=source).verify()
    assert {layer for layer, _ in source.asked[1:]} == {2}


def test_a_partial_of_another_request_or_another_process_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "p", source=SmallSource(fail_at=10))
    with pytest.raises(StoreError, match=r"another request \(differs in quant\); remove it"):
        make(tmp_path / "p", "int8")
    request = make(tmp_path / "q").manifest.request
    held = partial_module.PartialPack(tmp_path / "p", request)
    with held.guarded(0), pytest.raises(StoreError, match="another process"):
        make(tmp_path / "p")
    (tmp_path / "r.partial").mkdir()
    (tmp_path / "r.partial" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="something else"):
        make(tmp_path / "r")
    assert (tmp_path / "r.partial" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_says_what_is_needed_and_resumes(tmp_path, monkeypatch, code):
    written, real = [], os.pwrite

    def pwrite(fd, data, offset):
        if len(written) > 6:
            raise OSError(code, os.strerror(code))
        written.append(offset)
        return real(fd, data[: max(1, len(data) // 2)], offset)  # short writes are legal

    monkeypatch.setattr(partial_module.os, "pwrite", pwrite)
    with pytest.raises(
        StoreError, match=r"not enough space, its experts take \d+ bytes .*, and \d+ bytes .* are free"
    ) as caught:
        make(tmp_path / "p")
    assert "p.partial" in str(caught.value)
    assert not (tmp_path / "p").exists()
    monkeypatch.undo()
    make(tmp_path / "p").verify()


@pytest.mark.parametrize(("code", "hint"), [(errno.EFBIG, "ulimit -f"), (errno.EIO, "Input/output error")])
def test_any_other_error_of_the_disk_names_the_path_and_what_to_do(tmp_path, monkeypatch, code, hint):
    def pwrite(fd, data, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(partial_module.os, "pwrite", pwrite)
    with pytest.raises(StoreError, match=f"p.partial: .*{hint}.* to resume, or remove"):
        make(tmp_path / "p")
    monkeypatch.undo()
    make(tmp_path / "p").verify()


def test_a_damaged_pack_in_the_way_is_said_to_be_removed(tmp_path):
    pack = make(tmp_path / "p")
    os.truncate(pack.file_path, 100)
    with pytest.raises(StoreError, match=r"experts.bin has 100 bytes.*remove .*p and pack again"):
        make(tmp_path / "p")


def test_a_disk_without_room_is_noticed_before_the_first_expert_is_written(tmp_path, monkeypatch):
    usage = partial_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(partial_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StoreError, match=r"its experts take 147456 bytes .*, and 1000 bytes .* are free"):
        make(tmp_path / "p")


def test_experts_that_differ_in_shape_are_refused(tmp_path):
    class Uneven(SmallSource):
        def expert(self, layer, expert):
            tensors = super().expert(layer, expert)
            return tensors if (layer, expert) != (1, 2) else {**tensors, "down_proj": tensors["down_proj"][:32]}

    with pytest.raises(StoreError, match="layer 1, expert 2"):
        make(tmp_path / "p", source=Uneven())


def test_orders_that_are_none_are_refused(tmp_path):
    for layout, order in (("ordered", None), ("packed", range(12)), ("ordered", [0] * 12), ("ordered", range(11))):
        with pytest.raises(StoreError, match="order"):
            write_pack(tmp_path / "p", SmallSource(), QuantSpec(), PlainLayout(), layout=layout, order=order)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_random_packs_are_reproducible_and_have_the_bytes_of_gaussian_weights(tmp_path, kind):
    quant = QuantSpec(kind)
    one, two, other = (
        write_random_pack(tmp_path / name, 2, 3, 128, 192, quant, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert tree(one.path) == tree(two.path)
    assert one.manifest.logical_hash != other.manifest.logical_hash
    experts = list(experts_of(one))
    assert len({expert.tobytes() for expert in experts}) == one.keys == 6
    assert one.expert_bytes == Geometry("g", 2, 3, 1, 128, 192, 0, quant=kind).expert_bytes
    weights = np.random.default_rng(0).standard_normal((192, 128), np.float32)
    for part, values in PlainLayout().encode(quantize("gate_proj", weights, quant)).items():
        found = np.concatenate([one.views(expert)[part].ravel() for expert in experts])
        for byte in range(values.itemsize):
            shares = [
                np.bincount(v.view(np.uint8)[byte :: values.itemsize], minlength=256) / v.size
                for v in (found, values.ravel())
            ]
            apart = np.abs(shares[0] - shares[1]).sum() / 2
            assert apart < 0.05 + 8 / np.sqrt(values.size), (part, byte, apart)


def test_random_packs_of_impossible_sizes_are_refused(tmp_path):
    with pytest.raises(StoreError, match="no multiple of group"):
        write_random_pack(tmp_path / "d", 2, 3, 100, 64)
    with pytest.raises(StoreError, match="layers"):
        write_random_pack(tmp_path / "d", 0, 3, 64, 64)


def test_the_page_cache_of_a_file_is_counted_and_dropped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 300_000)
    cached, how = page_cache_bytes(path)
    if cached is None:
        pytest.skip(how)
    assert cached == 300_000
    done, how = drop_page_cache(path)
    if not done:
        pytest.skip(how)
    assert page_cache_bytes(path)[0] < 300_000
    empty = tmp_path / "empty"
    empty.touch()
    assert page_cache_bytes(empty)[0] == 0


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 1_000_000])
def test_aligned_buffers_are_aligned_writable_and_zero(nbytes):
    buffer = aligned_buffer(nbytes)
    assert (buffer.nbytes, buffer.ctypes.data % PAGE, buffer.dtype, buffer.any()) == (nbytes, 0, np.uint8, False)
    buffer[:] = 1


def test_a_partial_of_another_schema_is_not_resumed(tmp_path, monkeypatch):
    from moebench.store import writer

    monkeypatch.setattr(writer, "SCHEMA", 0)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "p", source=SmallSource(fail_at=10))
    monkeypatch.undo()
    with pytest.raises(StoreError, match="differs in schema"):
        make(tmp_path / "p")
