"""What is stored quantised in a checkpoint, as the numbers it stands for: FP8 with block scales, MXFP4 blocks.

A tensor is seen under the name and shape it has when decoded; its scales are not seen at all. Decoded numbers are bf16,
rounded once from fp32 as transformers does. Knows files through ``Checkpoint``; knows no model and no expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moebench.checkpoint.files import Checkpoint
from moebench.store.engines import StoreError
from moebench.store.quant import from_bf16, to_bf16

METHODS = ("fp8", "mxfp4")  # of quantization_config, that are decoded here
# Names that stand beside a decoded tensor and say how activations were scaled: of no use to a decoded weight.
ACTIVATION_SCALES = (".input_scale", ".activation_scale")


@dataclass(frozen=True)
class Seen:
    """A tensor as it is after decoding; ``parts`` are its files' names: one, or the codes and their scales."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]


class Decoded:
    """The tensors of a checkpoint by their decoded names; ``read`` gives rows, in bf16 bits where they were coded."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        quantization = checkpoint.config.get("quantization_config") or {}
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if quantization and method not in METHODS:
            raise StoreError(
                f"{checkpoint.folder} is quantised by {method}, which is not read; valid: {', '.join(METHODS)}, "
                f"MLX's own, or the plain weights"
            )
        block = quantization.get("weight_block_size") or (0, 0)
        if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n >= 0 for n in block):
            raise StoreError(f"{checkpoint.folder}: weight_block_size {block!r} is not two whole numbers")
        self.block = tuple(block)
        self.tensors: dict[str, Seen] = {}
        for name in checkpoint.tensors:
            if (seen := self._seen(name)) is not None:
                plain = name.removesuffix("_blocks") if len(seen.parts) > 1 else name
                if plain in self.tensors:
                    raise StoreError(f"{checkpoint.folder} holds tensor {plain} twice, plain and in blocks")
                self.tensors[plain] = seen

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of a tensor along its first axis, in the dtype of ``files.DTYPES``."""
        codes, *scales = self.tensors[name].parts
        if not scales:
            return self.checkpoint.read(codes, start, stop)
        if self.checkpoint.tensors[codes].dtype == "U8":
            return _mxfp4(self.checkpoint.read(codes, start, stop), self.checkpoint.read(scales[0], start, stop))
        return self._fp8(codes, scales[0], start, stop)

    def _seen(self, name: str) -> Seen | None:
        stored = self.checkpoint.tensors[name]
        others = self.checkpoint.tensors
        if name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in others:
            return None
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in others:
            return None
        if stored.dtype == "U8" and name.endswith("_blocks"):
            scales = f"{name.removesuffix('_blocks')}_scales"
            if scales not in others or stored.shape[:-1] != others[scales].shape or len(stored.shape) != 4:
                raise StoreError(f"{stored.file}: MXFP4 blocks {name} {list(stored.shape)} lack scales of their shape")
            experts, rows, blocks, half = stored.shape
            return Seen("BF16", (experts, 2 * half * blocks, rows), (name, scales))
        if stored.dtype in ("F8_E4M3", "F8_E5M2"):
            scale = f"{name}_scale_inv"
            if scale not in others:
                raise StoreError(f"{stored.file}: FP8 tensor {name} has no scale {scale} beside it")
            return Seen("BF16", stored.shape, (name, scale))
        return Seen(stored.dtype, stored.shape, (name,))

    def _fp8(self, name: str, scale_name: str, start: int, stop: int | None) -> np.ndarray:
        stored, table = self.checkpoint.tensors[name], _FLOAT8[self.checkpoint.tensors[name].dtype]
        scale = _scale(self.checkpoint.read(scale_name), self.checkpoint.tensors[scale_name].dtype)
        if scale.size > 1:
            grid = scale.shape if scale.ndim == len(stored.shape) and scale.shape[:-2] == stored.shape[:-2] else (0, 0)
            blocks = [_block(n, g, b) for n, g, b in zip(stored.shape[-2:], grid[-2:], self.block, strict=True)]
            if not all(blocks):
                raise StoreError(
                    f"{stored.file}: scales {list(scale.shape)} do not cover FP8 tensor {name} {list(stored.shape)}"
                )
            rows, columns = (np.arange(n) // b for n, b in zip(stored.shape[-2:], blocks, strict=True))
            kept = slice(start, stop)
            scale = scale[rows[kept]] if scale.ndim == 2 else scale[kept][..., rows, :]
            scale = scale[..., columns]
        return to_bf16(table[self.checkpoint.read(name, start, stop)] * scale)


def _block(length: int, pieces: int, configured: int) -> int:
    """Numbers that share a scale along an axis: as configured (the last block may be short), else equal parts; or 0."""
    if configured and -(-length // configured) == pieces:
        return configured
    return length // pieces if pieces and length % pieces == 0 else 0


def _scale(values: np.ndarray, dtype: str) -> np.ndarray:
    """Scales as fp32; a byte is an exponent of two with a bias of 127 (OCP MX v1.0, E8M0)."""
    if dtype in ("U8", "F8_E8M0"):
        return np.ldexp(np.float32(1), values.astype(np.int32) - 127).astype(np.float32)
    return from_bf16(values) if dtype == "BF16" else values.astype(np.float32)


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, out, in/32, 16] codes, low nibble first, and [E, out, in/32] exponents: bf16 bits [E, in, out]."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, -1)
    values = _FLOAT4[codes] * _scale(scales, "U8")[..., None]
    return to_bf16(values.reshape(*scales.shape[:2], -1).transpose(0, 2, 1))


def _minifloat(
    exponent_bits: int, mantissa_bits: int, bias: int, nan: tuple[int, ...], inf: tuple[int, ...] = ()
) -> np.ndarray:
    """fp32 values of all codes of a small float with a sign bit on top (OCP 8-bit floating point v1.0)."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias))
    magnitude = codes & ((1 << (exponent_bits + mantissa_bits)) - 1)
    size = np.where(np.isin(magnitude, nan), np.nan, np.where(np.isin(magnitude, inf), np.inf, size))
    return np.where(codes > (codes.size >> 1) - 1, -size, size).astype(np.float32)


_FLOAT8 = {
    "F8_E4M3": _minifloat(4, 3, 7, nan=(0x7F,)),
    "F8_E5M2": _minifloat(5, 2, 15, nan=(0x7D, 0x7E, 0x7F), inf=(0x7C,)),
}
_FLOAT4 = _minifloat(2, 1, 1, nan=())
