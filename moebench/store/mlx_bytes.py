"""The byte layout ``mlx``: expert tensors as mlx.core's quantised matrix products read them, on any machine.

Codes of b bits follow one another in a row without gaps, lowest bit first, in little-endian 32-bit words; ``.scales``
and, for affine codes, ``.biases`` hold one number per group. A range of rows is a range of each part. Knows numpy and
no mlx.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moebench.store.layout import CODE_BITS, ByteLayout, LayoutError, LogicalTensor
from moebench.store.quant import from_bf16, to_bf16

INT8_GROUPS = (128, 64, 32)  # rows of int8 have one scale, mlx wants one per group: the fewer the better
MIDDLE = 128  # int8 q is the 8-bit affine code q + 128 with bias -128 * scale; a power of two is exact in bf16


class MlxLayout(ByteLayout):
    """Parts ``NAME`` (uint32 words; bf16, fp16 where not quantised), ``NAME.scales`` and ``NAME.biases``."""

    name = "mlx"
    isa = "any"

    def encode(self, tensor: LogicalTensor) -> dict[str, np.ndarray]:
        """Encoded parts by name; raises ``LayoutError`` where a row does not fill whole words or groups."""
        name = tensor.name
        if tensor.kind == "none":
            return {name: np.ascontiguousarray(tensor.values)}
        scale, bias = tensor.scale, tensor.bias
        assert scale is not None
        if tensor.kind == "int8":
            codes, scale, bias = _affine(tensor)
            words = pack_codes(name, codes, 8)
        else:
            words = pack_codes(name, tensor.values, CODE_BITS[tensor.kind])
        parts = {name: words, f"{name}.scales": scale, f"{name}.biases": bias}
        return {key: np.ascontiguousarray(part) for key, part in parts.items() if part is not None}

    def decode(self, name: str, kind: str, shape: tuple[int, ...], parts: Mapping[str, np.ndarray]) -> LogicalTensor:
        """The inverse of ``encode``, bit for bit."""
        if kind == "none":
            return LogicalTensor(name, kind, parts[name].reshape(shape))
        scale, bias = parts[f"{name}.scales"], parts.get(f"{name}.biases")
        if kind == "int8":
            codes = unpack_codes(parts[name], 8)
            return LogicalTensor(name, kind, (codes ^ MIDDLE).view(np.int8), np.ascontiguousarray(scale[:, 0]))
        return LogicalTensor(name, kind, unpack_codes(parts[name], CODE_BITS[kind]), scale, bias)


def pack_codes(name: str, codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 words [out, in * bits / 32] of uint8 ``codes`` [out, in], each below 2**bits."""
    rows, columns = codes.shape
    if columns * bits % 32:
        raise LayoutError(f"tensor {name}: {columns} columns of {bits} bits do not fill whole words of 32 bits (mlx)")
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4")
    if bits in (2, 4):  # the same as below, many times faster
        per_byte = 8 // bits
        packed = np.ascontiguousarray(codes[:, 0::per_byte])
        for place in range(1, per_byte):
            packed |= codes[:, place::per_byte] << np.uint8(bits * place)
        return packed.view("<u4")
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little").reshape(rows, -1)
    return np.packbits(stream, axis=-1, bitorder="little").view("<u4")


def unpack_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of ``pack_codes``: uint8 codes [out, in]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    rows = packed.shape[0]
    if bits in (2, 4):
        per_byte = 8 // bits
        codes = np.empty((rows, packed.shape[1] * per_byte), np.uint8)
        for place in range(per_byte):
            codes[:, place::per_byte] = (packed >> np.uint8(bits * place)) & np.uint8((1 << bits) - 1)
        return codes
    stream = np.unpackbits(packed, axis=-1, bitorder="little").reshape(rows, -1, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0]


def _affine(tensor: LogicalTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and biases [out, in/group] of a symmetric int8 matrix: (q + 128) * s - 128 * s = q * s, exactly."""
    columns = tensor.values.shape[1]
    group = next((g for g in INT8_GROUPS if columns % g == 0), None)
    if group is None:
        raise LayoutError(f"tensor {tensor.name}: mlx int8 needs columns in multiples of 32, got {columns}")
    assert tensor.scale is not None
    scale = np.repeat(tensor.scale[:, None], columns // group, axis=1)
    bias = to_bf16(-np.float32(MIDDLE) * from_bf16(scale))
    return np.ascontiguousarray(tensor.values).view(np.uint8) ^ np.uint8(MIDDLE), scale, bias
