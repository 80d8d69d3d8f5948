"""Whether torch finds a CUDA device here, and what it is. Loads torch and nothing that computes with it."""

from __future__ import annotations

import torch

from moebench.units import GIB


def refusal() -> str | None:
    """Why nothing can compute on a CUDA device here; None where one can."""
    if torch.version.hip:
        return f"torch {torch.__version__} is built for ROCm, which was never tried"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def describe() -> str:
    """The device that would compute, in words."""
    major, minor = torch.cuda.get_device_capability()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
    return f"{torch.cuda.get_device_name()}, {total:.1f} GiB, sm_{major}{minor}, CUDA {torch.version.cuda}"
