"""Packs in every layout, dirty buffers and a gate before storage, shared by the tests of the read engines."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
import pytest
from store_fixtures import SmallSource

from moebench.store import uring
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack
from moebench.units import PAGE, align_up

LAYOUTS = ("packed", "ordered", "checkpoint", "scattered", "packed_gate_up")
PIECES = {"packed": 1, "ordered": 1, "checkpoint": 7, "scattered": 3, "packed_gate_up": 3, "rans": 1}  # read calls
READERS = ("mmap", "pread", "direct")  # those with threads
NO_URING = uring.refusal()
needs_uring = pytest.mark.skipif(NO_URING is not None, reason=str(NO_URING))
ALL = [*READERS, pytest.param("uring", marks=needs_uring), "faulty"]
WHOLE = {"uring": {}, **{name: {"block_bytes": 0} for name in (*READERS, "faulty")}}  # one call a piece


def experts_of(pack):
    """Buffers with every expert as the pack, or an overlay of it, reads it now."""
    found = [aligned_buffer(pack.slot_bytes) for _ in range(pack.keys)]
    for key, buffer in enumerate(found):
        pack.read(key, buffer)
    return found


def check_all(overlay):
    """Every expert's hash holds at its mapped place, and the map is whole."""
    overlay.check_integrity()
    experts_of(overlay)


def make_packs(tmp_path_factory):
    """The same experts in every layout, and coded; written once, for tests that only read."""
    return _packs_in(tmp_path_factory.getbasetemp() / "read-packs")


@cache
def _packs_in(folder):
    folder.mkdir()
    source, quant, order = SmallSource(), QuantSpec("int4"), np.random.default_rng(3).permutation(12)
    found = {}
    for name in (*LAYOUTS, "rans"):
        layout, codec = ("ordered", "rans") if name == "rans" else (name, "none")
        place = order if layout == "ordered" else None
        found[name] = write_pack(folder / name, source, quant, PlainLayout(), layout=layout, codec=codec, order=place)
    assert len(set(found["rans"].manifest.lengths)) > 1
    return found


def dirty_buffers(pack, count=None):
    buffers = [aligned_buffer(pack.slot_bytes) for _ in range(count or pack.keys)]
    for buffer in buffers:
        buffer[:] = 0xAA
    return buffers


class Gate:
    """Replaces an engine's read call: lets calls through one by one and writes down whose they were."""

    def __init__(self, engine):
        self.engine, self.real = engine, engine._read_at
        self.log, self.started, self.permits = [], threading.Semaphore(0), threading.Semaphore(0)
        self.offsets = []
        engine._read_at = self

    def __call__(self, fd, views, offset):
        self.log.append((offset // self.engine.pack.slot_bytes, offset % self.engine.pack.slot_bytes // PAGE))
        self.offsets.append(offset)
        self.started.release()
        assert self.permits.acquire(timeout=20)
        return self.real(fd, views, offset)

    def open(self):
        self.permits.release(1000)


def run_of(pack, keys):
    """These keys as a run, ascending by place on storage; the bytes of each; and those of the gaps between them."""
    keys = sorted(keys, key=lambda key: int(pack.position([key])[0]))
    pieces = [pack.segments(key)[0] for key in keys]
    sizes = [align_up(piece.nbytes) for piece in pieces]
    return keys, sizes, pieces[-1].offset + sizes[-1] - pieces[0].offset - sum(sizes)
