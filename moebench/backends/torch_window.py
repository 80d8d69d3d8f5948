"""Attention of a window's rows one by one, each over the columns that it would see in a pass of its own.

A draft's rows do not simply follow each other. And rows that do get other last bits together than alone where the
context is short, where a sliding window has moved on, or where a sink stands behind the columns. Knows masks and a
family's own attention function; knows no cache layer and no server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moebench.backends.torch_geometry import attention_modules, head_shape
from moebench.step import Step

NAME = "moebench_paths"


def short_context(model: nn.Module) -> int:
    """Columns below which a row attends by itself: torch sums rows shorter than a vector of 16 numbers, and multiplies
    matrices of fewer than 400 products (its ``bmm`` on CPU), by loops of another order.
    """
    sizes = [size for module in attention_modules(model) for size in head_shape(module)[2:]]
    return max(16, -(-400 // min(sizes, default=400)))


def always_apart(model: nn.Module) -> bool:
    """Whether rows attend by themselves in any context: a sink or a sliding window moves the terms of their sums."""
    modules = attention_modules(model)
    return any(hasattr(module, "sinks") or getattr(module, "sliding_window", None) for module in modules)


def path_mask(step: Step, seen: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """What rows [B, W] see of columns [B, T], of which ``seen`` hold tokens: [B, 1, W, T], 0 or the lowest number.

    The last W columns are the rows' own. A row of a draft sees the last accepted token and the nodes on its path.
    """
    batch, width = shape
    paths = np.tile(np.eye(width, dtype=bool), (batch, 1, 1))
    for b, draft in enumerate(step.drafts):
        nodes = slice(1, 1 + len(draft))
        paths[b, nodes, nodes] = draft.ancestors()
        paths[b, nodes, 0] = True
    visible = seen[:, None].repeat(1, width, 1)
    visible[:, :, -width:] &= torch.from_numpy(paths)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[:, None]


def attend_paths(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    short: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The family's eager attention, each row by itself over the columns that it sees; rows that see equally many
    columns go together, and of rows that simply follow each other all from the first that sees ``short`` or more.

    What is masked between or behind them moves the terms of the sums, so a row that skips columns would get other last
    bits than in a pass of its own. Padding in front stays within a sliding window, as such a pass has it too.
    """
    eager = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
    visible = mask[:, 0] == 0
    own = visible | (visible.cumsum(-1) == 0)  # bool [B, W, T]
    if window := getattr(module, "sliding_window", None):
        rows, columns = visible.shape[1:]
        at = torch.arange(columns, device=mask.device)
        own &= at > at[columns - rows :, None] - window
    counts = own.sum(-1)
    apart = counts.shape[1] if short is None else int((counts.amin(0) < short).sum())
    out = None
    if apart < counts.shape[1]:
        late, _ = eager(module, query[:, :, apart:], key, value, mask[:, :, apart:], **options)
        if not apart:
            return late, None
        out = torch.cat([late.new_empty(len(late), apart, *late.shape[2:]), late], 1)
    for count in counts[:, :apart].unique().tolist():
        b, row = (counts[:, :apart] == count).nonzero(as_tuple=True)
        columns = own[b, row].nonzero()[:, 1].view(-1, count)
        of_rows = (b[:, None], slice(None), columns)  # [rows, count, heads, size]
        part, _ = eager(
            module,
            query[b, :, row][:, :, None],
            key[of_rows].transpose(1, 2).contiguous(),
            value[of_rows].transpose(1, 2).contiguous(),
            mask[b, 0, row].gather(-1, columns)[:, None, None],
            **options,
        )
        if out is None:
            out = part.new_empty(*query.shape[:1], query.shape[2], *part.shape[2:])
        out[b, row] = part[:, 0]
    return out, None


@contextmanager
def attention_by_path(model: PreTrainedModel, on: bool, short: int | None = None) -> Iterator[None]:
    """Let every attention of ``model`` go through ``attend_paths`` while the block runs, if ``on``."""
    if not on:
        yield
        return
    ALL_ATTENTION_FUNCTIONS.register(NAME, partial(attend_paths, short=short))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
