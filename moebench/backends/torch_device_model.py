"""A transformers model on a device of its own memory: dense weights and caches there, experts in slots of it.

Knows which packs it can compute on; knows no CUDA and no disk beyond the dense file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from moebench.backends.base import Adapters, BackendError, Drafter
from moebench.backends.torch_bytes import require_kernel
from moebench.backends.torch_device import DeviceLayer, SlotViews, TorchDevice, transient_bytes
from moebench.backends.torch_experts import Live, install
from moebench.backends.torch_model import TorchBackend
from moebench.store.layout import LogicalTensor, TensorSpec
from moebench.store.plain import PlainLayout


class DeviceLayout(PlainLayout):
    """The byte layout ``plain`` of weights that a device has kernels for: bf16, int8 and int4, as the processor has."""

    def encode(self, tensor: LogicalTensor) -> dict[str, Any]:
        """As ``plain``; ``LayoutError`` for other kinds of weights and for floats that are not bf16."""
        require_kernel(tensor)
        return super().encode(tensor)


class DeviceBackend(TorchBackend):
    """``TorchBackend`` computing on ``device``, over a pack in the byte layout ``plain``."""

    def __init__(self, device: TorchDevice, pack: Any, dense_path: str | Path, config: dict[str, Any], **options: Any):
        self.device = device
        super().__init__(pack, dense_path, config, **options)
        self.transient_bytes = transient_bytes(pack.manifest.tensors, self.model.dtype)
        device.forget_peak()

    def _check_layout(self, manifest: Any) -> None:
        if manifest.byte_layout != "plain":
            raise BackendError(f"the pack's byte layout is {manifest.byte_layout}; a device of its own reads plain")

    def _install(self, model: PreTrainedModel, tensors: Sequence[TensorSpec], dtype: torch.dtype) -> Live:
        _move(model, self.device.at)
        return install(model, tensors, dtype, SlotViews, partial(DeviceLayer, device=self.device))

    def adapt(self, adapters: Adapters | None) -> None:
        """As on the processor; the probing of adapters is left out of the allocator's peak."""
        super().adapt(adapters)
        self.device.forget_peak()

    def drafter(self, folder: str | Path) -> Drafter:
        """The dense model of ``folder`` on the same device."""
        drafter = super().drafter(folder)
        _move(drafter.model, self.device.at)
        self.device.forget_peak()
        return drafter

    def allocator_peak_bytes(self) -> int | None:
        """The allocator's high-water mark since weights were loaded and probed."""
        return self.device.peak_bytes()

    @property
    def notes(self) -> tuple[str, ...]:
        """Where it computed."""
        return self.device.notes


def _move(model: nn.Module, at: torch.device) -> None:
    """Bring all parameters and buffers that are held to a device; experts stay on the meta device."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(at))
