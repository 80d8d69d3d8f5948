"""Quantised experts always meet their kernel with bf16 activations: with others torch takes a path ten times slower."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_experts import DTYPES, linear_kernel
from moebench.store.extents import place_parts
from moebench.store.layout import QuantSpec
from moebench.store.quant import dequantize, quantize

KERNELS = {"int4": "_weight_int4pack_mm_for_cpu", "int8": "_weight_int8pack_mm"}


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KERNELS)
def test_a_quantised_expert_is_multiplied_by_bf16_rows(monkeypatch, kind, dtype, rows):
    weights = quantize("w", np.random.default_rng(0).standard_normal((32, 64), np.float32), QuantSpec(kind))
    parts = TorchCpuLayout().encode(weights)
    weight, scales = place_parts(parts)
    held = [
        torch.from_numpy(p.view(np.uint8)).view(DTYPES[s.dtype])
        for p, s in zip(parts.values(), (weight, scales), strict=True)
    ]
    seen, kernel = [], getattr(torch, KERNELS[kind])
    monkeypatch.setattr(torch, KERNELS[kind], lambda x, *rest: seen.append(x.dtype) or kernel(x, *rest))
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
    out = linear_kernel(weight, scales, dtype)(x, held[0].view(weight.shape), held[1].view(scales.shape))
    assert seen == [torch.bfloat16]
    assert out.dtype == dtype
    right = x.bfloat16().float() @ torch.from_numpy(dequantize(weights)).T
    assert torch.allclose(out.float(), right, rtol=2e-2, atol=2e-1)
