"""Which tensor library computes: the choice, the byte layout of its packs, and its backend over a live model.

A library is never chosen by what is installed: a row computed by another would be another row.
"""

from __future__ import annotations

import importlib.util
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


def open_backend(name: str, model: LiveModel, numerics: str = "row_invariant") -> Backend:
    """The backend ``name`` over the pack and dense weights of ``model``."""
    dense: Any = model.pack.dense_path
    if name == "mlx":
        from moebench.backends.mlx_model import MlxBackend
        from moebench.checkpoint.files import Checkpoint
        from moebench.checkpoint.open import is_mlx

        # mlx-lm reads what a checkpoint's own file says, which transformers does not keep whole
        checkpoint = Checkpoint(model.folder)
        config = {**model.config, **checkpoint.config}
        return MlxBackend(model.pack, dense, config, converted=is_mlx(checkpoint), numerics=numerics)
    from moebench.backends.torch_model import TorchBackend

    attention = "eager" if numerics == "row_invariant" else "sdpa"
    return TorchBackend(model.pack, dense, model.config, attention=attention, numerics=numerics)
