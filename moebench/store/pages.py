"""Page-aligned memory, files read past the page cache, and a file's page cache: what is resident, how to drop it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from moebench.store.engines import StoreError
from moebench.units import PAGE, align_up


def aligned_buffer(nbytes: int) -> np.ndarray:
    """A zeroed, 4096-aligned uint8 array of ``nbytes`` bytes; its pages are committed on first touch."""
    return np.frombuffer(mmap.mmap(-1, align_up(max(nbytes, 1))), np.uint8)[:nbytes]


def committed(memory: np.ndarray) -> np.ndarray:
    """The same zeroed memory (uint8 [nbytes]) with every page there, so that no read into it pays for one."""
    memory[::PAGE] = 0
    return memory


def open_direct(path: Path) -> int:
    """Open a file for reads past the page cache (O_DIRECT, F_NOCACHE on macOS); ``StoreError`` if that is refused."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        if hasattr(fcntl, "F_NOCACHE"):
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        elif not hasattr(os, "O_DIRECT"):
            raise OSError(None, "neither O_DIRECT nor F_NOCACHE")
        os.preadv(fd, [aligned_buffer(PAGE).data], 0)  # some file systems refuse only the first read
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        reason = f"{path}: this file system refuses direct reads ({error.strerror}); use engine=pread"
        raise StoreError(reason) from error
    return fd


def drop_page_cache(path: str | Path) -> tuple[bool, str]:
    """Write back and drop a file's cached pages; returns whether it was done, and how or why not."""
    if not hasattr(os, "posix_fadvise"):
        return False, "this system has no posix_fadvise"
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # dirty pages are not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return True, "posix_fadvise(DONTNEED)"


def page_cache_bytes(path: str | Path) -> tuple[int | None, str]:
    """Bytes of a file in the page cache, or None; and how they were counted or why not."""
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None) if os.name == "posix" else None
    if mincore is None:
        return None, "this system has no mincore"
    size = os.path.getsize(path)
    if size == 0:
        return 0, "empty file"
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        pages = np.zeros(align_up(size, mmap.PAGESIZE) // mmap.PAGESIZE, np.uint8)
        data = np.frombuffer(mapping, np.uint8)
        address, vector = ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
        status = mincore(address, ctypes.c_size_t(size), vector)
        del data  # an exported view would keep the mapping from closing
    if status:
        return None, f"mincore failed: {os.strerror(ctypes.get_errno())}"
    return min(int((pages & 1).sum()) * mmap.PAGESIZE, size), "mincore"
