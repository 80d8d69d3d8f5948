"""The logical content of an expert, and the byte layouts that a pack may store it in.

Logical content is independent of any machine: per tensor either bf16 values, or unsigned integers with scale and bias
(w = q * scale + bias). A ``ByteLayout`` turns it into the bytes a kernel wants; two packs of one model in different
byte layouts have one logical hash.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moebench.errors import MoebenchError

# Bits of the codes that a quantised tensor's ``values`` hold, by kind; int8 holds signed numbers instead of codes.
CODE_BITS = {"int4": 4, **{f"affine{bits}": bits for bits in (2, 3, 5, 6, 8)}, "mxfp4": 4, "mxfp8": 8, "nvfp4": 4}
KINDS = ("none", "int8", *CODE_BITS)
INTERLEAVED = ("gpt_oss",)  # model types whose gate_up_proj has rows gate, up, gate, up ... as transformers orders them


@dataclass(frozen=True)
class QuantSpec:
    """How weights are quantised: ``none`` (bf16), ``int8`` (symmetric per output row), ``int4`` (affine per group), or
    ``stored``: each tensor as its quantised source holds it.
    """

    kind: str = "int4"
    group: int = 64

    def __post_init__(self) -> None:
        if self.kind not in ("none", "int8", "int4", "stored"):
            raise ValueError(f"quant {self.kind!r} is not one of none, int8, int4, stored")
        if self.kind == "int4" and self.group not in (32, 64, 128):
            raise ValueError(f"group {self.group} is not one of 32, 64, 128")


@dataclass(frozen=True, eq=False)
class LogicalTensor:
    """One weight matrix [out, in] (or a bias vector [out]) of one expert.

    ``none``: ``values`` are floats. ``int4``: ``values`` is uint8 [out, in] in 0..15, ``scale`` and ``bias`` are floats
    [out, in/group]; ``affine2`` to ``affine8`` are the same of other bits. ``int8``: ``values`` is int8 [out, in],
    ``scale`` is floats [out], no bias. ``mxfp4``, ``mxfp8``, ``nvfp4``: ``values`` is uint8 [out, in], codes of FP4
    E2M1 or FP8 E4M3 numbers, ``scale`` uint8 [out, in/group], codes of powers of two (E8M0; nvfp4: E4M3), no bias (OCP
    Microscaling Formats 1.0, section 5). Floats are uint16 holding bf16 bits; what a checkpoint brings may also be
    float16 or float32. Vectors are always ``none``.
    """

    name: str
    kind: str
    values: np.ndarray
    scale: np.ndarray | None = None
    bias: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, before any packing."""
        return tuple(self.values.shape)


@dataclass(frozen=True)
class TensorSpec:
    """Where one encoded part of an expert lies inside its extent; the same for all experts of a pack.

    ``name`` is e.g. ``gate_up_proj`` or ``gate_up_proj.scales``; ``dtype`` a safetensors-style name (``U8``, ``U32``,
    ``BF16``); ``offset`` and ``nbytes`` are relative to the expert's first byte; offsets are 64-byte aligned.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class ByteLayout(ABC):
    """Encodes logical tensors for one kernel family, losslessly or not at all."""

    name: str  # "plain", "torch_cpu" or "mlx"
    isa: str  # instruction set the bytes depend on, or "any"

    @abstractmethod
    def encode(self, tensor: LogicalTensor) -> dict[str, np.ndarray]:
        """Encoded parts by name (``NAME`` and, where needed, ``NAME.scales``), as C-contiguous arrays.

        Raises ``LayoutError`` naming tensor and group where the encoding would not be exact.
        """

    @abstractmethod
    def decode(self, name: str, kind: str, shape: tuple[int, ...], parts: Mapping[str, np.ndarray]) -> LogicalTensor:
        """The inverse of ``encode``; ``decode(encode(x)) == x`` bit for bit."""


class LayoutError(MoebenchError, ValueError):
    """A tensor that a byte layout cannot hold exactly."""


class ExpertSource(Protocol):
    """Where a pack's weights come from: a model in memory, a folder of safetensors, a random generator."""

    layers: int
    experts: int
    model: Mapping[str, Any]  # name, config (dict), weights hash; copied into the manifest

    def expert(self, layer: int, expert: int) -> dict[str, np.ndarray | LogicalTensor]:
        """Tensors of one expert by name, in a fixed order of names: fp32 [out, in] or [out]; of a source with a
        member ``stored`` that is no None (the ``QuantSpec`` of what it holds), the tensors that it holds.
        """

    def write_dense(self, path: Path) -> int:
        """Write everything but the routed experts as one safetensors file; returns its size in bytes."""
