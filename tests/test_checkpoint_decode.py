"""FP8 and MXFP4 as bf16: all codes, short blocks, per-tensor scales, rows read in pieces; the rest is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from family_checkpoints import FP4
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from moebench.checkpoint import decode
from moebench.checkpoint.decode import Decoded
from moebench.checkpoint.files import Checkpoint
from moebench.store.engines import StoreError

BLOCKS = torch.zeros(1, 2, 3, 16).byte()


def view(folder, tensors, block=None, method="fp8"):
    """A decoded view of a folder with these tensors."""
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": method, "weight_block_size": block}}
    (folder / "config.json").write_text(json.dumps(config))
    return Decoded(Checkpoint(folder))


def bits(tensor):
    return tensor.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2"])
def test_every_code_of_a_small_float_is_torchs_number(name):
    dtype = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[name]
    wanted = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(decode._FLOAT8[name], wanted)
    np.testing.assert_array_equal(np.signbit(decode._FLOAT8[name]), np.signbit(wanted))


def test_every_code_of_fp4_is_its_number():
    np.testing.assert_array_equal(decode._FLOAT4, FP4.numpy())


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 40), block=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    seed=st.integers(0, 99), start=st.integers(0, 45), stop=st.integers(0, 45),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_blocks_of_fp8_have_their_own_scale_short_ones_too(tmp_path_factory, rows, columns, block, seed, start, stop):
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, columns, generator=rng).to(torch.float8_e4m3fn)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scale = torch.rand(grid, generator=rng) + 0.01
    made = view(tmp_path_factory.mktemp("fp8"), {"w": codes, "w_scale_inv": scale}, list(block))
    wide = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    wanted = bits(codes.float() * wide)
    np.testing.assert_array_equal(made.read("w"), wanted)
    np.testing.assert_array_equal(made.read("w", start, stop), wanted[start:stop])
    assert set(made.tensors) == {"w"}


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([[0.25]])])
def test_one_scale_may_stand_for_the_whole_tensor(scale, tmp_path):
    codes = torch.randn(5, 6).to(torch.float8_e5m2)
    made = view(tmp_path / "m", {"w": codes, "w_scale_inv": scale})
    np.testing.assert_array_equal(made.read("w", 1, 3), bits(codes.float() * 0.25)[1:3])


def test_experts_of_fp8_in_one_tensor_are_read_one_by_one(tmp_path):
    codes, scale = torch.randn(3, 8, 4).to(torch.float8_e4m3fn), torch.rand(3, 4, 2)
    made = view(tmp_path / "m", {"w": codes, "w_scale_inv": scale})
    wanted = bits(codes.float() * scale.repeat_interleave(2, 1).repeat_interleave(2, 2))
    np.testing.assert_array_equal(made.read("w", 1, 2), wanted[1:2])


def test_mxfp4_blocks_are_transposed_numbers_times_powers_of_two(tmp_path):
    blocks, scales = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8), torch.randint(100, 140, (2, 6, 3)).byte()
    made = view(tmp_path / "m", {"w_blocks": blocks, "w_scales": scales}, method="mxfp4")
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(3).long()
    wanted = (FP4[codes] * torch.exp2(scales.float() - 127)[..., None]).flatten(2).transpose(1, 2)
    assert made.tensors["w"].shape == tuple(wanted.shape)
    np.testing.assert_array_equal(made.read("w"), bits(wanted))
    np.testing.assert_array_equal(made.read("w", 1, 2), bits(wanted)[1:2])


@pytest.mark.parametrize(
    ("tensors", "hint"),
    [
        ({"w": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "has no scale w_scale_inv"),
        ({"w_blocks": BLOCKS}, "lack scales"),
        ({"w_blocks": BLOCKS, "w_scales": torch.zeros(1, 2, 2).byte()}, "lack scales"),
        ({"w_blocks": BLOCKS, "w_scales": torch.zeros(1, 2, 3).byte(), "w": torch.zeros(1)}, "twice"),
    ],
)
def test_codes_without_their_scales_are_refused(tensors, hint, tmp_path):
    with pytest.raises(StoreError, match=hint):
        view(tmp_path / "m", tensors, method="mxfp4")


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (1, 2, 2), (4,)])
def test_scales_that_do_not_cover_the_tensor_are_refused(shape, tmp_path):
    made = view(tmp_path / "m", {"w": torch.zeros(8, 8).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(shape)})
    with pytest.raises(StoreError, match="do not cover FP8 tensor w"):
        made.read("w")
