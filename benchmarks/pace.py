"""Whether this machine is fast and slow by turns: a loop of the interpreter and products of matrices, a second apart.

    python benchmarks/pace.py [--seconds N]

A processor that is shared with others below what a guest sees (another thread of its core, say) slows the one and
hardly the other. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

MATRIX = np.random.default_rng(0).random((256, 256), np.float32)


def interpreter() -> None:
    """A fixed number of integer products."""
    total = 0
    for number in range(400_000):
        total += number * number


def products() -> None:
    """Twenty products of 256 x 256 in float32."""
    for _ in range(20):
        MATRIX @ MATRIX


def took_ms(work: Callable[[], None]) -> float:
    """Milliseconds of processor time."""
    begun = time.process_time()
    work()
    return (time.process_time() - begun) * 1e3


def main() -> None:
    """Sample both, print their percentiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60)
    seconds = parser.parse_args().seconds
    found: dict[str, list[float]] = {"interpreter": [], "products": []}
    for _ in range(seconds):
        found["interpreter"].append(took_ms(interpreter))
        found["products"].append(took_ms(products))
        time.sleep(1)
    for name, samples in found.items():
        low, mid, high = np.percentile(samples, (0, 50, 100))
        print(f"{name:<12} {low:6.1f} to {high:6.1f} ms, median {mid:.1f}")
    print(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
