"""The device that CUDA drives: streams, events, page-locked host memory and the allocator's count.

Everything else is in ``torch_device``, which knows no CUDA and is tested without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moebench.backends.base import BackendError
from moebench.backends.cuda_state import describe, refusal
from moebench.backends.device import Event, Stream
from moebench.backends.torch_device import TorchDevice
from moebench.units import GIB

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context


class CudaEvent(Event):
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        """Block without the interpreter's lock."""
        self.event.synchronize()


class CudaStream(Stream):
    """A stream of its own, or, with None, whichever stream the caller computes on."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream as it stands."""
        return self._stream or torch.cuda.current_stream()

    def run(self, work: Callable[[], None]) -> None:
        """Issue on this stream; kernels and copies return at once."""
        if self._stream is None:
            work()
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            work()

    def wait(self, event: Event) -> None:
        """On the device: the host goes on."""
        self.stream.wait_event(event.event)  # type: ignore[attr-defined]

    def record(self) -> CudaEvent:
        """An event without timing, which is the cheaper kind."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(event)

    def join(self) -> None:
        """The caller's work goes to its own stream, where the compute stream's went."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class CudaDevice(TorchDevice):
    """The current CUDA device. The model computes on torch's default stream, copies have streams of their own."""

    def __init__(self) -> None:
        if (reason := refusal()) is not None:
            raise BackendError(f"device=cuda: {reason}")
        self.at = torch.device("cuda", torch.cuda.current_device())
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums stay float32
        self.up, self.down = CudaStream(torch.cuda.Stream()), CudaStream(torch.cuda.Stream())
        self.compute = CudaStream(None)

    def allocate(self, count: int, nbytes: int) -> torch.Tensor:
        """uint8 [count, nbytes], there for every stream."""
        slots = super().allocate(count, nbytes)
        torch.cuda.synchronize()
        return slots

    @property
    def steps(self) -> Any:
        """Planes of codec rans are decoded in one launch: torch's own operations would take thousands of them."""
        try:
            from moebench.backends.triton_rans import decode_planes
        except ImportError as error:
            raise BackendError(f"codec=rans needs triton on a CUDA device ({error}); use codec=none") from None
        return decode_planes

    def pin(self, array: np.ndarray) -> None:
        """Page-lock memory where it is, so that a file is read past the page cache into what the card copies from."""
        if array.nbytes:
            status = torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, PORTABLE)
            if int(status):
                raise BackendError(f"{array.nbytes} bytes of host memory cannot be page-locked: CUDA error {status}")

    def unpin(self, array: np.ndarray) -> None:
        """Give the pages back."""
        if array.nbytes:
            torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)

    def free_bytes(self) -> int:
        """What the driver says is free, once this process has its context."""
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self) -> int:
        """The caching allocator's high-water mark of what was in use."""
        return torch.cuda.max_memory_allocated()

    def forget_peak(self) -> None:
        """Give cached blocks back and start the marks anew."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @property
    def notes(self) -> tuple[str, ...]:
        """The card, and what the allocator took of it, cached blocks included."""
        reserved = torch.cuda.max_memory_reserved() / GIB
        return (f"computed on {describe()}; the allocator reserved {reserved:.2f} GiB",)
