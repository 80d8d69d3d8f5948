"""The packs of the suite: copies whose padding is poison, and what is in them. Knows no run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from moebench.store.pack import EXPERTS, Pack
from moebench.store.pages import aligned_buffer
from moebench.testing.audit import POISON


def poisoned(pack: Pack, out: Path) -> Pack:
    """A copy of a pack in which every byte that belongs to no expert is poison."""
    shutil.copytree(pack.path, out)
    file = np.memmap(out / EXPERTS, np.uint8, "r+")
    free = np.ones(len(file), bool)
    for key in range(pack.keys):
        for segment in pack.segments(key):
            free[segment.offset : segment.offset + segment.nbytes] = False
    file[free] = POISON
    file.flush()
    return Pack.open(out)


def contents(pack: Pack) -> np.ndarray:
    """The bytes of every expert, uint8 [keys, expert_bytes]."""
    found, buffer = np.empty((pack.keys, pack.expert_bytes), np.uint8), aligned_buffer(pack.slot_bytes)
    for key in range(pack.keys):
        pack.read(key, buffer)
        found[key] = buffer[: pack.expert_bytes]
    return found
