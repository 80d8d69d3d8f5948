"""Two of torch's operations in another order while a family's own code runs: what is best comes first, and a
convolution gives every sequence the same bits. Knows tensors; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from moebench.backends.torch_experts import BackendError


class Settled(TorchFunctionMode):
    """While it is entered, top-k is sorted and a convolution per channel is made of products and sums, tap by tap.

    Without oneDNN torch takes the channels of such a convolution one after another, and those of many sequences in
    another way than those of one.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk and not kwargs.get("sorted", True):
            kwargs = {**kwargs, "sorted": True}
        elif func is F.conv1d:
            return by_taps(*args, **kwargs)
        return func(*args, **kwargs)


def by_taps(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> torch.Tensor:
    """The convolution of x [B, C, T] with one filter [1, K] for each of C channels, summed in float32."""
    channels, _, taps = weight.shape
    if (groups, stride, dilation) != (channels, 1, 1) or x.shape[1] != channels:
        raise BackendError("row-invariant numerics knows convolutions of single channels only")
    padded, filters = F.pad(x, (padding, padding)).float(), weight.float()
    length = padded.shape[-1] - taps + 1
    total = padded[..., :length] * filters[:, 0, :1]
    for tap in range(1, taps):
        total = total + padded[..., tap : tap + length] * filters[:, 0, tap : tap + 1]
    return (total if bias is None else total + bias.float()[:, None]).to(x.dtype)
