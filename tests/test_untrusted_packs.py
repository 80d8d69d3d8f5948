"""Packs, their journals and artefacts that somebody else wrote, or that were damaged: understood, or refused in one
line; what is understood reads inside its files alone.
"""

from __future__ import annotations

import json
import shutil

import artefact_fixtures
import numpy as np
import pytest
import specprefetch_fixtures
from flashmoe_fixtures import random_nets
from hypothesis import given
from hypothesis import strategies as st
from store_fixtures import SmallSource
from untrusted_fixtures import PLAIN, TRICKS, damaged, damaged_bytes, fuzz, joined, one_line, split

from moebench.artefact import stored
from moebench.store.layout import QuantSpec
from moebench.store.manifest import PackManifest, _checksum
from moebench.store.overlay import Overlay
from moebench.store.pack import MANIFEST, Pack
from moebench.store.pages import aligned_buffer
from moebench.store.partial import JOURNAL
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack
from moebench.systems.bigmomo import acceptance
from moebench.systems.edge0 import artefact as edge0
from moebench.systems.flashmoe import artefact as flashmoe
from moebench.systems.moe_infinity import artefact as moe_infinity
from moebench.systems.specprefetch import artefact as specprefetch

LAYOUTS = ["packed", "scattered", "rans"]


def write(folder, kind="packed", source=None):
    layout, codec = ("packed", "rans") if kind == "rans" else (kind, "none")
    return write_pack(folder, source or SmallSource(), QuantSpec(), PlainLayout(), layout=layout, codec=codec)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A small pack of each kind."""
    at = tmp_path_factory.mktemp("packs")
    return {kind: write(at / kind, kind).path for kind in LAYOUTS}


def read_all(folder):
    """Open a pack and read its first and last expert; what opens says only what lies in its files."""
    pack = Pack.open(folder)
    size = pack.file_path.stat().st_size
    buffer = aligned_buffer(pack.slot_bytes)
    for key in (0, pack.keys - 1):
        assert all(0 <= s.offset <= s.offset + s.nbytes <= size for s in pack.segments(key))
        pack.read(key, buffer)
        assert {name: view.shape for name, view in pack.views(buffer).items()}
    assert json.loads(json.dumps(pack.manifest.request)) == pack.manifest.request
    pack.position(np.arange(pack.keys))


@fuzz(60)
@given(st.data())
@pytest.mark.parametrize("kind", LAYOUTS)
def test_manifests(packs, tmp_path, kind, data):
    folder = shutil.copytree(packs[kind], tmp_path / "p", dirs_exist_ok=True)
    body = json.loads((folder / MANIFEST).read_text())
    del body["checksum"]
    body = data.draw(damaged(body, PLAIN))
    if isinstance(body, dict):  # whoever changes a file can change its checksum too
        body["checksum"] = _checksum(body)
    (folder / MANIFEST).write_text(json.dumps(body))
    one_line(lambda: read_all(folder))


@fuzz(30)
@given(st.data())
@pytest.mark.parametrize("kind", LAYOUTS)
def test_bytes_of_packs(packs, tmp_path, kind, data):
    folder = shutil.copytree(packs[kind], tmp_path / "p", dirs_exist_ok=True)
    file = folder / data.draw(st.sampled_from([MANIFEST, "experts.bin"]))
    content = file.read_bytes()
    file.write_bytes(made := data.draw(damaged_bytes(content)))
    if one_line(lambda: Pack.open(folder).verify()):  # then spaces differ at most, or what no expert holds
        assert Pack.open(folder).manifest.to_json() == Pack.open(packs[kind]).manifest.to_json()
    else:
        assert made != content


@pytest.mark.parametrize("content", TRICKS)
def test_tricks_in_manifests(packs, tmp_path, content):
    folder = shutil.copytree(packs["packed"], tmp_path / "p")
    (folder / MANIFEST).write_bytes(content)
    assert not one_line(lambda: Pack.open(folder))
    assert not one_line(lambda: PackManifest.from_json(content.decode("latin-1")))
    assert not one_line(lambda: write(folder))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A pack whose writing stopped after two of three layers."""
    at = tmp_path_factory.mktemp("partial")
    with pytest.raises(KeyboardInterrupt):
        write(at / "p", source=SmallSource(fail_at=9))
    return at


@fuzz(25)
@given(st.data())
def test_journals_of_interrupted_packs(interrupted, tmp_path, data):
    shutil.rmtree(tmp_path / "at", ignore_errors=True)
    journal = shutil.copytree(interrupted, tmp_path / "at") / "p.partial" / JOURNAL
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    if data.draw(st.booleans()):
        content = data.draw(damaged_bytes(journal.read_bytes()))
    else:
        made = data.draw(damaged(lines, PLAIN))
        content = b"".join(json.dumps(line).encode() + b"\n" for line in made)
    journal.write_bytes(content)
    one_line(lambda: write(tmp_path / "at" / "p"))
    if (tmp_path / "at" / "p").exists():  # what is named a pack is one
        Pack.open(tmp_path / "at" / "p")


@fuzz(40)
@given(st.data())
def test_journals_of_overlays(packs, tmp_path, data):
    pack = Pack.open(packs["packed"])
    shutil.rmtree(tmp_path / "o", ignore_errors=True)
    overlay = Overlay.create(pack, tmp_path / "o")
    folder, (a, b) = overlay.folder, (aligned_buffer(pack.slot_bytes) for _ in range(2))
    pack.read(0, a), pack.read(1, b)
    overlay.swap(0, 1, a, b)
    overlay.journal.close()
    kept = (folder / "journal").read_bytes()
    (folder / "journal").write_bytes(data.draw(damaged_bytes(kept)))

    def recover():
        found = Overlay.recover(folder, pack)
        for key in range(pack.keys):  # wherever it says that they stand, there they are
            found.read(key, a)
        found.journal.close()

    one_line(recover)


def saved(folder):
    """One artefact of every system that brings some: reader, folder, file."""
    nets = {kind: random_nets(kind, layers=2, experts=4, hidden=4) for kind in ("joint", "shared")}
    counts = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    right = np.array([[5, 3], [6, 4]])
    return {
        "edge0": (edge0, edge0.save(artefact_fixtures.artefact(), folder / "edge0"), edge0.PREROUTER),
        "lora": (edge0, edge0.save(artefact_fixtures.artefact(), folder / "lora"), edge0.LORA),
        "flashmoe": (
            flashmoe,
            flashmoe.save(flashmoe.Fitted("m", "w", 2, "t", "joint", nets), folder / "flashmoe"),
            flashmoe.FILE,
        ),
        "moe_infinity": (
            moe_infinity,
            moe_infinity.save(moe_infinity.Prepared("m", 2, "t", counts), folder / "moe_infinity"),
            moe_infinity.FILE,
        ),
        "specprefetch": (
            specprefetch,
            specprefetch.save(specprefetch_fixtures.artefact(), folder / "specprefetch"),
            specprefetch.FILE,
        ),
        "bigmomo": (
            acceptance,
            acceptance.save(acceptance.Counted("m", "w", 2, "lookup", "lookup", 9, right), folder / "bigmomo"),
            acceptance.FILE,
        ),
    }


ARTEFACTS = ["edge0", "lora", "flashmoe", "moe_infinity", "specprefetch", "bigmomo"]


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("artefacts"))


@fuzz(50)
@given(st.data())
@pytest.mark.parametrize("name", ARTEFACTS)
def test_artefacts(artefacts, tmp_path, name, data):
    reader, folder, file = artefacts[name]
    copy = shutil.copytree(folder, tmp_path / "a", dirs_exist_ok=True)
    header, tensors = split((copy / file).read_bytes())
    how = data.draw(st.sampled_from(["said", "tensors", "bytes"]))
    if how == "said":  # the digest of the tensors still holds
        said = json.loads(header["__metadata__"]["moebench"])
        header["__metadata__"]["moebench"] = json.dumps(data.draw(damaged(said, PLAIN)))
        content = joined(header, tensors)
    elif how == "tensors":
        content = joined(data.draw(damaged(header, PLAIN)), tensors)
    else:
        content = data.draw(damaged_bytes(joined(header, tensors)[:600])) + joined(header, tensors)[600:]
    (copy / file).write_bytes(content)
    one_line(lambda: reader.load(copy))


@pytest.mark.parametrize("content", TRICKS)
@pytest.mark.parametrize("name", ARTEFACTS)
def test_tricks_in_artefacts(artefacts, tmp_path, monkeypatch, name, content):
    reader, folder, file = artefacts[name]
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    copy = shutil.copytree(folder, tmp_path / "artefacts" / "x" / "a")
    header, tensors = split((copy / file).read_bytes())
    header["__metadata__"]["moebench"] = content.decode("latin-1")
    for made in (content, joined(header, tensors), joined({"__metadata__": {}}, b"")):
        (copy / file).write_bytes(made)
        assert not one_line(lambda: reader.load(copy))
        assert list(stored("x", "moebench", file)) == []  # passed over with a warning
