"""Tiny models behind the mlx backend, and the same models as mlx-lm runs them itself."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from torch_models import DictServer

from moebench.backends.mlx_load import plain_config
from moebench.backends.mlx_model import MlxBackend
from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.open import is_mlx, open_source
from moebench.store.layout import QuantSpec
from moebench.store.mlx_bytes import MlxLayout
from moebench.store.writer import write_pack


def config_of(folder: Path) -> dict:
    """What a checkpoint's own file says."""
    return json.loads((folder / "config.json").read_text())


def make_pack(folder: Path, out: Path, quant: str = "none"):
    """A pack in mlx bytes of a checkpoint folder."""
    return write_pack(out, open_source(folder, dense="checkpoint"), QuantSpec(quant), MlxLayout())


def make_backend(folder: Path, pack, numerics: str = "fast") -> MlxBackend:
    """The backend over ``pack`` of the checkpoint in ``folder``."""
    config = {**pack.manifest.model["config"], **config_of(folder)}
    return MlxBackend(pack, pack.dense_path, config, converted=is_mlx(Checkpoint(folder)), numerics=numerics)


def own_forward(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits fp32 [W, V] of tokens [1, W] by mlx-lm's model as it is, with float32 activations."""
    config = plain_config(config_of(folder))
    config["model_type"] = config["model_type"].removesuffix("_text")
    model, _ = load_model(folder, model_config=config)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(tokens)).astype(mx.float32))[0]


class MlxServer(DictServer):
    """Every expert in memory of mlx; ``shuffle`` yields them in any order, from one slot that is overwritten."""

    def __init__(self, backend: MlxBackend, pack, shuffle=None) -> None:
        super().__init__(pack, shuffle)
        self.slot = backend.buffer(pack.slot_bytes)
        for key, buffer in enumerate(self.buffers):
            self.buffers[key] = backend.buffer(pack.slot_bytes)
            self.buffers[key][:] = buffer
