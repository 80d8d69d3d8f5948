"""A run-private overlay of a pack: a copy of its experts in which two of a layer may change places, crash-safely.

Knows the copied file, the map from expert to place and the journal; decides nothing about who moves. The pack itself is
only read. It is also what makes a swap safe: of a swap that was cut short both experts are written again from the pack.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from moebench.store.engines import StoreError
from moebench.store.extents import WHOLE, Segment
from moebench.store.lock import alone
from moebench.store.pack import EXPERTS, Pack
from moebench.store.pages import aligned_buffer, drop_page_cache
from moebench.store.swap_journal import BEGIN, COMMIT, INTENT, Disk, Journal, Record, try_lock
from moebench.units import KIB, human_bytes

JOURNAL, LOCK = "journal", ".lock"
WRITE_UNIT_BYTES = 256 * KIB
FICLONE = 0x40049409  # Linux: share a file's extents instead of copying them, where the file system can


class Overlay(Pack):
    """A pack whose experts may change places. ``create`` makes one, ``recover`` opens what a crash left.

    ``copied_bytes`` is what making it wrote (0 where the file system shares extents), ``written_bytes`` what swaps
    wrote since.
    """

    def __init__(self, pack: Pack, folder: Path, journal: Journal) -> None:
        super().__init__(pack.path, pack.manifest)
        self.pack, self.folder, self.journal, self.disk = pack, folder, journal, journal.disk
        self.place = np.array(pack.position(np.arange(pack.keys)), np.int64)
        self.copied_bytes = self.written_bytes = 0
        self._fd = os.open(self.file_path, os.O_RDWR)
        self._written: tuple[int, int] | None = None

    @classmethod
    def create(cls, pack: Pack, parent: Path, disk: Disk | None = None) -> Overlay:
        """Copy the pack's experts into a new folder under ``parent``, after removing what dead runs left there."""
        if pack.coded or not pack.manifest.extents.whole:
            raise StoreError(
                f"{pack.path}: experts change places only in layouts {' and '.join(WHOLE)} without a codec, "
                f"not in {pack.manifest.layout} with codec={pack.manifest.codec}"
            )
        parent.mkdir(parents=True, exist_ok=True)
        with alone(parent / LOCK):  # nobody takes a folder for a dead one before its owner has locked it
            _remove_dead(parent)
            folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"{pack.path.name}-"))
            journal = Journal(folder / JOURNAL, disk or Disk())
        try:
            copied = _copy(pack.file_path, folder / EXPERTS)
            journal.append(Record(BEGIN, pack.keys, hash_a=_identity(pack)))
            overlay = cls(pack, folder, journal)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            journal.close()
            raise
        overlay.copied_bytes = copied
        return overlay

    @classmethod
    def recover(cls, folder: Path, pack: Pack, disk: Disk | None = None) -> Overlay:
        """Open a folder that a crash left: every expert is right at its place, and a swap is either done or not."""
        if not (folder / JOURNAL).is_file():
            raise StoreError(f"{folder} is not an overlay: it has no {JOURNAL}")
        journal = Journal(folder / JOURNAL, disk or Disk())
        try:
            begin = journal.records[0] if journal.records else None
            if begin is None:
                raise StoreError(f"{folder}: the copy of the pack was not finished; remove it")
            if begin != Record(BEGIN, pack.keys, hash_a=_identity(pack)):
                raise StoreError(f"{folder} is an overlay of another pack than {pack.path}")
            overlay = cls(pack, folder, journal)
        except BaseException:
            journal.close()
            raise
        try:
            overlay._replay()
        except BaseException:
            overlay.close()
            raise
        return overlay

    @property
    def file_path(self) -> Path:
        """The private copy of the experts."""
        return self.folder / EXPERTS

    def position(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """Place of each key on storage, int64, 0 to keys - 1."""
        return self.place[np.asarray(keys, np.int64)]

    def where(self, key: int) -> str:
        """File, expert and offset of ``key``, for messages."""
        layer, expert = divmod(key, self.experts)
        return f"{self.file_path}: layer {layer}, expert {expert}, offset {self._offset(key)}"

    def segments(self, key: int) -> list[Segment]:
        """The one extent of ``key``, where it stands now."""
        super().segments(key)  # refuses what is no key
        return [Segment(self._offset(key), self.expert_bytes, 0)]

    def _offset(self, key: int) -> int:
        return int(self.place[key]) * self.slot_bytes

    # --- swaps -----------------------------------------------------------------------------------------------------

    def swap(
        self,
        a: int,
        b: int,
        bytes_a: np.ndarray,
        bytes_b: np.ndarray,
        before_unit: Callable[[], None] = lambda: None,
    ) -> None:
        """Write two experts of one layer to each other's places, given their bytes (uint8), and make that durable.

        ``before_unit`` is called before each piece of ``WRITE_UNIT_BYTES``; what it raises leaves the swap unfinished,
        for ``recover``. Nobody may read either expert from here until ``adopt``, which changes the map.
        """
        if a == b or a // self.experts != b // self.experts:
            raise StoreError(f"{self.folder}: experts {a} and {b} cannot change places; they must be two of one layer")
        if self._written is not None or self._unfinished is not None:
            raise StoreError(f"{self.folder}: the last swap was not adopted or not finished")
        self.check(a, bytes_a)
        self.check(b, bytes_b)
        places = int(self.place[a]), int(self.place[b])
        hashes = (int(self.manifest.hashes[key], 16) for key in (a, b))
        intent = Record(INTENT, a, b, *places, *hashes)
        self.journal.append(intent)
        self._write(bytes_b, places[0], before_unit)
        self._write(bytes_a, places[1], before_unit)
        self.journal.append(intent._replace(kind=COMMIT))
        self._written = a, b

    def adopt(self) -> None:
        """Read the two experts of the swap just written from their new places from now on."""
        assert self._written is not None, "no swap was written"
        a, b = self._written
        self.place[[a, b]] = self.place[[b, a]]
        self._written = None

    def _write(self, data: np.ndarray, place: int, before_unit: Callable[[], None]) -> None:
        """Write an expert piece by piece, each durable before the next is begun, so that none waits in a queue."""
        for start in range(0, self.expert_bytes, WRITE_UNIT_BYTES):
            before_unit()
            unit = data.data[start : min(start + WRITE_UNIT_BYTES, self.expert_bytes)]
            self.disk.write(self._fd, unit, place * self.slot_bytes + start)
            self.disk.sync(self._fd)
            self.written_bytes += len(unit)

    # --- recovery --------------------------------------------------------------------------------------------------

    @property
    def _unfinished(self) -> Record | None:
        last = self.journal.records[-1]
        return last if last.kind == INTENT else None

    def _replay(self) -> None:
        for record in self.journal.records:
            if record.kind == COMMIT:
                self._written = record.a, record.b
                self.adopt()
        if (intent := self._unfinished) is None:
            return
        if self._holds(intent.place_a, intent.hash_b) and self._holds(intent.place_b, intent.hash_a):
            self.journal.append(intent._replace(kind=COMMIT))
            self._written = intent.a, intent.b
            self.adopt()
            return
        buffer = aligned_buffer(self.slot_bytes)
        for key, place in ((intent.a, intent.place_a), (intent.b, intent.place_b)):
            self.pack.read(key, buffer)
            self._write(buffer, place, lambda: None)
        self.journal.take_back()

    def _holds(self, place: int, expected: int) -> bool:
        data = os.pread(self._fd, self.expert_bytes, place * self.slot_bytes)
        return xxhash.xxh3_64_intdigest(data) == expected

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the map is one to one and keeps every layer's places within the layer's."""
        first = self.pack.position(np.arange(self.keys))
        for mine, own in zip(self.place.reshape(self.layers, -1), first.reshape(self.layers, -1), strict=True):
            assert np.array_equal(np.sort(mine), np.sort(own)), "the map gives a place twice or to another layer"

    # --- the folder ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the files and leave the folder as it is; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.journal.close()

    def remove(self) -> None:
        """Remove the folder: the run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()


def remove_dead(parent: Path) -> None:
    """Remove the overlays under ``parent`` that no process holds: their run was stopped."""
    if parent.is_dir():
        with alone(parent / LOCK):
            _remove_dead(parent)


def _remove_dead(parent: Path) -> None:
    for folder in [path for path in parent.iterdir() if path.is_dir()]:
        try:
            fd = os.open(folder / JOURNAL, os.O_RDWR)
        except FileNotFoundError:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            if try_lock(fd):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def _copy(source: Path, target: Path) -> int:
    """Copy a file, sharing extents where possible; returns the bytes written. Its pages do not stay in the cache."""
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new, FICLONE, old.fileno())
            return 0
        except OSError:  # another file system, or one that shares nothing
            pass
    needed, free = source.stat().st_size, shutil.disk_usage(target.parent).free
    if needed > free:
        raise StoreError(
            f"{target}: the overlay of a run needs {human_bytes(needed)} and {human_bytes(free)} are free; "
            f"make room, or set MOEBENCH_HOME to a larger disk"
        )
    shutil.copyfile(source, target)
    drop_page_cache(target)
    return needed


def _identity(pack: Pack) -> int:
    return xxhash.xxh3_64_intdigest(pack.manifest.to_json().encode())
