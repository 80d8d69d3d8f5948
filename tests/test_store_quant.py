"""Quantised weights stay within half a step of the originals, every int4 midpoint is a bf16 number, and the plain bytes
hold exactly what was quantised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moebench.store.engines import StoreError
from moebench.store.layout import LayoutError, LogicalTensor, QuantSpec
from moebench.store.plain import PlainLayout
from moebench.store.quant import (
    dequantize,
    expert_digest,
    from_bf16,
    logical_hash,
    midpoint_is_exact,
    quantize,
    to_bf16,
)

finite = st.floats(-(2.0**99), 2.0**99, width=32)
EXPONENTS = st.integers(-30, 30)


@st.composite
def matrices(draw):
    """[out, in] of Gaussian, one-sided, offset or outlier weights at any scale."""
    rows, groups = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    weights = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal((rows, groups * 64))
    shape = draw(st.sampled_from(["gauss", "positive", "offset", "outlier", "constant"]))
    if shape == "positive":
        weights = np.abs(weights)
    elif shape == "offset":
        weights += draw(st.sampled_from([-50.0, 3.0, 50.0]))
    elif shape == "outlier":
        weights[:, 0] *= 100
    elif shape == "constant":
        weights[:] = weights[0, 0]
    return (weights * 2.0 ** draw(EXPONENTS)).astype(np.float32)


@given(arrays(np.float32, st.integers(1, 40), elements=finite))
@settings(max_examples=60, deadline=None)
def test_bf16_is_the_nearest_with_ties_to_even(values):
    bits = to_bf16(values)
    error = np.abs(from_bf16(bits).astype(np.float64) - values)
    for step in (-1, 1):
        neighbour = (bits.astype(np.int32) + step).clip(0, 0xFFFF).astype(np.uint16)
        other = np.abs(from_bf16(neighbour).astype(np.float64) - values)
        assert np.all((error < other) | np.isnan(other) | ((error == other) & (bits % 2 == 0)) | (bits == neighbour))
    assert np.array_equal(to_bf16(from_bf16(bits)), bits)


def test_bf16_ties_go_to_the_even_neighbour():
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000], np.uint32).view(np.float32)
    assert [hex(bits) for bits in to_bf16(ties)] == ["0x3f80", "0x3f82", "0xbf80", "0xbf82"]


def test_bf16_keeps_what_is_not_a_number():
    found = from_bf16(to_bf16(np.array([np.nan, np.inf, -np.inf, 3.4e38], np.float32)))
    assert np.isnan(found[0])
    assert found[1:].tolist() == [np.inf, -np.inf, np.inf]
    all_ones = np.array([0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(from_bf16(to_bf16(all_ones)))


@given(matrices(), st.sampled_from([32, 64]))
@settings(max_examples=80, deadline=None)
def test_int4_error_is_bounded_and_every_midpoint_exact(weights, group):
    tensor = quantize("w", weights, QuantSpec("int4", group))
    scale, bias = from_bf16(tensor.scale), from_bf16(tensor.bias)
    z = from_bf16(to_bf16(bias + np.float32(8) * scale))
    assert np.array_equal(z, bias + np.float32(8) * scale)
    assert np.array_equal(to_bf16(z - np.float32(8) * scale), tensor.bias)
    assert tensor.values.max() <= 15
    groups = weights.reshape(len(weights), -1, group)
    error = np.abs(dequantize(tensor) - weights).reshape(groups.shape).max(axis=2)
    largest = np.abs(groups).max(axis=2)
    assert np.all(error <= scale * 0.505 + largest * 2.0**-6)
    narrow = scale <= 1.01 * (groups.max(axis=2) - groups.min(axis=2)) / 15
    symmetric = scale <= 1.01 * largest / 7
    assert np.all(narrow | symmetric)


def test_offset_groups_fall_back_to_the_symmetric_form():
    weights = np.linspace(1.0, 1.1, 64, dtype=np.float32)[None]
    plain_scale, plain_bias = (
        from_bf16(to_bf16((weights.max(1) - weights.min(1)) / 15)),
        from_bf16(to_bf16(weights.min(1))),
    )
    assert not midpoint_is_exact(plain_scale, plain_bias).any()
    tensor = quantize("w", weights, QuantSpec("int4"))
    assert np.array_equal(from_bf16(tensor.bias), -8 * from_bf16(tensor.scale))


def test_gaussian_groups_keep_the_affine_form_nearly_always():
    weights = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    tensor = quantize("w", weights, QuantSpec("int4"))
    symmetric = from_bf16(tensor.bias) == -8 * from_bf16(tensor.scale)
    assert symmetric.mean() < 0.02


@given(matrices())
@settings(max_examples=40, deadline=None)
def test_int8_error_is_at_most_half_a_step(weights):
    tensor = quantize("w", weights, QuantSpec("int8"))
    error = np.abs(dequantize(tensor) - weights).max(axis=1)
    assert np.all(error <= from_bf16(tensor.scale) * 0.5001)


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_zero_weights_and_vectors_are_exact(kind):
    zero = np.zeros((2, 64), np.float32)
    assert np.array_equal(dequantize(quantize("w", zero, QuantSpec(kind))), zero)
    vector = quantize("b", np.array([1.5, -2.0, 0.1], np.float32), QuantSpec(kind))
    assert vector.kind == "none"
    assert dequantize(vector)[:2].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (np.ones((4, 96), np.float32), ["gate", "(4, 96)", "64"]),
        (np.full((1, 64), np.nan, np.float32), ["gate", "not finite"]),
        (np.full((1, 64), 1e31, np.float32), ["gate", "1e+30"]),
        (np.ones((2, 2, 64), np.float32), ["gate", "(2, 2, 64)"]),
    ],
)
def test_what_cannot_be_quantised_is_named(weights, words):
    with pytest.raises(StoreError) as caught:
        quantize("gate", weights, QuantSpec("int4"))
    assert all(word in str(caught.value) for word in words)


@given(matrices(), st.sampled_from(["none", "int8", "int4"]))
@settings(max_examples=30, deadline=None)
def test_plain_layout_gives_back_the_same_tensor(weights, kind):
    tensor, layout = quantize("w", weights, QuantSpec(kind)), PlainLayout()
    again = layout.decode("w", tensor.kind, tensor.shape, layout.encode(tensor))
    for part in ("values", "scale", "bias"):
        before, after = getattr(tensor, part), getattr(again, part)
        assert (before is None) == (after is None)
        assert before is None or (before.dtype == after.dtype and np.array_equal(before, after))


def test_plain_int4_puts_the_low_nibble_first():
    tensor = LogicalTensor(
        "w", "int4", np.array([[1, 2, 3, 4]], np.uint8), np.zeros((1, 1), "u2"), np.zeros((1, 1), "u2")
    )
    assert PlainLayout().encode(tensor)["w"].tolist() == [[0x21, 0x43]]
    odd = LogicalTensor("w", "int4", np.zeros((1, 3), np.uint8), tensor.scale, tensor.bias)
    with pytest.raises(LayoutError, match="3 columns"):
        PlainLayout().encode(odd)


@given(st.integers(0, 127), st.sampled_from(["values", "scale", "bias"]))
@settings(max_examples=30, deadline=None)
def test_digest_sees_every_part_but_not_the_order_of_tensors(index, part):
    weights = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    one, two = quantize("a", weights, QuantSpec("int4")), quantize("b", weights, QuantSpec("int4"))
    digest = expert_digest([one, two])
    assert digest == expert_digest([two, one])
    array = getattr(two, part)
    array.flat[index % array.size] ^= 1
    assert digest != expert_digest([one, two])
    assert logical_hash([digest, b"x" * 16]) != logical_hash([b"x" * 16, digest])
