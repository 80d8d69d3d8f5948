"""The one way from a model folder to the source of a pack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.hub import model_name
from moebench.checkpoint.mlx_stacks import stacks
from moebench.store.layout import ExpertSource

if TYPE_CHECKING:
    from moebench.checkpoint.source import Dense


def is_mlx(checkpoint: Checkpoint) -> bool:
    """Whether a folder is one that MLX wrote: quantised with bits and a group size of its own, or experts stacked."""
    found = checkpoint.config.get("quantization")
    return (isinstance(found, dict) and {"bits", "group_size"} <= set(found)) or bool(stacks(checkpoint.tensors))


def open_source(folder: str | Path, *, dense: Dense = "transformers") -> ExpertSource:
    """The experts and dense weights of a folder with config.json and safetensors; nothing but headers is read yet.

    ``dense`` is how ``write_dense`` writes: ``transformers`` (its names and dtypes) or ``checkpoint`` (the folder's
    own). Raises ``StoreError`` or ``BackendError`` of one line for a folder that cannot be packed.
    """
    checkpoint = Checkpoint(folder)
    if is_mlx(checkpoint):
        from moebench.checkpoint.mlx_source import MlxSource

        return MlxSource(checkpoint, model_name(checkpoint.folder), dense)
    from moebench.checkpoint.source import CheckpointSource

    return CheckpointSource(checkpoint, model_name(checkpoint.folder), dense)
