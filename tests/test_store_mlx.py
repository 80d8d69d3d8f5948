"""The byte layout ``mlx``: words, scales and biases are mlx.core's own, every format round-trips, int8 is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.store.layout import CODE_BITS, LayoutError, LogicalTensor, QuantSpec
from moebench.store.mlx_bytes import MlxLayout, pack_codes, unpack_codes
from moebench.store.plain import PlainLayout
from moebench.store.quant import dequantize, expert_digest, quantize, to_bf16

AFFINE = {kind: bits for kind, bits in CODE_BITS.items() if kind.startswith("int") or kind.startswith("affine")}
MICRO = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
GROUPS = (32, 64, 128)
LAYOUT = MlxLayout()


def random_tensor(kind: str, rows: int, groups: int, group: int, seed: int, floats: str = "bf16") -> LogicalTensor:
    """Any tensor of ``kind``: all codes and finite scales can occur."""
    draw = np.random.default_rng(seed)
    if kind == "int8":
        values = draw.integers(-127, 128, (rows, groups * group)).astype(np.int8)
        return LogicalTensor("w", kind, values, to_bf16(draw.random(rows).astype(np.float32)))
    values = draw.integers(0, 1 << CODE_BITS[kind], (rows, groups * group)).astype(np.uint8)
    if kind in MICRO:
        return LogicalTensor("w", kind, values, draw.integers(0, 127, (rows, groups)).astype(np.uint8))
    numbers = draw.standard_normal((2, rows, groups)).astype(np.float32)
    scale, bias = to_bf16(numbers) if floats == "bf16" else numbers.astype(floats)
    return LogicalTensor("w", kind, values, scale, bias)


def same(a: LogicalTensor, b: LogicalTensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    parts = zip((a.values, a.scale, a.bias), (b.values, b.scale, b.bias), strict=True)
    return (a.name, a.kind) == (b.name, b.kind) and all(
        (x is None and y is None) or (x.dtype == y.dtype and x.tobytes() == y.tobytes()) for x, y in parts
    )


@pytest.mark.parametrize("layout", [MlxLayout(), PlainLayout()], ids=lambda x: x.name)
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(("int8", *CODE_BITS)),
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    group=st.sampled_from(GROUPS),
    floats=st.sampled_from(("bf16", "<f2", "<f4")),
    seed=st.integers(0, 2**32),
)
def test_what_is_encoded_comes_back_bit_for_bit(layout, kind, rows, groups, group, floats, seed):
    tensor = random_tensor(kind, rows, groups, MICRO.get(kind, group), seed, floats)
    back = layout.decode("w", kind, tensor.shape, layout.encode(tensor))
    assert same(tensor, back)
    assert expert_digest([tensor]) == expert_digest([back])


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), words=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_codes_fill_words_without_gaps_lowest_bit_first(bits, rows, words, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, 32 * words)).astype(np.uint8)
    packed = pack_codes("w", codes, bits)
    assert packed.dtype == np.uint32
    assert packed.shape == (rows, bits * words)
    assert (unpack_codes(packed, bits) == codes).all()
    for row, found in zip(codes.tolist(), packed, strict=True):
        number = sum(code << (bits * place) for place, code in enumerate(row))
        assert number == int.from_bytes(found.tobytes(), "little")


def test_a_row_that_does_not_fill_words_is_refused_with_its_name():
    with pytest.raises(LayoutError, match="tensor up_proj: 20 columns of 3 bits"):
        pack_codes("up_proj", np.zeros((2, 20), np.uint8), 3)
    with pytest.raises(LayoutError, match="multiples of 32, got 48"):
        LAYOUT.encode(LogicalTensor("w", "int8", np.zeros((2, 48), np.int8), np.zeros(2, np.uint16)))


def test_half_of_the_rows_is_a_view_of_each_part():
    tensor = random_tensor("int4", 8, 2, 64, 1)
    whole = LAYOUT.encode(tensor)
    half = LAYOUT.encode(LogicalTensor("w", "int4", tensor.values[:4], tensor.scale[:4], tensor.bias[:4]))
    for name, part in half.items():
        assert part.tobytes() == whole[name][:4].tobytes()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", AFFINE)
def test_affine_bytes_are_those_of_mlx_and_stand_for_the_same_weights(kind, group):
    mx = pytest.importorskip("mlx.core")
    bits = AFFINE[kind]
    weights = np.random.default_rng(bits).standard_normal((4, 256)).astype(np.float32)
    words, scales, biases = (np.array(a) for a in mx.quantize(mx.array(weights), group, bits))
    tensor = LAYOUT.decode("w", kind, weights.shape, {"w": words, "w.scales": scales, "w.biases": biases})
    assert {k: v.tobytes() for k, v in LAYOUT.encode(tensor).items()} == {
        "w": words.tobytes(), "w.scales": scales.tobytes(), "w.biases": biases.tobytes()
    }  # fmt: skip
    theirs = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group, bits)
    assert (dequantize(tensor) == np.array(theirs)).all()


@pytest.mark.parametrize("group", GROUPS)
def test_our_own_int4_is_read_by_mlx_as_what_it_stands_for(group):
    mx = pytest.importorskip("mlx.core")
    weights = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    tensor = quantize("w", weights, QuantSpec("int4", group))
    assert (_read_by_mlx(mx, tensor, group, 4) == dequantize(tensor)).all()


@pytest.mark.parametrize(("columns", "group"), [(128, 128), (192, 64), (96, 32)])
def test_int8_is_exact_as_affine_codes_of_mlx(columns, group):
    mx = pytest.importorskip("mlx.core")
    rows = np.array([1e-30, 1e-3, 1, 3e7, 1e30], np.float32)[:, None]
    weights = np.random.default_rng(4).uniform(-1, 1, (5, columns)).astype(np.float32) * rows
    tensor = quantize("w", weights, QuantSpec("int8"))
    assert (_read_by_mlx(mx, tensor, group, 8) == dequantize(tensor)).all()


@pytest.mark.parametrize("kind", MICRO)
def test_microscaling_bytes_are_those_of_mlx_and_stand_for_the_same_weights(kind):
    mx = pytest.importorskip("mlx.core")
    weights = np.random.default_rng(5).standard_normal((4, 128)).astype(np.float32)
    group, bits = MICRO[kind], CODE_BITS[kind]
    words, scales = mx.quantize(mx.array(weights), group, bits, mode=kind)
    parts = {"w": np.array(words), "w.scales": np.array(scales)}
    tensor = LAYOUT.decode("w", kind, weights.shape, parts)
    assert {k: v.tobytes() for k, v in LAYOUT.encode(tensor).items()} == {k: v.tobytes() for k, v in parts.items()}
    theirs = mx.dequantize(words, scales, group_size=group, bits=bits, mode=kind, dtype=mx.float32)
    assert (dequantize(tensor) == np.array(theirs)).all()
    every = (np.arange(256) % (1 << bits)).astype(np.uint8).reshape(2, 128)
    codes = LogicalTensor("w", kind, every, np.full((2, 128 // group), 120, np.uint8))
    parts = {name: mx.array(part) for name, part in LAYOUT.encode(codes).items()}
    theirs = mx.dequantize(parts["w"], parts["w.scales"], group_size=group, bits=bits, mode=kind, dtype=mx.float32)
    np.testing.assert_array_equal(dequantize(codes), np.array(theirs))


def _read_by_mlx(mx, tensor: LogicalTensor, group: int, bits: int) -> np.ndarray:
    """What mlx.core makes of an encoded tensor, with scales and biases in fp32."""
    parts = LAYOUT.encode(tensor)
    numbers = [mx.array(parts[f"w.{name}"]).view(mx.bfloat16).astype(mx.float32) for name in ("scales", "biases")]
    return np.array(mx.dequantize(mx.array(parts["w"]), *numbers, group, bits))
