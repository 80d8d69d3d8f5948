"""The ``torch_cpu`` byte layout: expert tensors as torch's CPU kernels read them.

``none`` stores bf16, ``int8`` int8 rows with bf16 row scales, ``int4`` torch's interleaved nibbles with bf16
(scale, zero) pairs, where w = (q - 8) * scale + zero. The nibble order depends on the instruction set that torch
dispatches to, so the layout names it. Knows no files and no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from moebench.store.layout import ByteLayout, LayoutError, LogicalTensor
from moebench.store.quant import from_bf16, to_bf16

INT4_ROWS, INT4_COLUMNS, INT8_COLUMNS = 16, 32, 16  # what the kernels take in whole


def bias_bits(scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """bf16 bits of bias = zero - 8 * scale, from bf16 bits."""
    bias = from_bf16(zero).astype(np.float64) - 8.0 * from_bf16(scale).astype(np.float64)
    return to_bf16(bias.astype(np.float32))


def pack_nibbles(values: np.ndarray) -> np.ndarray:
    """Interleave 0..15 values uint8 [O, I] for torch's int4 kernel on this machine: uint8 [O, I/2]."""
    return torch._convert_weight_to_int4pack_for_cpu(torch.from_numpy(values.astype(np.int32)), 1).numpy()


@cache
def nibble_positions(rows: int, columns: int) -> np.ndarray:
    """For every packed nibble (low nibble of byte 0, high nibble of byte 0, ...) the flat index of its value.

    Read off the converter itself, so that it holds for whatever order this instruction set has: the index is pushed
    through four bits at a time.
    """
    index = np.arange(rows * columns).reshape(rows, columns)
    positions = np.zeros(rows * columns, np.int64)
    for shift in range(0, int(rows * columns - 1).bit_length(), 4):
        packed = pack_nibbles(((index >> shift) & 15).astype(np.uint8)).reshape(-1)
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1).astype(np.int64)
        positions |= nibbles << shift
    return positions


def require_kernel(tensor: LogicalTensor) -> None:
    """Raise ``LayoutError`` unless there is a kernel under torch for weights of this kind, with floats of this kind."""
    if tensor.kind not in ("none", "int8", "int4"):
        raise LayoutError(
            f"{tensor.name}: torch has no CPU kernel for {tensor.kind} weights, and as bf16 they would be others; "
            f"use backend=mlx"
        )
    for part in (tensor.values if tensor.kind == "none" else None, tensor.scale, tensor.bias):
        if part is not None and part.dtype != np.uint16:
            raise LayoutError(
                f"{tensor.name}: holds {part.dtype} numbers, which the torch_cpu layout would round to bf16; "
                f"use backend=mlx"
            )


class TorchCpuLayout(ByteLayout):
    """Bytes for F.linear, ``_weight_int8pack_mm`` and ``_weight_int4pack_mm_for_cpu`` on this machine."""

    name = "torch_cpu"

    def __init__(self) -> None:
        self.isa = torch.backends.cpu.get_cpu_capability()

    def encode(self, tensor: LogicalTensor) -> dict[str, np.ndarray]:
        """Parts ``NAME`` (uint16, int8 or uint8) and, if quantised, ``NAME.scales`` (uint16 bf16 bits)."""
        name = tensor.name
        require_kernel(tensor)
        if tensor.kind == "none":
            return {name: np.ascontiguousarray(tensor.values)}
        rows, columns = tensor.shape
        if tensor.kind == "int8":
            if columns % INT8_COLUMNS:
                raise LayoutError(f"{name}: torch_cpu int8 needs columns in multiples of {INT8_COLUMNS}, got {columns}")
            return {name: np.ascontiguousarray(tensor.values), f"{name}.scales": np.ascontiguousarray(tensor.scale)}
        if rows % INT4_ROWS or columns % INT4_COLUMNS:
            raise LayoutError(
                f"{name}: torch_cpu int4 needs rows in multiples of {INT4_ROWS} and columns of {INT4_COLUMNS}, "
                f"got {rows} x {columns}"
            )
        # The zero point bias + 8 * scale must be a bf16 value, and give the very bias back.
        zero = from_bf16(tensor.bias).astype(np.float64) + 8.0 * from_bf16(tensor.scale).astype(np.float64)
        bits = to_bf16(zero.astype(np.float32))
        inexact = (from_bf16(bits) != zero) | (bias_bits(tensor.scale, bits) != tensor.bias)
        if inexact.any():
            row, group = np.argwhere(inexact)[0]
            raise LayoutError(
                f"{name}: zero point of row {row}, group {group} is not exact in bf16 (torch_cpu int4); use backend=mlx"
            )
        scales = np.stack([tensor.scale.T, bits.T], axis=-1)
        return {name: pack_nibbles(tensor.values), f"{name}.scales": np.ascontiguousarray(scales)}

    def decode(self, name: str, kind: str, shape: tuple[int, ...], parts: Mapping[str, np.ndarray]) -> LogicalTensor:
        """The logical tensor that ``encode`` was given, bit for bit."""
        if kind == "none":
            return LogicalTensor(name, kind, parts[name].reshape(shape))
        scales = parts[f"{name}.scales"]
        if kind == "int8":
            return LogicalTensor(name, kind, parts[name].reshape(shape), scale=scales)
        packed = parts[name].reshape(-1)
        values = np.empty(packed.size * 2, np.uint8)
        values[nibble_positions(*shape)] = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
        scale, zero = np.ascontiguousarray(scales[..., 0].T), scales[..., 1].T
        bias = bias_bits(scale, zero)
        return LogicalTensor(name, kind, values.reshape(shape), scale=scale, bias=bias)
