"""A model folder as an ``ExpertSource``: experts are read when they are asked for, dense weights stream to their file.

Never holds more than one expert and a piece of one tensor; a dense tensor that needs a conversion is held whole. Knows
checkpoint tensors and transformers' parameters; knows no quantisation of packs and no byte layout.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from moebench.backends.torch_experts import expert_modules, expert_parameters
from moebench.backends.torch_source import empty_model, float_type, folder_hash
from moebench.checkpoint.decode import Decoded
from moebench.checkpoint.dense import in_pieces, write_own, write_tensors
from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.names import Names, resolve
from moebench.store.engines import StoreError
from moebench.store.layout import LogicalTensor

Dense = Literal["transformers", "checkpoint"]
BITS = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool}
FILE_NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class CheckpointSource:
    """An ``ExpertSource`` over a folder of safetensors with the hub's keys, or with transformers' own.

    Canonical tensors per expert: ``gate_up_proj`` [2I, H] (rows as the family orders them) or ``up_proj`` [I, H],
    ``down_proj`` [H, I], and their ``_bias`` vectors; families that store them transposed are turned. Weights are those
    of a bf16 model. ``dense`` says under which names, and with which bytes, all else is written.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name: str,
        dense: Dense = "transformers",
        dtype: str = "bfloat16",
        decoded: Any = None,
    ) -> None:
        self.checkpoint, self._dense, self._dtype = checkpoint, dense, float_type(dtype)
        self.decoded = decoded or Decoded(checkpoint)  # another view of the folder has the same two members
        self._empty = empty_model(checkpoint.config, dtype)
        self._modules = expert_modules(self._empty)
        shapes = {name: seen.shape for name, seen in self.decoded.tensors.items()}
        self.names: Names = resolve(self._empty, shapes, str(checkpoint.folder))
        self.layers = len(self._modules)
        self.experts = int(next(iter(self._modules.values())).num_experts)  # type: ignore[arg-type]
        self._tied = _tied(self._empty)
        self._check_dense()
        config = self._empty.config.to_dict()
        config.pop("_name_or_path", None)
        digest = folder_hash(checkpoint.folder)
        self.model: Mapping[str, Any] = {"name": name, "config": config, "weights_hash": digest, "dtype": dtype}
        _note(checkpoint.folder, self.names.left_out)

    def expert(self, layer: int, expert: int) -> dict[str, np.ndarray | LogicalTensor]:
        """Canonical tensors of one expert, fp32 [out, in] or [out]."""
        prefix, module = list(self._modules.items())[layer]
        tensors: dict[str, np.ndarray | LogicalTensor] = {}
        for name, parameter in expert_parameters(module).items():
            recipe = self.names.experts[f"{prefix}.{name}"]
            value = recipe.make_expert(self._empty, self._read, expert, self.experts, parameter.dim())
            if value.shape != parameter.shape[1:]:
                raise StoreError(
                    f"{self.checkpoint.folder}: {recipe.names[0]} makes an expert's {name} {list(value.shape)}, the "
                    f"configuration says {list(parameter.shape[1:])}"
                )
            value = value.to(self._dtype).float()
            tensors[name] = (value.T if module.is_transposed and value.dim() == 2 else value).contiguous().numpy()
        return tensors

    def write_dense(self, path: Path) -> int:
        """Write all but the routed experts, tied ones once; returns the file's bytes.

        ``transformers``: its parameter names, each in the dtype that the family gives it in a model of this dtype (some
        keep float32). ``checkpoint``: the folder's own names and bytes.
        """
        return (self._write_own if self._dense == "checkpoint" else self._write_parameters)(Path(path))

    def _write_own(self, path: Path) -> int:
        routed = {part for r in self.names.experts.values() for n in r.names for part in self.decoded.tensors[n].parts}
        left = {part for n in self.names.left_out for part in self.decoded.tensors[n].parts}
        return write_own(path, self.checkpoint, [n for n in self.checkpoint.tensors if n not in routed | left])

    def _write_parameters(self, path: Path) -> int:
        wanted = self._empty.state_dict()
        made = {name: recipe for recipe in self.names.dense.values() for name in recipe.targets}
        names = [group[0] for group in self._tied]
        entries = {n: (FILE_NAMES[wanted[n].dtype], tuple(wanted[n].shape), wanted[n].nbytes) for n in names}

        def pieces() -> Iterator[np.ndarray]:
            converted: dict[str, torch.Tensor] = {}
            for group in self._tied:
                name = next(n for n in group if n in made)
                recipe, target = made[name], wanted[group[0]]
                if recipe.converter is None:
                    shape = self.decoded.tensors[recipe.names[0]].shape
                    for piece in in_pieces(recipe.names[0], self.decoded.read, shape):
                        yield _bytes(self._tensor(recipe.names[0], piece).to(target.dtype))
                    continue
                if name not in converted:
                    converted = recipe.make(self._empty, self._read)
                yield _bytes(self._shaped(name, converted.pop(name), target).to(target.dtype))

        return write_tensors(path, entries, pieces())

    def _check_dense(self) -> None:
        """Every dense parameter has a value of its shape; tied ones that the checkpoint holds twice are equal."""
        made = {name: recipe for recipe in self.names.dense.values() for name in recipe.targets}
        wanted, where = self._empty.state_dict(), self.checkpoint.folder
        if missing := [group[0] for group in self._tied if not any(n in made for n in group)]:
            raise StoreError(f"{where}: lacks {len(missing)} tensors: {', '.join(missing[:3])}")
        for name, recipe in made.items():
            shape = self.decoded.tensors[recipe.names[0]].shape
            if recipe.converter is None and shape != tuple(wanted[name].shape):
                raise StoreError(
                    f"{where}: {recipe.names[0]} is {list(shape)}, the configuration says {list(wanted[name].shape)}"
                )
        for group in self._tied:
            first, *others = [n for n in group if n in made]
            for other in others:
                one, two = made[first].names[0], made[other].names[0]
                pair = (in_pieces(n, self.decoded.read, self.decoded.tensors[n].shape) for n in (one, two))
                if not all(np.array_equal(a, b) for a, b in zip(*pair, strict=True)):
                    raise StoreError(
                        f"{where}: config.json ties {one} to {two}, but they differ; set tie_word_embeddings to false"
                    )

    def _shaped(self, name: str, value: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if value.shape != wanted.shape:
            raise StoreError(
                f"{self.checkpoint.folder}: {name} becomes {list(value.shape)}, the configuration says "
                f"{list(wanted.shape)}"
            )
        return value

    def _read(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        return self._tensor(name, self.decoded.read(name, start, stop))

    def _tensor(self, name: str, data: np.ndarray) -> torch.Tensor:
        dtype = self.decoded.tensors[name].dtype
        return torch.from_numpy(data).view(BITS[dtype]) if dtype in BITS else torch.from_numpy(data)


def _tied(model: Any) -> list[list[str]]:
    """Names of dense parameters and persistent buffers, those that are one tensor together; wide numbers first."""
    routed = {f"{m}.{p}" for m, module in expert_modules(model).items() for p in expert_parameters(module)}
    groups: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name not in routed:
            groups.setdefault(id(tensor), []).append(name)
    return sorted(groups.values(), key=lambda names: -tensors[names[0]].itemsize)  # so that offsets are aligned


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _note(folder: Path, names: tuple[str, ...]) -> None:
    """Say on stderr what the model has no use for, by the first parts of the names."""
    if names:
        parts = Counter(".".join(name.split(".")[:3]) for name in names)
        listed = ", ".join(f"{part} ({count})" for part, count in parts.most_common(4))
        print(
            f"moebench: {folder}: {len(names)} tensors are no part of this model and are left out: {listed}",
            file=sys.stderr,
        )
