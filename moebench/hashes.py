"""Hashes of large files, kept so that one is not read again while its size and time of change stay as they are.

Kept under ``$MOEBENCH_HOME/cache/hashes``, one small file each. What was changed a moment ago is not kept, because a
second change within one tick of the file system's clock would not show.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import xxhash

from moebench.plugins import home
from moebench.scratch import whole_file
from moebench.store.pack import file_hash

LARGE = 64 << 20  # bytes from which a hash is worth keeping
SETTLED_S = 10.0  # seconds since the last change after which a time of change can be trusted


def kept_file_hash(path: Path) -> str:
    """``file_hash`` of a file, from an earlier reading where that is certain to hold."""
    before = path.stat()
    if before.st_size < LARGE:
        return file_hash(path)
    facts = [str(path.resolve()), before.st_ino, before.st_size, before.st_mtime_ns]
    kept = home() / "cache" / "hashes" / f"{xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())}.json"
    try:
        found = json.loads(kept.read_text())
        if found["file"] == facts:
            return str(found["hash"])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    digest, after = file_hash(path), path.stat()
    unchanged = (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    if unchanged and time.time() - after.st_mtime > SETTLED_S:
        with suppress(OSError):  # a home that is full or read-only: the hash is there all the same
            kept.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(kept) as file:
                file.write(json.dumps({"file": facts, "hash": digest}).encode())
    return digest
