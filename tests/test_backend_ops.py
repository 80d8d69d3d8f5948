"""The backend's arithmetic for predictors: a row has the same bits alone and among others, and the right value."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_ops import NumpyOps
from torch_models import make_backend, make_pack, native_model

from moebench.backends.torch_model import NativeTorchBackend
from moebench.backends.torch_ops import TorchOps
from moebench.models import tinymoe

OPS = TorchOps()


def head(ops, x, fc1, fc2, linear):
    """logits of n heads: x [n, rows, F] -> [n, rows, E]."""
    return ops.numpy(ops.linear(x, linear)) + ops.numpy(ops.linear(ops.gelu(ops.linear(x, fc1)), fc2))


def head_matrices(rng, heads, hidden, experts):
    shapes = (512, hidden + 2 * experts), (experts, 512), (experts, hidden + 2 * experts)
    return [(rng.standard_normal((heads, *s)) / s[1] ** 0.5).astype(np.float16) for s in shapes]


@pytest.mark.parametrize(("heads", "hidden", "experts"), [(6, 128, 32), (1, 128, 32), (2, 2048, 256)])
def test_heads_give_each_row_its_own_bits_however_many_rows(heads, hidden, experts):
    rng = np.random.default_rng(0)
    matrices = [OPS.tensor(m) for m in head_matrices(rng, heads, hidden, experts)]
    x = OPS.tensor(rng.standard_normal((heads, 33, hidden + 2 * experts)))
    alone = np.concatenate([head(OPS, x[:, i : i + 1], *matrices) for i in range(33)], axis=1)
    for rows in range(1, 34):
        assert np.array_equal(head(OPS, x[:, :rows], *matrices), alone[:, :rows]), rows


@settings(max_examples=25)
@given(*(st.integers(1, high) for high in (4, 9, 40, 40)), st.randoms(use_true_random=False))
def test_linear_of_any_shape_is_row_invariant_and_right(n, rows, inner, outer, random):
    rng = np.random.default_rng(random.randrange(2**32))
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, rows, inner), (n, outer, inner)))
    got = OPS.numpy(OPS.linear(OPS.tensor(x), OPS.tensor(w)))
    pick = rng.permutation(rows)[: rng.integers(1, rows + 1)]
    assert np.array_equal(OPS.numpy(OPS.linear(OPS.tensor(x[:, pick]), OPS.tensor(w))), got[:, pick])
    np.testing.assert_allclose(got, np.einsum("nri,noi->nro", x, w, dtype=np.float64), atol=1e-4)


def test_gelu_is_exact_and_does_not_see_strides():
    x = torch.randn(4, 33, 65, generator=torch.Generator().manual_seed(0)) * 3
    got = OPS.numpy(OPS.gelu(x))
    exact = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.flatten().tolist()]
    # the usual tanh approximation is off by 5e-4
    np.testing.assert_allclose(got.reshape(-1), exact, atol=1e-5)
    assert np.array_equal(OPS.numpy(OPS.gelu(x.transpose(1, 2))), got.transpose(0, 2, 1))
    assert np.array_equal(OPS.numpy(OPS.gelu(x[:, 5:6, ::2])), got[:, 5:6, ::2])


def test_every_float_type_becomes_float32_without_loss():
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    numbers = OPS.numpy(hidden)
    assert numbers.dtype == np.float32
    assert np.array_equal(numbers, hidden.float().numpy())
    half = numbers.astype(np.float16)
    for array in (half, numbers):
        made = OPS.tensor(array)
        assert made.dtype == torch.float32
        array_before, array[:] = array.copy(), 0
        assert np.array_equal(OPS.numpy(made), array_before.astype(np.float32))
    hot = OPS.tensor(np.eye(5, 3, dtype=np.float32))
    joined = OPS.concat([OPS.rows(hidden, np.array([4, 0, 4])), hot[:3]])
    assert np.array_equal(OPS.numpy(joined)[:, :8], hidden.float().numpy()[[4, 0, 4]])
    assert OPS.stack([joined, joined]).shape == (2, 3, 11)
    assert OPS.rows(hidden, np.array([], np.int64)).shape == (0, 8)
    with pytest.raises(IndexError):
        OPS.rows(hidden, np.array([5]))


def test_the_stand_in_for_tests_computes_the_same_heads():
    rng, numpy_ops = np.random.default_rng(3), NumpyOps()
    matrices = head_matrices(rng, 3, 16, 8)
    hidden, hot = rng.standard_normal((3, 5, 16)), rng.integers(0, 2, (3, 5, 16))
    out = []
    for ops in (OPS, numpy_ops):
        rows = [ops.concat([ops.rows(ops.tensor(h), np.array([1, 3])), ops.tensor(o[:2])])
                for h, o in zip(hidden, hot, strict=True)]  # fmt: skip
        out.append(head(ops, ops.stack(rows), *(ops.tensor(m) for m in matrices)))
    assert out[0].shape == (3, 2, 8)
    np.testing.assert_allclose(out[0], out[1], atol=1e-5)


def test_both_backends_offer_it(tmp_path):
    pack = make_pack(tmp_path, native_model("qwen3_moe"))
    for backend in (make_backend(pack), NativeTorchBackend(Path(tinymoe.__file__).parent / "checkpoint")):
        product = backend.ops.linear(torch.ones(1, 1, 2).bfloat16(), torch.ones(1, 3, 2))
        assert backend.ops.numpy(product).tolist() == [[[2.0] * 3]]
