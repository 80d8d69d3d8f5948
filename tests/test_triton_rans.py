"""The decoder for GPUs gives what was coded, or refuses: run by Triton's interpreter on the processor, in a process of
its own, since Triton has to be loaded for that.

Skipped where Triton is not installed; torch's CUDA wheels bring it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

SIZES = ((1, 1), (64, 64), (65, 64), (200, 33), (300, 7))  # symbols and lanes


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_planes_of_many_sizes_come_back_and_a_damaged_word_is_an_error():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, __file__], check=False, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def drawn(count, lanes, seed=0):
    """A plane of skewed symbols, and those."""
    from moebench.backends.torch_rans import Plane
    from moebench.store.rans_kernels import BYTES, encode, normalise

    odds = np.exp(-np.arange(256) / 20)
    symbols = np.random.default_rng(seed).choice(256, count, p=odds / odds.sum()).astype(np.uint8)
    frequencies = normalise(np.bincount(symbols, minlength=256))
    states, words = encode(symbols, frequencies, lanes)
    there = np.flatnonzero(frequencies)
    sparse = frequencies[there].astype(np.uint16)
    return Plane(0, 0, count, BYTES, lanes, states, sparse, words, there.astype(np.uint8)), symbols


def check():
    """What the test runs."""
    from moebench.backends.triton_rans import decode_planes
    from moebench.store.engines import StoreError

    planes, symbols = zip(*(drawn(*size, seed) for seed, size in enumerate(SIZES)), strict=True)
    for got, wanted in zip(decode_planes(planes, "cpu"), symbols, strict=True):
        assert np.array_equal(got.numpy(), wanted)
    for plane in (plane for plane in planes if plane.words.size):
        plane.words[len(plane.words) // 2] ^= 1
        with pytest.raises(StoreError, match="does not end where it should"):
            decode_planes([plane], "cpu")


if __name__ == "__main__":
    check()
