"""Experts computed on a device of its own memory, out of slots that copies may still be filling.

Each expert is issued as soon as it is served and waits on the device for its own copy alone; its rows land in a buffer
that is summed in router order, so the order of arrival never shows. Packs are in the byte layout ``plain``: weights are
made floats on the device, int8 and int4 ones on each use. Knows tensors; knows no CUDA, no disk and no policy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from moebench.backends import torch_rans
from moebench.backends.base import BackendError
from moebench.backends.device import Device, Slot
from moebench.backends.torch_experts import DTYPES, ExpertLayer, Linear, Live
from moebench.step import ABSENT
from moebench.store.layout import TensorSpec


class TorchDevice(Device):
    """Memory and copies of the torch device ``at``; a subclass brings the streams and locks the host's pages."""

    at: torch.device
    steps: Any = None  # what decodes planes of codec rans; None: operations of torch

    def allocate(self, count: int, nbytes: int) -> torch.Tensor:
        """uint8 [count, nbytes]."""
        return torch.zeros(count, nbytes, dtype=torch.uint8, device=self.at)

    def upload(self, source: np.ndarray, target: torch.Tensor) -> None:
        """Beside the host where the source's pages are locked."""
        target[: source.size].copy_(torch.from_numpy(source), non_blocking=True)

    def download(self, source: torch.Tensor, target: np.ndarray) -> None:
        """Beside the host where the target's pages are locked."""
        torch.from_numpy(target).copy_(source[: target.size], non_blocking=True)

    def decode(self, stored: np.ndarray, target: torch.Tensor, decoded: np.ndarray) -> None:
        """By ``torch_rans``, in this device's own steps; the host waits for the last one."""
        out = torch_rans.decode([stored], decoded.size, self.at, self.steps)[0]
        target[: decoded.size].copy_(out)
        decoded[:] = out.cpu().numpy()

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory of the device that nobody holds."""

    def peak_bytes(self) -> int | None:
        """The most that the library's allocator held of the device's memory at a time; None: it keeps no count."""
        return None

    def forget_peak(self) -> None:
        """Start that count anew from what is held now."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a row should say of the device, a line each."""
        return ()


Scales = TensorSpec | tuple[TensorSpec, TensorSpec] | None


class SlotViews:
    """Tensors over the bytes of a slot, of the device or of the host, made once for each device slot."""

    def __init__(self, tensors: Sequence[TensorSpec], up: str) -> None:
        self._name, of = up, {spec.name: spec for spec in tensors}
        if missing := [name for name in (up, "down_proj") if name not in of]:
            raise BackendError(f"pack lacks expert tensor {', '.join(missing)}; it holds {', '.join(of)}")
        self.specs: list[Any] = []
        for name in (up, "down_proj"):
            scales = [of[part] for part in (f"{name}.scales", f"{name}.biases") if part in of]
            self.specs += [of[name], tuple(scales) if len(scales) == 2 else next(iter(scales), None)]
            self.specs.append(of.get(f"{name}_bias"))

    def __call__(self, buffer: Slot | np.ndarray) -> list[Any]:
        """[up, up scales, up bias, down, down scales, down bias]; affine scales are pairs (scales, biases), None is
        what the pack lacks.
        """
        if not isinstance(buffer, Slot):
            return _over(torch.from_numpy(buffer), self.specs)
        if self._name not in buffer.views:
            buffer.views[self._name] = _over(buffer.data, self.specs)
        return buffer.views[self._name]


def _over(data: torch.Tensor, specs: Sequence[Any]) -> list[Any]:
    return [
        tuple(_over(data, spec))
        if isinstance(spec, tuple)
        else spec and data[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
        for spec in specs
    ]


def plain_kernel(weight: TensorSpec, scales: Scales, dtype: torch.dtype) -> Linear:
    """The function (x [n, in], weight, scales) -> [n, out] in ``dtype`` for a tensor in the byte layout ``plain``.

    int8: products of whole numbers, each row scaled behind its sum. int4: q * scale + bias in float32, rounded once to
    ``dtype``; torch's CPU kernel rounds no weight, so in bf16 each differs by 2**-9 of itself at most.
    """
    if weight.dtype == "BF16":
        return lambda x, w, s: F.linear(x, w.to(dtype))
    if weight.dtype == "I8":
        return lambda x, w, s: F.linear(x, w.to(dtype)) * s.to(dtype)
    if not isinstance(scales, tuple) or weight.dtype != "U8" or DTYPES.get(scales[0].dtype) != torch.bfloat16:
        raise BackendError(f"{weight.name} is stored as {weight.dtype} of a kind that device=cuda has no kernel for")
    rows, columns = weight.shape[0], 2 * weight.shape[1]

    def four(x: torch.Tensor, w: torch.Tensor, s: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        codes = torch.stack([w & 15, w >> 4], -1).view(rows, s[0].shape[1], -1)
        full = torch.addcmul(s[1].float()[..., None], codes.float(), s[0].float()[..., None])
        return F.linear(x, full.to(dtype).view(rows, columns))

    return four


def transient_bytes(tensors: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    """Device bytes that computing one expert takes beside its slot: the largest matrix as floats, on the way there and
    at last (int4: codes, float32 codes, float32 weights and weights in ``dtype``).
    """
    most = 0
    for spec in tensors:
        if len(spec.shape) == 2 and "." not in spec.name:
            each = {"U8": 2 * (2 + 4 + 4 + dtype.itemsize), "I8": dtype.itemsize}.get(spec.dtype, 0)
            widened = dtype.itemsize * (spec.dtype == "BF16" and dtype != torch.bfloat16)
            most = max(most, spec.shape[0] * spec.shape[1] * (each or widened))
    return most


class DeviceLayer(ExpertLayer):
    """One MoE layer whose experts come as ``Slot``; one that was placed on the host comes as its bytes there."""

    def __init__(
        self, index: int, module: nn.Module, views: SlotViews, dtype: torch.dtype, live: Live, device: Device
    ) -> None:
        super().__init__(index, module, views, dtype, live, plain_kernel)
        self._device = device
        self._on_host = ExpertLayer(index, module, views, dtype, live, plain_kernel)
        self._on_host.norm = None  # its weights lie on the device

    def many_rows(
        self, x: torch.Tensor, ids: np.ndarray, items: Iterator[tuple[int, Slot | np.ndarray]]
    ) -> torch.Tensor:
        """Unweighted outputs [N, k, H] in router order; each expert is issued as it is served."""
        rows, k = ids.shape
        flat = ids.reshape(-1)
        order = np.argsort(flat, kind="stable")
        ordered = flat[order]
        pairs = torch.from_numpy(order).to(x.device)
        of_row = pairs // k
        out = x.new_zeros(rows * k, x.shape[1])
        done = 0
        for expert, slot in items:
            low, high = np.searchsorted(ordered, (expert, expert + 1)).tolist()
            given = x if rows == 1 and high - low == 1 else x[of_row[low:high]]
            if isinstance(slot, Slot):
                slot.compute(partial(self._issue, out, pairs[low:high], given, slot))
            else:
                y = self._on_host.expert(given.cpu(), slot).to(x.device)
                out[pairs[low:high]] = y if self.norm is None else self.norm(y)
            done += high - low
        self._device.compute.join()
        if done != (needed := int((flat != ABSENT).sum())):
            raise BackendError(f"layer {self.index}: the server's experts cover {done} of {needed} (row, expert) pairs")
        return out.view(rows, k, -1)

    one_row = many_rows

    def _issue(self, out: torch.Tensor, pairs: torch.Tensor, x: torch.Tensor, slot: Slot) -> None:
        out[pairs] = self.expert(x, slot)
