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
    from moebench.backends.torch_device import TorchDevice
    from moebench.config import RunConfig
    from moebench.hardware import HardwareProfile
    from moebench.harness.assets import LiveModel

BYTE_LAYOUTS = {("torch", "cpu"): "torch_cpu", ("torch", "cuda"): "device", ("mlx", "cpu"): "mlx"}


def require_backend(name: str) -> None:
    """Raise ``UsageError`` where the library of ``name`` is not installed."""
    if name == "mlx" and not (importlib.util.find_spec("mlx") and importlib.util.find_spec("mlx_lm")):
        raise UsageError("backend=mlx needs mlx and mlx-lm: pip install 'moebench[mlx]'")


def require_device(config: RunConfig, profile: HardwareProfile, clock: str) -> None:
    """Raise ``UsageError`` where a run that is to compute on a device of its own memory cannot, or would not say so."""
    if config.device == "cpu":
        return
    if config.backend != "torch":
        raise UsageError(f"device= chooses what torch computes on; backend={config.backend} has the device it finds")
    from moebench.backends.cuda_state import refusal

    if (reason := refusal()) is not None:
        raise UsageError(f"device={config.device}: {reason}; device=cpu computes on the processor")
    if clock == "virtual":
        raise UsageError(
            f"device={config.device} chooses what a measured run computes on, and this one is modeled; use hw=host, "
            f"made by 'moebench calibrate device={config.device}'"
        )
    if profile.unified:
        raise UsageError(
            f"device={config.device} has a memory of its own and hw={config.hw} declares none; make hw=host anew with "
            f"'moebench calibrate device={config.device}'"
        )


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


def open_backend(
    name: str, model: LiveModel, numerics: str = "row_invariant", threads: int = 1, device: str = "cpu"
) -> Backend:
    """The backend ``name`` over the pack and dense weights of ``model``; torch computes with ``threads`` threads, or on
    ``device``.
    """
    dense: Any = model.pack.dense_path
    if name == "mlx":
        from moebench.backends.mlx_model import MlxBackend
        from moebench.checkpoint.files import Checkpoint
        from moebench.checkpoint.open import is_mlx

        checkpoint = Checkpoint(model.folder)
        config = _for_mlx(model.config, checkpoint.config)
        return MlxBackend(model.pack, dense, config, converted=is_mlx(checkpoint), numerics=numerics)
    from moebench.backends.torch_model import TorchBackend

    how: dict[str, Any] = {"attention": "eager" if numerics == "row_invariant" else "sdpa", "numerics": numerics}
    if device == "cpu":
        return TorchBackend(model.pack, dense, model.config, threads=threads, **how)
    from moebench.backends.torch_device_model import DeviceBackend

    return DeviceBackend(open_device(device), model.pack, dense, model.config, threads=threads, **how)


def open_device(name: str) -> TorchDevice:
    """The device ``cuda``."""
    from moebench.backends.torch_cuda import CudaDevice

    return CudaDevice()
