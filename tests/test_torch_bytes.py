"""The torch_cpu byte layout is lossless or refuses, and its bytes are what torch's kernels read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.store.layout import LayoutError, LogicalTensor, QuantSpec
from moebench.store.quant import dequantize, from_bf16, quantize, to_bf16

LAYOUT = TorchCpuLayout()


def int4_tensor(rng, rows, columns, group=32):
    """Random int4 content with bias = -8 * scale + n * scale, so that the zero point n * scale is a bf16 value."""
    scale = to_bf16(2.0 ** rng.integers(-6, 3, (rows, columns // group)) * rng.integers(128, 256))
    bias = from_bf16(scale) * rng.choice([-8, -4, 0], (rows, columns // group))
    return LogicalTensor("w", "int4", rng.integers(0, 16, (rows, columns), dtype=np.uint8), scale, to_bf16(bias))


def int8_tensor(rng, rows, columns):
    scale = to_bf16(rng.random(rows, np.float32))
    return LogicalTensor("w", "int8", rng.integers(-127, 128, (rows, columns), dtype=np.int8), scale)


def same(a, b):
    pairs = [(a.values, b.values), (a.scale, b.scale), (a.bias, b.bias)]
    return a.kind == b.kind and all((x is None and y is None) or np.array_equal(x, y) for x, y in pairs)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["none", "int8", "int4"]))
def test_decode_inverts_encode(seed, row_blocks, column_blocks, kind):
    rng = np.random.default_rng(seed)
    rows, columns = 16 * row_blocks, 32 * column_blocks
    tensor = {
        "none": lambda: LogicalTensor("w", "none", rng.integers(0, 2**16, (rows, columns), dtype=np.uint16)),
        "int8": lambda: int8_tensor(rng, rows, columns),
        "int4": lambda: int4_tensor(rng, rows, columns),
    }[kind]()
    parts = LAYOUT.encode(tensor)
    assert all(part.flags.c_contiguous for part in parts.values())
    assert same(LAYOUT.decode("w", kind, tensor.shape, parts), tensor)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_kernels_read_the_encoded_bytes(kind):
    rng = np.random.default_rng(0)
    tensor = quantize("w", rng.normal(size=(32, 64)).astype(np.float32), QuantSpec(kind, 32))
    x = torch.from_numpy(rng.normal(size=(3, 64)).astype(np.float32)).bfloat16()
    parts = {name: torch.from_numpy(part) for name, part in LAYOUT.encode(tensor).items()}
    scales = parts["w.scales"].view(torch.bfloat16)
    if kind == "int4":
        got = torch._weight_int4pack_mm_for_cpu(x, parts["w"], 32, scales)
    else:
        got = torch._weight_int8pack_mm(x, parts["w"], scales)
    torch.testing.assert_close(got.float(), x.float() @ torch.from_numpy(dequantize(tensor)).T, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize(("scale", "bias"), [(1.0, 2.0**-20), (0.0, -0.0), (2.0**60, 2.0**-60)])
def test_an_inexact_zero_point_is_refused_by_name(scale, bias):
    tensor = int4_tensor(np.random.default_rng(0), 16, 64)
    tensor.scale[5, 1], tensor.bias[5, 1] = to_bf16(np.array([scale, bias], np.float32))
    with pytest.raises(LayoutError, match=r"w: zero point of row 5, group 1 is not exact"):
        LAYOUT.encode(tensor)


def test_shapes_the_kernels_cannot_take_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(LayoutError, match="rows in multiples of 16"):
        LAYOUT.encode(int4_tensor(rng, 24, 32))
    with pytest.raises(LayoutError, match="columns in multiples of 16"):
        LAYOUT.encode(int8_tensor(rng, 4, 24))
