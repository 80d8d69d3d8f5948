"""A model folder as a whole transformers model: the unmodified one, to compare with and to train from.

Folders that transformers reads it loads itself; those that MLX wrote are filled from their source, quantised weights as
the numbers they stand for. Knows models in memory; knows no pack.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from moebench.backends.torch_experts import expert_modules
from moebench.backends.torch_model import load_dense
from moebench.backends.torch_source import empty_model, float_type, load_model
from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.hub import model_name
from moebench.checkpoint.mlx_source import MlxSource
from moebench.checkpoint.open import is_mlx
from moebench.store.layout import LogicalTensor
from moebench.store.quant import dequantize


def load_whole(folder: str | Path, dtype: str, attention: str = "eager") -> PreTrainedModel:
    """The model of a folder in ``dtype``, with all its experts."""
    checkpoint = Checkpoint(folder)
    if not is_mlx(checkpoint):
        return load_model(folder, dtype, attention)
    source = MlxSource(checkpoint, model_name(folder), "transformers")
    model = empty_model(checkpoint.config, dtype, attention)
    with tempfile.TemporaryDirectory(prefix="moebench-") as scratch:
        source.write_dense(Path(scratch) / "dense.safetensors")
        load_dense(model, Path(scratch) / "dense.safetensors")
    for layer, module in enumerate(expert_modules(model).values()):
        for expert in range(source.experts):
            for name, found in source.expert(layer, expert).items():
                weights = torch.from_numpy(dequantize(found) if isinstance(found, LogicalTensor) else found)
                parameter = getattr(module, name)
                if parameter.is_meta:
                    parameter = torch.nn.Parameter(
                        torch.empty(parameter.shape, dtype=float_type(dtype)), requires_grad=False
                    )
                    setattr(module, name, parameter)
                parameter.data[expert] = weights.T if module.is_transposed and weights.dim() == 2 else weights
    return model
