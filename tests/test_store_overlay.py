"""Experts change places in a private copy of a pack: right bytes at every mapped place, whatever is cut short and when,
no read that waits for a swap or meets half of one, and a pack that nobody writes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from read_fixtures import check_all, experts_of, make_packs

from moebench.store import overlay as module
from moebench.store.engines import StoreError
from moebench.store.overlay import JOURNAL, Overlay, remove_dead
from moebench.store.pack import Pack, file_hash
from moebench.store.swap_journal import SIZE, Disk
from moebench.units import PAGE


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return make_packs(tmp_path_factory)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(module, "WRITE_UNIT_BYTES", PAGE)  # several pieces an expert


class Killed(Exception):
    """The moment of death."""


class Dying(Disk):
    """Dies at operation ``at``, inside it where it is a write; with ``power`` what was not synced may be lost."""

    def __init__(self, at, seed=0, power=False):
        self.at, self.count, self.random, self.power = at, 0, random.Random(seed), power
        self.unsynced = []

    def lives(self, last_words=lambda: None):
        self.count += 1
        if self.count <= self.at:
            return
        if self.count == self.at + 1:
            last_words()
            if self.power:
                self.lose()
        raise Killed

    def write(self, fd, data, offset):
        self.unsynced.append((fd, offset, os.pread(fd, len(data), offset), len(data)))
        part = data[: self.random.randrange(len(data) + 1)]
        self.lives(lambda: super(Dying, self).write(fd, part, offset))
        super().write(fd, data, offset)

    def truncate(self, fd, nbytes):
        self.lives()
        super().truncate(fd, nbytes)

    def sync(self, fd):  # nothing is really synced, so that the test is quick
        self.lives()
        self.unsynced = [entry for entry in self.unsynced if entry[0] != fd]

    def lose(self):
        """Of every write that was not synced, storage may still hold what was there before."""
        for fd, offset, before, nbytes in reversed(self.unsynced):
            if self.random.random() < 0.5:
                super().write(fd, memoryview(before), offset)
                if len(before) < nbytes:
                    os.ftruncate(fd, offset + len(before))


SWAPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)).filter(lambda s: s[1] != s[2]),
    min_size=1, max_size=3,
)  # fmt: skip
OPERATIONS_A_SWAP = 4 + 2 * 2 * 3  # two records, and an expert in three pieces twice, each written and synced


@settings(max_examples=150, deadline=None)
@given(swaps=SWAPS, at=st.integers(0, 3 * OPERATIONS_A_SWAP), again=st.integers(0, 14), power=st.booleans(),
       seed=st.integers(0, 99), layout=st.sampled_from(["packed", "ordered"]))  # fmt: skip
def test_a_kill_at_any_moment_leaves_each_swap_done_or_not_done(
    packs, tmp_path_factory, swaps, at, again, power, seed, layout
):
    pack, data = packs[layout], experts_of(packs[layout])
    overlay = Overlay.create(pack, tmp_path_factory.mktemp("overlays"))
    overlay.disk = overlay.journal.disk = Dying(at, seed, power)
    before = after = overlay.place.copy()
    try:
        for layer, i, j in swaps:
            a, b = layer * 4 + i, layer * 4 + j
            before, after = overlay.place.copy(), overlay.place.copy()
            after[[a, b]] = after[[b, a]]
            overlay.swap(a, b, data[a], data[b])
            overlay.adopt()
            before = after
    except Killed:
        pass
    overlay.close()
    with contextlib.suppress(Killed):  # recovery may be killed too
        Overlay.recover(overlay.folder, pack, Dying(again, seed, power)).close()
    recovered = Overlay.recover(overlay.folder, pack, Dying(10**9))
    check_all(recovered)
    assert recovered.place.tolist() in (before.tolist(), after.tolist())
    recovered.swap(0, 3, data[0], data[3])  # and life goes on
    recovered.adopt()
    check_all(recovered)
    recovered.close()
    once_more = Overlay.recover(overlay.folder, pack)
    assert once_more.place.tolist() == recovered.place.tolist()
    once_more.remove()
    assert not overlay.folder.exists()


def journal_of(overlay):
    return (overlay.folder / JOURNAL).read_bytes()


def torn(pack, tmp_path, at):
    """An overlay whose swap of experts 0 and 1 died at operation ``at``."""
    overlay, data = Overlay.create(pack, tmp_path), experts_of(pack)
    overlay.disk = overlay.journal.disk = Dying(at)
    with pytest.raises(Killed):
        overlay.swap(0, 1, data[0], data[1])
    overlay.close()
    return overlay


def test_recovery_mends_what_the_journal_announced_and_without_it_would_not(packs, tmp_path):
    pack = packs["packed"]
    overlay = torn(pack, tmp_path, 8)  # after the first expert was written, amid the second
    plain = Pack.open(pack.path)
    with open(overlay.file_path, "r+b") as file:
        wrong = [k for k in range(4) if pack_hash(file, plain, k) != plain.manifest.hashes[k]]
    assert 0 in wrong
    check_all(recovered := Overlay.recover(overlay.folder, pack))
    assert recovered.place.tolist() == list(range(12))
    assert len(journal_of(recovered)) == SIZE
    recovered.remove()


def pack_hash(file, pack, key):
    file.seek(pack.manifest.offsets[key])
    return xxhash.xxh3_64_hexdigest(file.read(pack.expert_bytes))


def test_a_swap_whose_writes_are_complete_is_finished_not_undone(packs, tmp_path):
    overlay = torn(packs["packed"], tmp_path, OPERATIONS_A_SWAP - 2)  # all but the last record
    recovered = Overlay.recover(overlay.folder, packs["packed"])
    assert recovered.place[:2].tolist() == [1, 0]
    check_all(recovered)
    recovered.remove()


def test_the_pack_is_never_written_and_the_map_says_where_everything_is(packs, tmp_path):
    pack = packs["ordered"]
    before = file_hash(pack.file_path), pack.file_path.stat().st_mtime_ns
    overlay, data = Overlay.create(pack, tmp_path), experts_of(pack)
    for a, b in ((0, 3), (3, 1), (8, 11)):
        overlay.swap(a, b, data[a], data[b])
        assert file_hash(overlay.file_path) != before[0]
        overlay.adopt()
        check_all(overlay)
    assert overlay.written_bytes == 6 * pack.expert_bytes
    assert overlay.copied_bytes in (0, pack.file_path.stat().st_size)
    assert sorted(overlay.position(range(12))) == list(range(12))
    for key in range(12):
        assert overlay.segments(key)[0].offset == overlay.position([key])[0] * pack.slot_bytes
        assert f"offset {overlay.segments(key)[0].offset}" in overlay.where(key)
    assert (file_hash(pack.file_path), pack.file_path.stat().st_mtime_ns) == before
    overlay.verify()
    overlay.remove()


def test_wrong_use_is_one_clear_line(packs, tmp_path):
    pack, other = packs["packed"], packs["ordered"]
    with pytest.raises(
        StoreError, match="layouts packed and ordered without a codec, not in checkpoint with codec=none"
    ):
        Overlay.create(packs["checkpoint"], tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    overlay, data = Overlay.create(pack, tmp_path), experts_of(pack)
    with pytest.raises(StoreError, match="two of one layer"):
        overlay.swap(3, 4, data[3], data[4])
    with pytest.raises(StoreError, match="wrong bytes"):
        overlay.swap(0, 1, data[1], data[0])
    assert len(journal_of(overlay)) == SIZE
    with pytest.raises(StoreError, match="in use by another process"):
        Overlay.recover(overlay.folder, pack)
    overlay.swap(0, 1, data[0], data[1])
    with pytest.raises(StoreError, match="not adopted"):
        overlay.swap(2, 3, data[2], data[3])
    overlay.close()
    with pytest.raises(StoreError, match="overlay of another pack"):
        Overlay.recover(overlay.folder, other)
    path = overlay.folder / JOURNAL
    path.write_bytes(journal := path.read_bytes()[:SIZE] + b"x" + path.read_bytes()[SIZE + 1 :])
    with pytest.raises(StoreError, match="record 1 is damaged"):
        Overlay.recover(overlay.folder, pack)
    path.write_bytes(journal[: SIZE // 2])
    with pytest.raises(StoreError, match="copy of the pack was not finished"):
        Overlay.recover(overlay.folder, pack)
    path.unlink()
    with pytest.raises(StoreError, match="is not an overlay"):
        Overlay.recover(overlay.folder, pack)


def test_folders_of_dead_runs_are_removed_and_those_of_living_ones_are_not(packs, tmp_path):
    living, dead = (Overlay.create(packs["packed"], tmp_path) for _ in range(2))
    dead.close()
    (tmp_path / "half").mkdir()
    remove_dead(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [living.folder]
    check_all(living)
    living.close()
    Overlay.create(packs["packed"], tmp_path).remove()  # the next run clears up
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.parametrize("at", [1, 2, 5, 8, 9, 13])
def test_a_process_that_is_killed_leaves_what_the_next_one_recovers(packs, tmp_path, at):
    pack = packs["packed"]
    script = f"""
        import os, signal
        from pathlib import Path
        from moebench.store import overlay as module
        from moebench.store.pack import Pack
        from moebench.store.pages import aligned_buffer

        class Deadly(module.Disk):
            left = {at}
            def write(self, *args):
                Deadly.left -= 1
                if Deadly.left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                super().write(*args)

        module.WRITE_UNIT_BYTES = 4096
        pack = Pack.open({str(pack.path)!r})
        overlay = module.Overlay.create(pack, Path({str(tmp_path)!r}), Deadly())
        data = [aligned_buffer(pack.slot_bytes) for _ in range(4)]
        for key, buffer in enumerate(data):
            pack.read(key, buffer)
        for a, b in ((0, 1), (2, 3)):
            overlay.swap(a, b, data[a], data[b])
            overlay.adopt()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    recovered = Overlay.recover(folder, pack)
    check_all(recovered)
    assert recovered.place[:2].tolist() == ([1, 0] if at >= 8 else [0, 1])
    recovered.remove()


# --- reads and swaps at the same time ------------------------------------------------------------------------------
