"""Every disk layout stores every byte once, in as many pieces as it says; models of time count the pieces of the packs
that are written; and runs compute the same whatever the layout and the codec."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from engine_fixtures import Adversary
from store_fixtures import SmallSource
from test_live_identity import Lab, check_same
from torch_models import native_model

from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_source import TransformersSource
from moebench.config import RunConfig
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.harness.costs import coded_bytes, pieces
from moebench.plugins import load_plugins
from moebench.store.engines import StoreError, open_engine
from moebench.store.extents import DISK_LAYOUTS, WHOLE, Extents
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.plain import PlainLayout
from moebench.store.random_parts import random_specs
from moebench.store.writer import write_pack, write_random_pack
from moebench.systemspec import RunContext
from moebench.units import PAGE, align_up

READS = {"checkpoint": 9, "scattered": 3, "packed_gate": 3, "packed_gate_up": 2, "packed": 1}  # of an int4 expert


def geometry(kind="int4", hidden=128, intermediate=192) -> Geometry:
    return Geometry("g", 2, 5, 2, hidden, intermediate, 0, quant=kind)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    return {layout: write_random_pack(folder / layout, 2, 5, 128, 192, layout=layout) for layout in READS}


def test_layouts_hold_the_same_experts_in_files_of_their_own(packs):
    assert len({pack.manifest.hashes for pack in packs.values()}) == 1
    assert len({pack.file_path.read_bytes() for pack in packs.values()}) == len(READS)
    for pack in packs.values():
        pack.verify()


@pytest.mark.parametrize("layout", READS)
def test_an_expert_has_the_pieces_of_its_layout(packs, layout):
    pack = packs[layout]
    for key in range(pack.keys):
        found = pack.segments(key)
        assert len(found) == READS[layout]
        assert [s.offset for s in found] == sorted(s.offset for s in found)
        assert sum(s.nbytes for s in found) == pack.manifest.lengths[key]
        covered = np.zeros(pack.expert_bytes, int)
        for segment in found:
            covered[segment.dest : segment.dest + segment.nbytes] += 1
        for start, end in pack.manifest.extents.gaps():
            covered[start:end] += 1
        assert (covered == 1).all()


@pytest.mark.parametrize("layout", DISK_LAYOUTS)
def test_pieces_lie_apart_and_fill_the_file(layout):
    specs = random_specs(128, 192, QuantSpec())
    order = tuple(np.random.default_rng(0).permutation(10).tolist()) if layout == "ordered" else None
    extents = Extents(layout, 2, 5, specs, order)
    bounds = sorted((s.offset, s.offset + s.nbytes) for key in range(10) for s in extents.segments(key))
    assert all(end <= start for (_, end), (start, _) in pairwise(bounds))
    assert align_up(bounds[-1][1]) == extents.file_bytes
    for piece in extents.pieces:
        starts = [s.offset for key in range(10) for s in extents.segments(key) if s.dest == piece.dest]
        assert all(start % PAGE == 0 for start in starts) or not piece.aligned
    assert np.array_equal(extents.offsets, [extents.segments(key)[0].offset for key in range(10)])
    assert np.array_equal(np.argsort(np.argsort(extents.offsets)), extents.position) or layout not in WHOLE


@pytest.mark.parametrize("layout", ["scattered", "checkpoint"])
def test_stacked_pieces_stand_side_by_side_expert_after_expert(packs, layout):
    pack = packs[layout]
    for layer in range(2):
        rows = [pack.segments(layer * 5 + expert) for expert in range(5)]
        for column in zip(*rows, strict=True):
            assert all(a.offset + a.nbytes == b.offset for a, b in pairwise(column))


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("layout", READS)
def test_modeled_machines_count_the_pieces_that_a_random_pack_has(tmp_path, layout, kind):
    pack = write_random_pack(tmp_path / "p", 2, 5, 128, 192, QuantSpec(kind), layout=layout)
    found = [s.nbytes for s in pack.segments(3)]
    counted = pieces(geometry(kind), layout, "pread")
    assert len(counted) == len(found)
    for one, two, piece in zip(counted, found, pack.manifest.extents.pieces, strict=True):
        assert one == (align_up(two) if piece.aligned else two)
    beyond = np.array(pieces(geometry(kind), layout, "direct")) - np.array(counted)
    assert beyond.tolist() == [0 if piece.aligned else PAGE for piece in pack.manifest.extents.pieces]
    assert pack.expert_bytes == geometry(kind).expert_bytes


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_the_modeled_size_of_a_coded_expert_is_that_of_coded_packs(tmp_path, kind):
    large = geometry(kind, 256, 512)
    pack = write_random_pack(tmp_path / "p", 1, 4, 256, 512, QuantSpec(kind), codec="rans")
    assert coded_bytes(large) == pytest.approx(pack.mean_stored_bytes, rel=0.01)
    assert coded_bytes(large) < large.expert_bytes * 0.97


@pytest.mark.parametrize("engine", ["mmap", "pread", "direct", "uring"])
@pytest.mark.parametrize("layout", [*READS, "rans"])
def test_engines_deliver_every_layout_and_the_codec(packs, tmp_path, layout, engine):
    pack = write_random_pack(tmp_path / "p", 2, 5, 128, 192, codec="rans") if layout == "rans" else packs[layout]
    wanted = aligned_buffer(pack.slot_bytes)
    buffers = [aligned_buffer(pack.slot_bytes) for _ in range(pack.keys)]
    try:
        with open_engine(engine, pack) as reader:
            futures = [reader.submit(key, buffer, 0) for key, buffer in enumerate(buffers)]
            nbytes = sum(future.result(timeout=20) for future in futures)
            assert reader.bytes_read == nbytes >= sum(pack.manifest.lengths)
    except StoreError as error:
        if "refuse" not in str(error) and "io_uring" not in str(error):
            raise
        pytest.skip(str(error))
    for key, buffer in enumerate(buffers):
        packs["packed"].read(key, wanted)
        assert np.array_equal(buffer[: pack.expert_bytes], wanted[: pack.expert_bytes])


def test_layouts_that_these_matrices_cannot_have_are_refused(tmp_path):
    class Fused(SmallSource):
        def expert(self, layer, expert):
            tensors = super().expert(layer, expert)
            return {name: tensors[name] for name in ("gate_up_proj", "down_proj")}

    def write(layout):
        return write_pack(tmp_path / layout, Fused(), QuantSpec(), PlainLayout(), layout=layout)

    assert [len(write(layout).segments(0)) for layout in ("scattered", "packed_gate_up")] == [2, 2]
    with pytest.raises(StoreError, match="packed_gate needs experts that begin with gate_proj, not gate_up_proj, down"):
        write("packed_gate")
    assert not (tmp_path / "packed_gate").exists()


@pytest.mark.parametrize("layout", ["scattered", "packed_gate", "packed_gate_up", "checkpoint"])
def test_a_run_with_a_codec_for_scattered_experts_is_refused(layout):
    with pytest.raises(UsageError, match="codec=rans codes whole experts: it needs layout=packed or ordered"):
        RunConfig(system="lru", hw="m4pro", layout=layout, codec="rans")


# --- live ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["int4", "none"])
def lab(request, tmp_path_factory):
    folder, quant = tmp_path_factory.mktemp("lab"), QuantSpec(request.param)
    found = Lab(folder, request.param)
    source = TransformersSource(native_model("qwen3_moe", hidden_size=128, moe_intermediate_size=64), "bfloat16")
    for name, options in {
        "rans": {"codec": "rans"},
        "scattered": {"layout": "scattered"},
        "packed_gate_up": {"layout": "packed_gate_up"},
    }.items():
        found.packs[name] = write_pack(folder / name, source, quant, TorchCpuLayout(), **options)
        assert found.packs[name].manifest.logical_hash == found.packs["packed"].manifest.logical_hash
    return found


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("name", ["rans", "scattered", "packed_gate_up"])
def test_live_runs_give_the_very_bits_of_an_uncoded_packed_pack(lab, name, engine):
    resident, system = lab.run(full=True), load_plugins().system("lru")
    lru = system.make(system.config(), RunContext(lab.geometry, 5, "shared"))
    try:
        check_same(lab.run(full=True, layout=name, engine=engine), resident)
        check_same(lab.run([lru], slots=5, layout=name, engine=engine), resident)
        check_same(lab.run([lru], slots=6, layout=name, engine=engine, clock="virtual"), resident)
        if name == "rans":  # it also reads neighbours in one request, which whole experts alone allow
            check_same(lab.run([Adversary(3)], slots=6, host=5, layout=name, engine=engine), resident)
    except StoreError as error:
        if "refuses direct reads" not in str(error):
            raise
        pytest.skip(str(error))


def test_a_bit_flip_in_a_coded_expert_is_an_error_and_never_a_wrong_token(lab):
    with pytest.raises(StoreError, match="expert"):
        lab.run(slots=4, layout="rans", engine="faulty", bit_flip=0.3, seed=1)
