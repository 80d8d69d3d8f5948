"""Which tensor library computes: the choice, the byte layout of its packs, and its backend over a live model.

A library is never chosen by what is installed: a row computed by another would be another row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebench.backends.base import Backend
from moebench.errors import UsageError

if TYPE_CHECKING:
    from moebench.harness.assets import LiveModel

BYTE_LAYOUTS = {"torch": "torch_cpu", "mlx": "mlx"}  # by backend


def require_backend(name: str) -> None:
    """Raise ``UsageError`` where the library of ``name`` is not installed."""
    if name == "mlx" and not (importlib.util.find_spec("mlx") and importlib.util.find_spec("mlx_lm")):
        raise UsageError("backend=mlx needs mlx and mlx-lm: pip install 'moebench[mlx]'")


def require_model(name: str, folder: Path) -> None:
    """Raise ``BackendError`` where ``name`` cannot run the model of ``folder`` by its configuration: before it is
    packed, which may take long.
    """
    from moebench.backends.torch_source import load_config, model_config

    config = load_config(folder)
    if name == "mlx":
        from moebench.backends.mlx_load import empty_model, plain_config, switches

        switches(empty_model(plain_config(_for_mlx(model_config(config).to_dict(), config))))


def _for_mlx(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` of transformers, under what a checkpoint's ``own`` file says: transformers does not keep it whole."""
    return {**config, **own}


def open_backend(name: str, model: LiveModel, numerics: str = "row_invariant", threads: int = 1) -> Backend:
    """The backend ``name`` over the pack and dense weights of ``model``; torch computes with ``threads`` threads."""
    dense: Any = model.pack.dense_path
    if name == "mlx":
        from moebench.backends.mlx_model import MlxBackend
        from moebench.checkpoint.files import Checkpoint
        from moebench.checkpoint.open import is_mlx

        checkpoint = Checkpoint(model.folder)
        config = _for_mlx(model.config, checkpoint.config)
        return MlxBackend(model.pack, dense, config, converted=is_mlx(checkpoint), numerics=numerics)
    from moebench.backends.torch_model import TorchBackend

    attention = "eager" if numerics == "row_invariant" else "sdpa"
    return TorchBackend(model.pack, dense, model.config, attention=attention, numerics=numerics, threads=threads)
