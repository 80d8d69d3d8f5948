"""A pack while it is being written: a ``.partial`` directory beside its target, with a journal of what is already safe.

Knows files and space on the disk; knows nothing of tensors. The journal's first line is the request, then one line
for the dense weights and one per finished batch of experts; a line is written only after its bytes are synced.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from moebench.store.engines import StoreError
from moebench.store.extents import Segment
from moebench.store.manifest import PackManifest, differences
from moebench.store.pack import DENSE, EXPERTS, MANIFEST, PARTIAL
from moebench.units import human_bytes

JOURNAL = "journal.jsonl"


class PartialPack:
    """Opens or resumes ``<target>.partial``. Only one process at a time may write it."""

    def __init__(self, target: Path, request: dict[str, Any]) -> None:
        self.target, self.path = target, target.with_name(target.name + PARTIAL)
        self.path.mkdir(parents=True, exist_ok=True)
        self._journal = open(self.path / JOURNAL, "a+b")  # noqa: SIM115 - held open for the lock
        try:
            self._lock()
            self.dense, self.batches = self._resume(request)
            self._experts = os.open(self.path / EXPERTS, os.O_RDWR | os.O_CREAT, 0o644)
        except BaseException:
            self._journal.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"{self.path} is being written by another process") from None

    def _resume(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        lines, safe_bytes = [], 0
        self._journal.seek(0)
        for line in self._journal:
            if (entry := _entry(line)) is None:
                break  # the interruption tore this line
            lines.append(entry)
            safe_bytes += len(line)
        self._journal.truncate(safe_bytes)
        if not lines:
            if set(os.listdir(self.path)) != {JOURNAL}:
                raise StoreError(f"{self.path} holds files of something else; remove it or choose another out=")
            self._record({"request": request})
            return None, []
        if lines[0].get("request") != request:
            found = lines[0].get("request")
            fields = differences(request, found if isinstance(found, dict) else {})
            raise StoreError(f"{self.path} is an interrupted pack of another request (differs in {fields}); remove it")
        dense = next((line["dense"] for line in lines if "dense" in line), None)
        batches = [line["batch"] for line in lines if "batch" in line]
        whole = all(_is_batch(batch, request["experts"]) for batch in batches) and len(batches) <= request["layers"]
        if not whole or not (dense is None or _is_dense(dense)) or (batches and dense is None):
            raise StoreError(f"{self.path / JOURNAL} says what no interrupted pack does; remove {self.path}")
        return dense, batches

    def _record(self, line: dict[str, Any]) -> None:
        self._journal.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def record_dense(self, facts: dict[str, Any]) -> None:
        """Sync the dense file and note that it is complete."""
        self.dense = facts
        with open(self.path / DENSE, "rb") as file:
            os.fsync(file.fileno())
        self._record({"dense": facts})

    def record_batch(self, facts: dict[str, Any]) -> None:
        """Sync the experts and note that the next batch of them is complete."""
        os.fsync(self._experts)
        self.batches.append(facts)
        self._record({"batch": facts})

    def require_room(self, nbytes: int) -> None:
        """Raise ``StoreError`` unless the disk has room for an experts.bin of ``nbytes``."""
        needed = nbytes - os.fstat(self._experts).st_blocks * 512
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise StoreError(self._no_space(needed, free))

    def write(self, segments: list[Segment], buffer: np.ndarray) -> None:
        """Write one expert's bytes (uint8) to where its segments say."""
        for segment in segments:
            piece, offset = buffer.data[segment.dest : segment.dest + segment.nbytes], segment.offset
            while piece:
                written = os.pwrite(self._experts, piece, offset)
                piece, offset = piece[written:], offset + written

    def finish(self, manifest: PackManifest) -> None:
        """Write the manifest, sync, and give the directory its final name in one step."""
        with open(self.path / MANIFEST, "w") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.ftruncate(self._experts, manifest.experts_file_bytes)  # the last extent in whole pages
        os.fsync(self._experts)
        _sync_directory(self.path)
        os.rename(self.path, self.target)
        forget_journal(self.target)
        _sync_directory(self.target.parent)

    @contextmanager
    def guarded(self, nbytes: int) -> Iterator[None]:
        """Close the files in any case; say what stopped the writing of a pack of ``nbytes``, a full disk in bytes."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                limit = "the limit on file sizes (ulimit -f) is in the way" if error.errno == errno.EFBIG else ""
                raise StoreError(
                    f"{error.filename or self.path}: {limit or error.strerror or error}; mend that and run the same "
                    f"command to resume, or remove {self.path}"
                ) from error
            raise StoreError(self._no_space(nbytes, shutil.disk_usage(self.path).free)) from error
        finally:
            os.close(self._experts)
            self._journal.close()

    def _no_space(self, experts: int, free: int) -> str:
        dense = f"{human_bytes(self.dense['nbytes'])} of dense weights" if self.dense else "its dense weights"
        return (
            f"{self.target}: not enough space, its experts take {experts} bytes ({human_bytes(experts)}), {dense} come "
            f"on top, and {free} bytes ({human_bytes(free)}) are free; make room and run the same command to resume, "
            f"or remove {self.path}"
        )


def forget_journal(pack: Path) -> None:
    """Remove the journal of a pack that is complete: its writer may have been killed before it could."""
    if (pack / JOURNAL).is_file():
        with suppress(OSError):  # somebody was quicker, or nothing may be written here
            (pack / JOURNAL).unlink()


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _is_dense(facts: Any) -> bool:
    """Whether these are facts of a dense file."""
    return isinstance(facts, dict) and type(facts.get("nbytes")) is int and _is_hex(facts.get("hash"), 16)


def _is_batch(facts: Any, experts: int) -> bool:
    """Whether these are facts of so many experts."""
    if not isinstance(facts, dict):
        return False
    columns = [facts.get(name) for name in ("lengths", "hashes", "digests")]
    if not all(isinstance(column, list) and len(column) == experts for column in columns):
        return False
    return all(type(n) is int and _is_hex(one, 16) and _is_hex(two, 32) for n, one, two in zip(*columns, strict=True))  # type: ignore[arg-type]


def _is_hex(value: Any, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and set(value) <= set("0123456789abcdef")


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
