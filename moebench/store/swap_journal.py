"""The journal of an overlay: fixed-size records that say which two experts were about to change places, and which did.

Knows records, their order and how they reach the disk; reads and writes no expert. A record counts once its checksum
holds. Each is synced before anything that relies on it is done, so that only the last one can be torn.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from moebench.store.engines import StoreError

BEGIN, INTENT, COMMIT = 1, 2, 3
BODY = struct.Struct("<4sIQQQQQQQ")
SIZE = BODY.size + 8  # and a checksum
MAGIC = b"moe1"


class Record(NamedTuple):
    """Experts ``a`` and ``b``, the places that they stand at before the swap, and the xxh3_64 of their bytes.

    BEGIN: ``a`` is the number of experts, ``hash_a`` the hash of the pack's manifest.
    """

    kind: int
    a: int = 0
    b: int = 0
    place_a: int = 0
    place_b: int = 0
    hash_a: int = 0
    hash_b: int = 0


class Disk:
    """Writes at offsets and makes them durable; a test puts one in its place that stops in the middle."""

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of ``data``."""
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cut a file."""
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Return when everything written to ``fd`` is durable."""
        getattr(os, "fdatasync", os.fsync)(fd)


class Journal:
    """An open journal, locked by this process until ``close``. ``records`` are the valid ones, in order."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.disk = path, disk
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not try_lock(self._fd):
                raise StoreError(f"{path.parent} is in use by another process")
            self.records = self._load()
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """Add a record and make it durable."""
        at = len(self.records)
        self.disk.write(self._fd, memoryview(_packed(record, at)), at * SIZE)
        self.disk.sync(self._fd)
        self.records.append(record)

    def take_back(self) -> None:
        """Remove the last record, durably."""
        self.disk.truncate(self._fd, (len(self.records) - 1) * SIZE)
        self.disk.sync(self._fd)
        self.records.pop()

    def close(self) -> None:
        """Release the lock; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _load(self) -> list[Record]:
        data = self.path.read_bytes()
        records: list[Record] = []
        for at in range(0, len(data), SIZE):
            record = _unpacked(data[at : at + SIZE], len(records))
            if record is None:
                if len(data) - at > SIZE:
                    raise StoreError(f"{self.path}: record {len(records)} is damaged; remove {self.path.parent}")
                self.disk.truncate(self._fd, at)  # torn while it was written: nothing relied on it yet
                break
            records.append(record)
        return records


def try_lock(fd: int) -> bool:
    """Take the lock of an open file, unless another process or opening holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _packed(record: Record, sequence: int) -> bytes:
    body = BODY.pack(MAGIC, record.kind, sequence, *record[1:])
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def _unpacked(data: bytes, sequence: int) -> Record | None:
    if len(data) < SIZE or xxhash.xxh3_64_intdigest(data[:-8]) != int.from_bytes(data[-8:], "little"):
        return None
    magic, kind, found, *rest = BODY.unpack(data[:-8])
    return Record(kind, *rest) if (magic, found) == (MAGIC, sequence) else None
