"""How MLX stores quantised tensors in a checkpoint: bits, group and mode of each, by ``quantization`` of config.json.

There a default stands beside settings of single tensors by their path; ``PATH.scales`` says whether PATH is quantised
at all. Knows files through ``Checkpoint``; knows no model and no expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.checkpoint.files import Checkpoint
from moebench.store.engines import StoreError
from moebench.store.layout import CODE_BITS, LogicalTensor
from moebench.store.mlx_bytes import MlxLayout
from moebench.store.quant import dequantize, to_bf16

AFFINE = {bits: "int4" if bits == 4 else f"affine{bits}" for bits in (2, 3, 4, 5, 6, 8)}  # kind by bits
AFFINE_GROUPS = (32, 64, 128)
MICRO_GROUPS = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
FLOATS = ("BF16", "F16", "F32")  # of scales, biases and what is not quantised


@dataclass(frozen=True)
class Format:
    """How one tensor is stored: its logical kind, weights per scale, and the dtype of scales or of plain weights."""

    kind: str
    group: int
    dtype: str

    def __str__(self) -> str:
        return self.dtype if self.kind == "none" else f"{self.kind} in groups of {self.group} with {self.dtype} scales"


class MlxTensors:
    """The tensors of a checkpoint by path: quantised ones are one tensor, of the shape that they stand for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        settings = checkpoint.config.get("quantization")
        self._settings: Mapping[str, Any] = settings if isinstance(settings, dict) else {}

    def format(self, path: str) -> Format:
        """The format of ``PATH.weight``; ``StoreError`` where names, shapes and config.json contradict one another."""
        tensors, where = self.checkpoint.tensors, self.checkpoint.folder
        weight = tensors[f"{path}.weight"]
        if f"{path}.scales" not in tensors:
            if weight.dtype not in FLOATS:
                raise StoreError(f"{where}: {path}.weight is {weight.dtype} and has no {path}.scales beside it")
            return Format("none", 1, weight.dtype)
        own = self._settings.get(path)
        found: Any = own if isinstance(own, dict) else self._settings
        mode, bits, group = map(found.get, ("mode", "bits", "group_size"))
        if (kind := _kind(mode, bits, group)) is None:
            raise StoreError(
                f"{where}: config.json says that {path} is quantised in mode {mode!r:.40}, bits {bits!r:.40}, "
                f"group_size {group!r:.40}, which is not read"
            )
        if f"{path}.global_scale" in tensors:
            raise StoreError(f"{where}: {path} has a global scale, which is not read")
        scales, biases = tensors[f"{path}.scales"], tensors.get(f"{path}.biases")
        *rows, words = weight.shape or (0,)
        *others, groups = scales.shape or (0,)
        fits = words > 0 and (others, groups * bits * group) == (rows, words * 32)
        if kind in AFFINE.values():
            fits &= biases is not None and (biases.shape, biases.dtype) == (scales.shape, scales.dtype)
            fits &= scales.dtype in FLOATS
        else:
            fits &= biases is None and scales.dtype == "U8"
        if not fits or weight.dtype != "U32":
            raise StoreError(
                f"{where}: {path} is {weight.dtype} {list(weight.shape)} with scales {scales.dtype} "
                f"{list(scales.shape)}, which is not {bits} bits in groups of {group} as config.json says"
            )
        return Format(kind, group, scales.dtype)

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of the weights that a path stands for."""
        form = self.format(path)
        *rows, last = self.checkpoint.tensors[f"{path}.weight"].shape
        return (*rows, last if form.kind == "none" else last * 32 // CODE_BITS[form.kind])

    def rows(self, path: str, start: int = 0, stop: int | None = None) -> LogicalTensor:
        """Rows ``start`` to ``stop`` of a path along its first axis, the axes before the last made one."""
        form, read = self.format(path), self.checkpoint.read
        names = {"w": f"{path}.weight", "w.scales": f"{path}.scales", "w.biases": f"{path}.biases"}
        parts = {n: read(name, start, stop) for n, name in names.items() if name in self.checkpoint.tensors}
        flat = {name: part.reshape(-1, part.shape[-1]) for name, part in parts.items()}
        shape = flat["w"].shape if form.kind == "none" else (0, 0)  # of a quantised tensor its words say it
        return MlxLayout().decode("w", form.kind, shape, flat)

    def plain(self, path: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The same rows as bf16 bits in the tensor's own axes, dequantised in fp32 and rounded once."""
        weights = dequantize(self.rows(path, start, stop))
        return to_bf16(weights).reshape(-1, *self.shape(path)[1:])


def _kind(mode: Any, bits: Any, group: Any) -> str | None:
    """The logical kind of a mode (affine if there is none), bits and group, whatever stands there; None if unknown."""
    if type(bits) is not int or type(group) is not int:
        return None
    if mode in (None, "affine"):
        return AFFINE.get(bits) if group in AFFINE_GROUPS else None
    known = isinstance(mode, str) and (CODE_BITS.get(mode), MICRO_GROUPS.get(mode)) == (bits, group)
    return mode if known else None
