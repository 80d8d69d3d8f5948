"""The ``mmap`` engine: maps experts.bin and copies experts out of the mapping, so that page faults do the reading.

What the operating system keeps of the file is its own choice. Bytes read are bytes copied, and calls are copies:
how many of them came from the disk, the engine cannot know. A file that was cut short is looked for before each copy;
one that is cut short, or cannot be read, amid a copy ends the process (SIGBUS).
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from moebench.store.engine_threads import ThreadEngine
from moebench.store.pack import Pack
from moebench.units import MIB


class MmapEngine(ThreadEngine):
    """Copies in worker threads. ``random_advice`` tells the kernel not to read ahead (MADV_RANDOM)."""

    name = "mmap"

    def __init__(
        self,
        pack: Pack,
        threads: int = 4,
        block_bytes: int = MIB,
        pool: int = 0,
        coded: bool = False,
        random_advice: bool = False,
    ) -> None:
        self._advice = mmap.MADV_RANDOM if random_advice else mmap.MADV_NORMAL
        super().__init__(pack, threads, block_bytes, pool, coded)

    def _open(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY)
        self._mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        self._mapping.madvise(self._advice)
        self._data = np.frombuffer(self._mapping, np.uint8)
        return fd

    def _release(self, fd: int) -> None:
        del self._data  # an exported view would keep the mapping from closing
        self._mapping.close()
        os.close(fd)

    def _read_at(self, fd: int, views: list[np.ndarray], offset: int) -> int:
        done, end = 0, os.fstat(fd).st_size
        for view in views:
            source = self._data[offset + done : min(offset + done + len(view), end)]
            np.copyto(view[: len(source)], source)  # releases the interpreter lock while it faults
            done += len(source)
        return done
