"""Files and folders that appear under their names whole or not at all, whatever ends the process that writes them.

What is in the making stands beside its place under one fixed hidden name, locked while its writer lives. The next
writer of the same place takes over what a dead one left, so that nothing piles up and nothing blocks. Knows no formats.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is synced and becomes ``path`` at the end of the block, or vanishes where that raises."""
    with own_file(beside(path)) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(beside(path), path)


def beside(path: Path) -> Path:
    """Where ``path`` is in the making."""
    return path.with_name(f".{path.name}.new")


@contextmanager
def own_file(path: Path) -> Iterator[BinaryIO]:
    """An empty file at ``path``, this process's alone; waits for its turn. It is removed, unless it was renamed."""
    fd = _locked(path, lambda: os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
    try:
        os.ftruncate(fd, 0)
        with _named(path), os.fdopen(os.dup(fd), "wb") as file:
            yield file
    finally:
        if _names(path, fd):
            path.unlink()
        os.close(fd)


@contextmanager
def own_folder(path: Path) -> Iterator[Path]:
    """An empty folder at ``path``, this process's alone; waits for its turn. It is removed with what is left in it."""

    def opened() -> int:
        path.mkdir(exist_ok=True)
        return os.open(path, os.O_RDONLY)

    fd = _locked(path, opened)
    try:
        for entry in path.iterdir():  # of a process that died
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        with _named(path):
            yield path
    finally:
        if _names(path, fd):
            shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A write that fails, on a full disk for one, does not say where: it was at ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


def _locked(path: Path, opened) -> int:  # type: ignore[no-untyped-def]
    """The descriptor of what stands at ``path``, locked; ``opened`` makes and opens it."""
    while True:
        try:
            fd = opened()
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            continue  # its last owner removed it between making and opening
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _names(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its last owner removed or renamed it while we waited


def _names(path: Path, fd: int) -> bool:
    """Whether ``path`` still is what ``fd`` has open."""
    try:
        found, own = os.stat(path, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
