"""Arithmetic for systems that predict, on CPU tensors in float32, whatever the model computes in, and where.

A product of many rows is made of products of one row, since torch's fp32 kernels give other last bits for several rows
at once, or for a row at another alignment in memory. So many rows cost what they cost one by one. Knows tensors; knows
no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from moebench.backends.base import Ops
from moebench.backends.probe import plain_kernels


class TorchOps(Ops):
    """``Ops`` in float32: whatever comes in, in any float type, is made float32 first."""

    @torch.inference_mode()
    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """A float32 copy of ``array``."""
        return torch.tensor(np.asarray(array, np.float32))

    @torch.inference_mode()
    def numpy(self, tensor: torch.Tensor) -> np.ndarray:
        """A float32 copy of ``tensor``."""
        return np.array(tensor.float().cpu().numpy())

    @torch.inference_mode()
    def rows(self, tensor: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        """[N, H] -> [len(index), H]; an index outside 0..N-1 is torch's ``IndexError``."""
        return tensor.index_select(0, torch.tensor(index, dtype=torch.int64).to(tensor.device)).float().cpu()

    @torch.inference_mode()
    def concat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[..., a], [..., b], ... -> [..., a + b + ...]."""
        return torch.cat([t.float() for t in tensors], dim=-1)

    @torch.inference_mode()
    def stack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """n of [...] -> [n, ...]."""
        return torch.stack([t.float() for t in tensors])

    @torch.inference_mode()
    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[n, rows, in], [n, out, in] -> [n, rows, out]."""
        turned = weight.float().transpose(1, 2)
        # copies, so that every row starts at an aligned address
        rows = [row.clone(memory_format=torch.contiguous_format) for row in x.float().split(1, dim=1)]
        with plain_kernels(True):  # inside a pass and outside of it, a prediction has the same bits
            return torch.cat([torch.bmm(row, turned) for row in rows], dim=1)

    @torch.inference_mode()
    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """Exact GELU, elementwise."""
        return F.gelu(x.float().contiguous())  # strided tensors would go through another erf
