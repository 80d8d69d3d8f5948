"""A model folder that MLX wrote as an ``ExpertSource``: experts as they are stored, dense weights by either name.

Nothing is requantised. For packs in ``mlx`` bytes the dense weights are the folder's own, byte for byte; for torch they
are those of a bf16 model: quantised ones are dequantised in fp32 and rounded once. Knows stacks and names through their
modules.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.mlx_stacks import Stacks
from moebench.errors import UsageError
from moebench.store.layout import LogicalTensor, QuantSpec
from moebench.store.mlx_bytes import MlxLayout
from moebench.store.quant import dequantize


class MlxSource:
    """Experts and dense weights of one MLX folder; ``stored`` is how experts are quantised, None if they are not."""

    def __init__(self, checkpoint: Checkpoint, name: str, dense: str) -> None:
        self.checkpoint, self._stacks = checkpoint, Stacks(checkpoint)
        self.layers, self.experts, self.stored = self._stacks.layers, self._stacks.experts, self._stacks.stored
        self._dense = self._transformers(name) if dense == "transformers" else None
        if self._dense is not None:
            self.model: Mapping[str, Any] = self._dense.model
        else:
            from moebench.backends.torch_source import folder_hash

            digest = folder_hash(checkpoint.folder)
            self.model = {"name": name, "config": checkpoint.config, "weights_hash": digest, "dtype": "bfloat16"}
        if widened := self._stacks.widened:
            print(
                f"moebench: {checkpoint.folder}: bits of experts differ in {' and '.join(widened)}; each is kept in "
                f"the most that it has, with the same weights",
                file=sys.stderr,
            )

    def expert(self, layer: int, expert: int) -> dict[str, np.ndarray | LogicalTensor]:
        """Canonical tensors of one expert: as stored where the folder is quantised, else fp32."""
        found = self._stacks.expert(layer, expert)
        return {name: dequantize(tensor) if self.stored is None else tensor for name, tensor in found.items()}

    def write_dense(self, path: Path) -> int:
        """Write all but the routed experts; returns the file's bytes."""
        if self._dense is not None:
            return self._dense.write_dense(path)
        from moebench.checkpoint.dense import write_own

        return write_own(path, self.checkpoint, [n for n in self.checkpoint.tensors if n not in self._stacks.names])

    def _transformers(self, name: str) -> Any:
        """The folder as a hub's one, for its dense weights."""
        from moebench.backends.torch_experts import expert_modules, expert_parameters
        from moebench.backends.torch_source import QUANTISATION, empty_model
        from moebench.checkpoint.mlx_names import HubView
        from moebench.checkpoint.source import CheckpointSource

        plain = copy.copy(self.checkpoint)
        plain.config = {k: v for k, v in plain.config.items() if k not in QUANTISATION}
        view = HubView(self.checkpoint, self._stacks.names)
        modules = expert_modules(empty_model(plain.config, "bfloat16"))
        view.add_experts(
            {f"{m}.{n}": tuple(p.shape) for m, module in modules.items() for n, p in expert_parameters(module).items()}
        )
        return CheckpointSource(plain, name, "transformers", decoded=view)


def stored_form(folder: str | Path) -> tuple[QuantSpec, int]:
    """How the experts of a quantised MLX folder are stored, and the bytes of one in ``mlx`` bytes; from one expert."""
    stacks = Stacks(Checkpoint(folder))
    if stacks.stored is None:
        raise UsageError(f"quant=stored keeps the codes of a checkpoint that MLX quantised, and {folder} is none")
    parts = [MlxLayout().encode(tensor) for tensor in stacks.expert(0, 0).values()]
    return stacks.stored, sum(part.nbytes for found in parts for part in found.values())
