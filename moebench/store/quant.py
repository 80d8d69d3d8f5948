"""The logical quantisation of expert weights, and bf16 in numpy.

int4 groups are affine, w = q * scale + bias, and always such that the midpoint z = bias + 8 * scale is a bf16 number
too: kernels that store (scale, z) and kernels that store (scale, bias) then hold the same weights. Knows no bytes on
disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from moebench.store.engines import StoreError
from moebench.store.layout import LogicalTensor, QuantSpec

WEIGHT_LIMIT = 1e30  # beyond it sums of scale and bias leave the range of bf16


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) of fp32 ``values``, rounded to nearest, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 ``bits`` (uint16), exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantize(name: str, weights: np.ndarray, spec: QuantSpec) -> LogicalTensor:
    """Quantise one fp32 matrix [out, in] along its input axis; a vector [out] stays bf16.

    Raises ``StoreError`` naming the tensor where a weight is not finite or beyond 1e30, or the input axis is no
    multiple of the group.
    """
    weights = np.asarray(weights, np.float32)
    if weights.ndim not in (1, 2) or weights.size == 0:
        raise StoreError(f"tensor {name}: shape {weights.shape} is neither [out, in] nor [out]")
    if not np.abs(weights).max() <= WEIGHT_LIMIT:
        raise StoreError(f"tensor {name}: holds a weight that is not finite or beyond {WEIGHT_LIMIT:g}")
    if weights.ndim == 1 or spec.kind == "none":
        return LogicalTensor(name, "none", to_bf16(weights))
    if spec.kind == "int8":
        return _quantize_rows(name, weights)
    if weights.shape[1] % spec.group:
        raise StoreError(f"tensor {name}: input size of shape {weights.shape} is no multiple of group {spec.group}")
    return _quantize_groups(name, weights, spec.group)


def dequantize(tensor: LogicalTensor) -> np.ndarray:
    """The fp32 weights that ``tensor`` stands for."""
    if tensor.kind == "none":
        return from_bf16(tensor.values)
    assert tensor.scale is not None
    scale = from_bf16(tensor.scale)
    if tensor.bias is None:
        return tensor.values * scale[:, None]
    rows, columns = tensor.values.shape
    groups = tensor.values.reshape(rows, scale.shape[1], -1).astype(np.float32)
    return (groups * scale[..., None] + from_bf16(tensor.bias)[..., None]).reshape(rows, columns)


def midpoint_is_exact(scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Whether z = bias + 8 * scale is a bf16 number from which both come back exactly; fp32 arrays of bf16 numbers."""
    eight, wide_bias = 8 * scale.astype(np.float64), bias.astype(np.float64)
    z = from_bf16(to_bf16(bias + np.float32(8) * scale)).astype(np.float64)
    return (z - eight == wide_bias) & (z - wide_bias == eight)


def expert_digest(tensors: Iterable[LogicalTensor]) -> bytes:
    """xxh3_128 of one expert's logical content, tensors in order of name; independent of any byte layout."""
    digest = xxhash.xxh3_128()
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(f"{tensor.name}\0{tensor.kind}\0{tensor.shape}\0".encode())
        for part in (tensor.values, tensor.scale, tensor.bias):
            if part is not None:
                digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


def logical_hash(digests: Sequence[bytes]) -> str:
    """The hash of a pack's logical content: xxh3_128 over the digests of its experts in order of (layer, expert)."""
    return xxhash.xxh3_128(b"".join(digests)).hexdigest()


def _quantize_rows(name: str, weights: np.ndarray) -> LogicalTensor:
    scale = to_bf16(np.abs(weights).max(axis=1) / 127)
    values = _integers(weights, from_bf16(scale)[:, None], -127, 127)
    return LogicalTensor(name, "int8", values.astype(np.int8), scale)


def _quantize_groups(name: str, weights: np.ndarray, group: int) -> LogicalTensor:
    groups = weights.reshape(weights.shape[0], -1, group)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scale, bias = _round((high - low) / 15), _round(low)
    symmetric = ~midpoint_is_exact(scale, bias)
    scale = np.where(symmetric, _round(np.maximum(np.maximum(-low / 8, high / 7), 0)), scale)
    bias = np.where(symmetric, -8 * scale, bias) + np.float32(0)  # no negative zero: bias must come back from z
    values = _integers(groups - bias[..., None], scale[..., None], 0, 15).astype(np.uint8)
    return LogicalTensor(name, "int4", values.reshape(weights.shape), to_bf16(scale), to_bf16(bias))


def _integers(weights: np.ndarray, scale: np.ndarray, lowest: int, highest: int) -> np.ndarray:
    return np.clip(np.rint(weights / np.where(scale > 0, scale, np.inf)), lowest, highest)


def _round(values: np.ndarray) -> np.ndarray:
    return from_bf16(to_bf16(values))
