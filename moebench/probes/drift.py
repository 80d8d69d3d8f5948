"""How much of its speed a machine keeps under load: int4 experts on every core, for as long as there is.

Knows the clock and the kernels; reads no sensor.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from moebench.machine import cores
from moebench.probes.kernels import Expert
from moebench.probes.samples import Samples

INTERVALS, ENDS = 20, 4


def sustained(seconds: float) -> Samples:
    """Rates of the last fifth of ``seconds`` over the median of the first fifth, a sample for each twentieth."""
    count = cores()
    experts = [Expert("int4", 2048, 768).work(1) for _ in range(count)]
    for warm in experts:
        warm()
    done, stop = np.zeros(count, np.int64), threading.Event()

    def work(index: int) -> None:
        while not stop.is_set():
            experts[index]()
            done[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    rates = []
    try:
        for _ in range(INTERVALS):
            before, begun = int(done.sum()), time.perf_counter()
            time.sleep(seconds / INTERVALS)
            rates.append((int(done.sum()) - before) / (time.perf_counter() - begun))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    first = float(np.median(rates[:ENDS]))
    return Samples(tuple(rate / first for rate in rates[-ENDS:])) if first else Samples((1.0,))
