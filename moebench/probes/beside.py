"""What is left of one kind of work while another goes on: compute, direct reads, copies and writes share a machine.

Each sample pairs a rate alone with the rate beside, one right after the other. Knows no experts' meaning.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moebench.probes.file import ProbeFile
from moebench.probes.reads import Reader
from moebench.probes.samples import Samples, rates
from moebench.units import GB, KIB, MIB

READ, DEPTH, UNIT, WRITTEN = MIB, 8, 256 * KIB, 8 * MIB
PAIRS = 5
LEAST = 1e-3  # of a share: work that did not come to its turn once


@dataclass(frozen=True)
class Both:
    """Shares of two rates that are left when both kinds of work go on."""

    first: Samples
    second: Samples


class Background:
    """Work that a thread does while a ``with`` block runs: ``work(wanted)`` goes on while ``wanted()`` says so, and
    returns the ``rate`` that it reached.
    """

    def __init__(self, work: Callable[[Callable[[], bool]], float]) -> None:
        self._work, self.rate = work, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The block begins once the work has."""
        begun, over, failed = threading.Event(), threading.Event(), []

        def wanted() -> bool:
            begun.set()
            return not over.is_set()

        def run() -> None:
            try:
                self.rate = self._work(wanted)
            except Exception as error:  # raised where it is waited for
                failed.append(error)
            begun.set()

        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if failed:
            raise failed[0]


def shares(
    foreground: Callable[[float], float], background: Background, seconds: float, pairs: int | None = None
) -> Both:
    """What both reach side by side over what each reaches alone; ``foreground`` returns its rate."""
    pairs = pairs or PAIRS
    first, second, each = [], [], seconds / (3 * pairs)
    for _ in range(pairs):
        alone = foreground(each)
        with background.running():
            time.sleep(each)
        free = background.rate
        with background.running():
            beside = foreground(each)
        first.append(beside / alone)
        second.append(max(LEAST, background.rate / free))
    return Both(Samples(tuple(first)), Samples(tuple(second)))


def reading(file: ProbeFile, size: int = READ, depth: int = DEPTH) -> Background:
    """Direct reads of ``size`` bytes, ``depth`` of them queued, each hashed, as an engine's threads do."""
    file.pack(size)  # what has to be hashed is, before
    reader = Reader(file, "direct")
    return Background(lambda wanted: reader.flow(size, depth, wanted))


def copying() -> Background:
    """Copies of 1 MiB from one large area to another, by one thread; GB/s, bytes counted once."""
    source, target = np.ones(128 * MIB, np.uint8), np.zeros(128 * MIB, np.uint8)

    def copy(wanted: Callable[[], bool]) -> float:
        done, begun = 0, time.perf_counter()
        while wanted():
            start = done % 128 * MIB
            np.copyto(target[start : start + MIB], source[start : start + MIB])
            done += 1
        return done * MIB / GB / (time.perf_counter() - begun)

    return Background(copy)


class Writer:
    """Writes random bytes over and over into a file of its own."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._data = np.random.default_rng(0).bytes(WRITTEN)

    def durable(self, seconds: float) -> Samples:
        """GB/s of writes of 256 KiB, each on the drive before the next is begun."""
        at, file = 0, os.open(self.path, os.O_RDWR | os.O_CREAT)
        sync = getattr(os, "fdatasync", os.fsync)

        def write() -> None:
            nonlocal at
            os.pwrite(file, self._data[:UNIT], at)
            sync(file)
            at = (at + UNIT) % self.nbytes

        try:
            return rates(write, UNIT / GB, seconds)
        finally:
            os.close(file)

    def sustained(self, seconds: float) -> float:
        """GB/s of writes of 8 MiB, each on the drive before the next is begun."""
        file, written, begun = os.open(self.path, os.O_RDWR | os.O_CREAT), 0, time.perf_counter()
        try:
            while not written or time.perf_counter() < begun + seconds:
                os.pwrite(file, self._data, written % self.nbytes)
                os.fsync(file)
                written += WRITTEN
        finally:
            os.close(file)
        return written / (time.perf_counter() - begun) / GB


def writes_beside_reads(file: ProbeFile, path: Path, seconds: float) -> tuple[Samples, Samples]:
    """GB/s of writes while reads go on, and the share of their rate that reads then keep."""
    writer, background = Writer(path, min(file.nbytes, 64 * MIB) // WRITTEN * WRITTEN), reading(file)
    found, kept, each = [], [], seconds / (2 * PAIRS)
    for _ in range(PAIRS):
        with background.running():
            time.sleep(each)
        free = background.rate
        with background.running():
            found.append(writer.sustained(each))
        kept.append(max(LEAST, background.rate / free))
    return Samples(tuple(found)), Samples(tuple(kept))
