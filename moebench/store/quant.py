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

BLOCK = 1 << 18  # numbers that are divided at once
WEIGHT_LIMIT = 1e30  # beyond it sums of scale and bias leave the range of bf16


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) of fp32 ``values``, rounded to nearest, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    if not (bits & np.uint32(0xFFFF)).any():  # bf16 numbers already
        return (bits >> 16).astype(np.uint16)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 ``bits`` (uint16), exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def floats(values: np.ndarray) -> np.ndarray:
    """fp32 numbers of bf16 bits (uint16), float16 or float32; exact."""
    return from_bf16(values) if values.dtype == np.uint16 else values.astype(np.float32)


def quantize(name: str, weights: np.ndarray, spec: QuantSpec) -> LogicalTensor:
    """Quantise one fp32 matrix [out, in] along its input axis; a vector [out] stays bf16.

    Raises ``StoreError`` naming the tensor where a weight is not finite or beyond 1e30, or the input axis is no
    multiple of the group.
    """
    weights = np.asarray(weights, np.float32)
    if weights.ndim not in (1, 2) or weights.size == 0:
        raise StoreError(f"tensor {name}: shape {weights.shape} is neither [out, in] nor [out]")
    if not (weights.max() <= WEIGHT_LIMIT and weights.min() >= -WEIGHT_LIMIT):
        raise StoreError(f"tensor {name}: holds a weight that is not finite or beyond {WEIGHT_LIMIT:g}")
    if spec.kind == "stored":
        raise StoreError(f"tensor {name}: quant=stored keeps a checkpoint's codes, of which plain weights have none")
    if weights.ndim == 1 or spec.kind == "none":
        return LogicalTensor(name, "none", to_bf16(weights))
    if spec.kind == "int8":
        return _quantize_rows(name, weights)
    if weights.shape[1] % spec.group:
        raise StoreError(f"tensor {name}: input size of shape {weights.shape} is no multiple of group {spec.group}")
    return _quantize_groups(name, weights, spec.group)


def dequantize(tensor: LogicalTensor) -> np.ndarray:
    """The fp32 weights that ``tensor`` stands for: codes and scales multiplied, then biases added, each in fp32."""
    if tensor.kind == "none":
        return floats(tensor.values)
    assert tensor.scale is not None
    if tensor.kind == "int8":
        return tensor.values * floats(tensor.scale)[:, None]
    rows, columns = tensor.values.shape
    if tensor.bias is None:
        elements, scales = _FORMATS[tensor.kind]
        groups, scale = elements[tensor.values], scales[tensor.scale]
        return (groups.reshape(rows, scale.shape[1], -1) * scale[..., None]).reshape(rows, columns)
    scale, groups = floats(tensor.scale), tensor.values.astype(np.float32)
    groups = groups.reshape(rows, scale.shape[1], -1) * scale[..., None]
    return (groups + floats(tensor.bias)[..., None]).reshape(rows, columns)


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
                if part.dtype.kind == "f":  # bf16 bits, codes and int8 are the rule and stand unsaid
                    digest.update(part.dtype.str.encode())
                digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


def logical_hash(digests: Sequence[bytes]) -> str:
    """The hash of a pack's logical content: xxh3_128 over the digests of its experts in order of (layer, expert)."""
    return xxhash.xxh3_128(b"".join(digests)).hexdigest()


def _quantize_rows(name: str, weights: np.ndarray) -> LogicalTensor:
    scale = to_bf16(np.abs(weights).max(axis=1) / 127)
    values = np.empty(weights.shape, np.int8)
    _integers(weights, None, from_bf16(scale)[:, None], -127, 127, values)
    return LogicalTensor(name, "int8", values, scale)


def _quantize_groups(name: str, weights: np.ndarray, group: int) -> LogicalTensor:
    groups = weights.reshape(weights.shape[0], -1, group)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scale, bias = _round((high - low) / 15), _round(low)
    symmetric = ~midpoint_is_exact(scale, bias)
    scale = np.where(symmetric, _round(np.maximum(np.maximum(-low / 8, high / 7), 0)), scale)
    bias = np.where(symmetric, -8 * scale, bias) + np.float32(0)  # no negative zero: bias must come back from z
    values = np.empty(groups.shape, np.uint8)
    _integers(groups, bias[..., None], scale[..., None], 0, 15, values)
    return LogicalTensor(name, "int4", values.reshape(weights.shape), to_bf16(scale), to_bf16(bias))


def _integers(
    weights: np.ndarray, bias: np.ndarray | None, scale: np.ndarray, lowest: int, highest: int, out: np.ndarray
) -> None:
    """Fill ``out`` with (weights - bias) / scale, rounded and clipped, in blocks of rows that stay in the cache."""
    divisor = np.where(scale > 0, scale, np.inf)
    step = max(1, BLOCK // weights[0].size)
    for start in range(0, len(weights), step):
        rows = slice(start, start + step)
        part = weights[rows].copy() if bias is None else weights[rows] - bias[rows]
        part /= divisor[rows]
        np.rint(part, out=part)
        out[rows] = np.clip(part, lowest, highest, out=part)


def _float_codes(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """fp32 numbers of all codes of a small float with a sign bit on top, finite throughout (E2M1, E4M3)."""
    code = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa, exponent = code & ((1 << mantissa_bits) - 1), (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    return np.where(code >> (exponent_bits + mantissa_bits), -values, values).astype(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    return from_bf16(to_bf16(values))


# OCP Microscaling Formats 1.0, section 5.3: E2M1 has no infinity and no NaN, E4M3 NaN at all ones, E8M0 is 2^(c-127).
_E2M1, _E4M3 = _float_codes(2, 1, 1), _float_codes(4, 3, 7)
_E4M3[[0x7F, 0xFF]] = np.nan
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
_FORMATS = {"mxfp4": (_E2M1, _E8M0), "mxfp8": (_E4M3, _E8M0), "nvfp4": (_E2M1, _E4M3)}  # elements, scales
