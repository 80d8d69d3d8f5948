"""Random weights as fast as a disk takes them: bytes with the element frequencies of Gaussian weights, no two stretches
alike.

A stretch of at most ``STRETCH`` elements of 16 bits is ``table[a:] ^ (noise[b:] & mask) ^ (word & mask)``: ``table``
holds Gaussian draws, ``mask`` the bits that may be flipped without changing what frequencies matter (sign and low
mantissa of bf16; the lowest bit of a 4-bit code; low mantissa bits of a scale), and a, b and word are drawn for each
stretch from the seed, the tensor's name and the stretch's number. Any stretch can be made alone, in any order. Knows
numpy and no files.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import xxhash

from moebench.store.quant import to_bf16

STRETCH = 1 << 20  # elements of 16 bits that are made at a time
TABLE = 2 * STRETCH
GROUP = 64  # weights that share a scale and a bias, int4
SIGN_AND_LOW, LOWEST_OF_CODE, LOW_MANTISSA = 0x801F, 0x1111, 0x000F  # of 16 bits
MINUS_EIGHT = (0x0180, 0x8000)  # added to the bits of a positive bf16 number, and set in them: the number times -8


class RandomBits:
    """Fills arrays of 16-bit elements; equal seeds and keys give equal bytes."""

    def __init__(self, seed: int) -> None:
        self.seed, self._rng = seed, np.random.Generator(np.random.SFC64(seed))
        self._normal = self._rng.standard_normal(TABLE, dtype=np.float32)
        noise = self._rng.integers(0, 1 << 16, TABLE, dtype=np.uint16)
        self._noise = {m: noise & np.uint16(m) for m in (SIGN_AND_LOW, LOWEST_OF_CODE, LOW_MANTISSA)}
        self.gaussian, self.scale_bits = cache(self.gaussian), cache(self.scale_bits)  # type: ignore[method-assign]
        grouped = self._normal.reshape(-1, GROUP)
        self._step = np.abs(grouped).max(axis=1, keepdims=True) / 7  # of codes 1 to 15 with 8 for zero
        codes = (np.rint(grouped / self._step) + 8).astype(np.uint16).reshape(-1, 4)
        packed = codes[:, 0] | codes[:, 1] << 4 | codes[:, 2] << 8 | codes[:, 3] << 12
        self._codes = np.resize(packed, TABLE)

    def gaussian(self, std: float) -> np.ndarray:
        """Gaussian numbers of that deviation as bf16 bits, uint16 [TABLE]."""
        return to_bf16(self._normal * np.float32(std))

    def scale_bits(self, std: float) -> np.ndarray:
        """Scales of int4 groups of such numbers as bf16 bits, uint16 [TABLE]."""
        return np.resize(to_bf16(self._step.ravel() * np.float32(std)), TABLE)

    def fill(self, out: np.ndarray, kind: str, key: str, start: int, std: float) -> None:
        """Elements ``start`` onwards, a multiple of STRETCH, of a tensor into ``out``, uint16 [at most STRETCH].

        ``kind``: ``weights`` (bf16), ``codes`` (four 4-bit codes each), ``scales``, or ``biases`` (-8 times the scales
        of the same key).
        """
        table, mask = self._source(kind, std)
        draws = np.frombuffer(xxhash.xxh3_128_digest(f"{self.seed}\0{key}\0{start}".encode()), np.uint32)
        a, b = (int(draw) % (TABLE - len(out) + 1) for draw in draws[:2])
        word = np.uint64(int(draws[2]) << 32 | int(draws[3])) & np.uint64(mask * 0x0001_0001_0001_0001)
        np.bitwise_xor(table[a : a + len(out)], self._noise[mask][b : b + len(out)], out=out)
        whole = len(out) // 4 * 4
        out[:whole].view(np.uint64)[...] ^= word
        if kind == "biases":
            out += np.uint16(MINUS_EIGHT[0])
            out |= np.uint16(MINUS_EIGHT[1])

    def _source(self, kind: str, std: float) -> tuple[np.ndarray, int]:
        if kind == "weights":
            return self.gaussian(std), SIGN_AND_LOW
        if kind == "codes":
            return self._codes, LOWEST_OF_CODE
        return self.scale_bits(std), LOW_MANTISSA
