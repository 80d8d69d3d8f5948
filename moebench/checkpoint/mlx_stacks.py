"""The routed experts of an MLX checkpoint: each matrix of a layer stacked over experts (``switch_mlp.gate_proj``).

One expert is a range of each stack, and only it is read. Gate and up become one matrix, in the order of rows that
transformers has. Where layers, or gate and up, differ in bits, codes keep their values and scales in the most bits that
their matrix has in any layer: the weights stay the same, and every expert of a pack is laid out alike. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.mlx_quant import FLOATS, Format, MlxTensors
from moebench.store.engines import StoreError
from moebench.store.layout import CODE_BITS, INTERLEAVED, LogicalTensor, QuantSpec

# Modules that mlx-lm's models call their stacked experts (SwitchGLU).
STACK = re.compile(r"(.*\.(?:switch_mlp|experts|switch_glu))\.(gate_proj|up_proj|down_proj)\.(\w+)")
PARTS = ("weight", "scales", "biases", "bias", "global_scale")
MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def stacks(tensors: Mapping[str, object]) -> list[str]:
    """Paths of the modules that hold a layer's stacked experts, in order of layer; empty for other checkpoints."""
    found = {m[1] for name in tensors if (m := STACK.fullmatch(name)) and m[2] == "gate_proj" and m[3] == "weight"}
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else -1 for part in path.split(".")])


class Stacks:
    """Experts by layer and number, as logical tensors. ``stored`` is how they are quantised, None if they are not."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self._tensors = checkpoint, MlxTensors(checkpoint)
        self.paths = stacks(checkpoint.tensors)
        if not self.paths:
            raise StoreError(f"{checkpoint.folder} holds no stacked experts (...switch_mlp.gate_proj.weight)")
        self.names = {n for n in checkpoint.tensors if (m := STACK.fullmatch(n)) and m[1] in self.paths}
        self._interleaved = checkpoint.config.get("model_type") in INTERLEAVED
        self.layers, self.experts = len(self.paths), self._check_shapes()
        self.formats = {name: self._common(name) for name in MATRICES}
        self.stored = self._stored()

    def expert(self, layer: int, expert: int) -> dict[str, LogicalTensor]:
        """``gate_up_proj`` [2I, H], ``down_proj`` [H, I] and their ``_bias`` vectors."""
        path, found = self.paths[layer], {}
        for name, parts in MATRICES.items():
            halves = [self._tensors.rows(f"{path}.{part}", expert, expert + 1) for part in parts]
            found[name] = self._joined(name, self.formats[name].kind, halves)
        for name, parts in MATRICES.items():
            if f"{path}.{parts[0]}.bias" in self.checkpoint.tensors:
                vectors = [self.checkpoint.read(f"{path}.{part}.bias", expert, expert + 1)[0] for part in parts]
                found[f"{name}_bias"] = LogicalTensor(f"{name}_bias", "none", self._rows(vectors))
        return found

    def _joined(self, name: str, kind: str, halves: list[LogicalTensor]) -> LogicalTensor:
        values = self._rows([half.values for half in halves])
        rest = [
            None if getattr(halves[0], part) is None else self._rows([getattr(half, part) for half in halves])
            for part in ("scale", "bias")
        ]
        return LogicalTensor(name, kind, values, *rest)

    def _rows(self, halves: list[np.ndarray]) -> np.ndarray:
        if len(halves) == 1:
            return halves[0]
        joined = np.stack(halves, axis=1 if self._interleaved else 0)
        return joined.reshape(-1, *halves[0].shape[1:])

    def _check_shapes(self) -> int:
        """Every layer has the parts and shapes of the first; returns the number of experts."""
        tensors, where = self.checkpoint.tensors, self.checkpoint.folder
        if odd := sorted(name for name in self.names if STACK.fullmatch(name)[3] not in PARTS):  # type: ignore[index]
            raise StoreError(f"{where}: {odd[0]} is no part of stacked experts that is known")
        first = self.paths[0]
        wanted = {n: self._shape(f"{first}.{n}") for name in MATRICES.values() for n in name}
        experts, rows, columns = wanted["gate_proj"]
        if wanted["up_proj"] != wanted["gate_proj"] or wanted["down_proj"] != (experts, columns, rows):
            raise StoreError(f"{where}: {first} has matrices {wanted}, which do not make experts")
        biased = {n for n in wanted if f"{first}.{n}.bias" in tensors}
        for path in self.paths:
            for name, shape in wanted.items():
                if (found := self._shape(f"{path}.{name}")) != shape:
                    raise StoreError(f"{where}: {path}.{name} is {list(found)}, in the first layer it is {list(shape)}")
                bias = tensors.get(f"{path}.{name}.bias")
                if (bias is not None) != (name in biased):
                    raise StoreError(f"{where}: {path}.{name} differs from the first layer's: only one has a bias")
                if bias is not None and (bias.shape != shape[:2] or bias.dtype not in FLOATS):
                    raise StoreError(f"{where}: {path}.{name}.bias is {bias.dtype} {list(bias.shape)}")
        if biased not in (set(), set(wanted)):
            raise StoreError(f"{where}: {first} has biases for {', '.join(sorted(biased))} alone")
        return experts

    def _shape(self, path: str) -> tuple[int, ...]:
        if f"{path}.weight" not in self.checkpoint.tensors:
            raise StoreError(f"{self.checkpoint.folder}: lacks {path}.weight")
        shape = self._tensors.shape(path)
        if len(shape) != 3 or not all(shape):
            raise StoreError(
                f"{self.checkpoint.folder}: {path}.weight is {list(shape)}, not a stack of experts' matrices"
            )
        return shape

    def _common(self, name: str) -> Format:
        """The one format of a matrix in a pack, in which every layer's is exact."""
        formats = {f"{p}.{part}": self._tensors.format(f"{p}.{part}") for p in self.paths for part in MATRICES[name]}
        widest = max(formats.values(), key=lambda form: CODE_BITS.get(form.kind, 16))
        for path, form in formats.items():
            affine = {form.kind, widest.kind}.isdisjoint(("none", "mxfp4", "mxfp8", "nvfp4"))
            if form != widest and not (affine and form == replace(widest, kind=form.kind)):
                raise StoreError(
                    f"{self.checkpoint.folder}: {path} is {form}, others are {widest}; experts of one pack share a "
                    f"group, a mode and a dtype"
                )
        return widest

    @property
    def widened(self) -> list[str]:
        """Names of matrices that some layer stores in fewer bits than the pack does."""
        kinds = {n: {self._tensors.format(f"{p}.{q}").kind for p in self.paths for q in MATRICES[n]} for n in MATRICES}
        return [name for name, found in kinds.items() if len(found) > 1]

    def _stored(self) -> QuantSpec | None:
        formats = set(self.formats.values())
        if all(form.kind == "none" for form in formats):
            return None
        form = formats.pop()
        if not formats and form.kind == "int4" and form.dtype == "BF16":
            return QuantSpec("int4", form.group)
        return QuantSpec("stored")
