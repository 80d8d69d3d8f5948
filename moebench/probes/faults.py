"""Page faults of a mapping, one by one and by the stretch, the kernel reading ahead or not. Knows no experts."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from pathlib import Path

import numpy as np

from moebench.probes.file import ProbeFile
from moebench.probes.samples import Samples
from moebench.units import KIB


def single(file: ProbeFile, count: int) -> Samples:
    """Microseconds of ``count`` major faults, one page each, the read of the page included; no readahead."""
    file.drop()
    with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as view:
        view.madvise(mmap.MADV_RANDOM)
        found = []
        for page in random.Random(0).sample(range(len(view) // mmap.PAGESIZE), count):
            begun = time.perf_counter()
            view[page * mmap.PAGESIZE]  # the access is the measurement
            found.append((time.perf_counter() - begun) * 1e6)
    return Samples(tuple(found))


class Stretches:
    """Copies stretches of a mapping, nothing of which is cached; ``advice`` is for the kernel."""

    def __init__(self, file: ProbeFile, advice: int) -> None:
        self.file, self.advice, self._draw = file, advice, random.Random(0)

    def touch(self, nbytes: int, threads: int, seconds: float) -> float:
        """Microseconds until each of ``threads`` has all pages of a stretch of its own, mean over ``seconds``."""
        spent, rounds, until = 0.0, 0, time.perf_counter() + seconds
        targets = [np.zeros(nbytes, np.uint8) for _ in range(threads)]
        places = self.file.nbytes // nbytes
        while not rounds or time.perf_counter() < until:
            self.file.drop()
            with self.file.path.open("rb") as opened:
                mapping = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
            mapping.madvise(self.advice)
            data = np.frombuffer(mapping, np.uint8)
            starts = [place * nbytes for place in self._draw.sample(range(places), min(threads, places))]
            spent += _side_by_side(data, starts, targets)
            rounds += 1
            del data  # an exported view would keep the mapping from closing
            mapping.close()
        return spent / rounds * 1e6


def _side_by_side(data: np.ndarray, starts: list[int], targets: list[np.ndarray]) -> float:
    """Seconds of the copies at ``starts``, a thread each; a copy gives the interpreter's lock away while it faults."""
    size = len(targets[0])

    def copy(start: int, target: np.ndarray) -> None:
        np.copyto(target, data[start : start + size])

    threads = [threading.Thread(target=copy, args=pair) for pair in zip(starts, targets, strict=False)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def readahead_kib(path: Path) -> float:
    """What the kernel reads ahead on this file's device; one page where it does not say."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return float(setting.read_text()) if setting.exists() else mmap.PAGESIZE / KIB
