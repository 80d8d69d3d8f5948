"""What main memory gives: copies by size and thread, and reading alone. Knows no experts."""

from __future__ import annotations

import threading
import time

import numpy as np

from moebench.probes.samples import Samples, rates
from moebench.units import GB, MIB

AREA = 256 * MIB  # what is gone through: more than caches hold


def copied(seconds: float) -> Samples:
    """GB/s of copying 256 MiB, bytes read plus bytes written."""
    source = np.ones(AREA, np.uint8)
    target = np.empty_like(source)
    return rates(lambda: np.copyto(target, source), 2 * source.nbytes / GB, seconds)


def streamed(seconds: float) -> Samples:
    """GB/s of reading 256 MiB."""
    words = np.ones(AREA // 8, np.int64)
    return rates(words.max, words.nbytes / GB, seconds)


class Copies:
    """Copies of one size after another, all over two areas."""

    def __init__(self) -> None:
        self._from, self._to = np.ones(AREA, np.uint8), np.zeros(AREA, np.uint8)

    def copy(self, nbytes: int, threads: int, seconds: float) -> float:
        """GB/s copied by ``threads`` together, bytes counted once."""
        done, until = [0] * threads, time.perf_counter() + seconds

        def work(index: int) -> None:
            places, at = AREA // nbytes, index
            while not done[index] or time.perf_counter() < until:
                start = at % places * nbytes
                np.copyto(self._to[start : start + nbytes], self._from[start : start + nbytes])
                done[index] += nbytes
                at += threads

        workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
        begun = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(done) / (time.perf_counter() - begun) / GB
