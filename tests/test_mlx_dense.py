"""Dense weights of MLX folders for torch: mlx-lm's changes are undone exactly, and whole models compute the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from mlx_checkpoints import arrays, dequantised, mlx_folder  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import moebench  # noqa: E402
from moebench.backends.torch_geometry import geometry_of  # noqa: E402
from moebench.checkpoint.mlx_source import stored_form  # noqa: E402
from moebench.checkpoint.open import open_source  # noqa: E402
from moebench.checkpoint.whole import load_whole  # noqa: E402
from moebench.harness.assets import as_packed, folder_geometry  # noqa: E402
from moebench.store.engines import StoreError  # noqa: E402
from moebench.store.layout import QuantSpec  # noqa: E402
from moebench.store.mlx_bytes import MlxLayout  # noqa: E402
from moebench.store.writer import write_pack  # noqa: E402

FAMILIES = (
    "qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "phimoe", "granitemoe", "deepseek_v2", "glm4_moe", "dots1",
    "deepseek_v3", "kimi", "qwen3_next", "qwen3_5_moe", "lfm2_moe",
)  # fmt: skip
LOGITS = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "qwen3_next", "qwen3_5_moe", "gpt_oss_mxfp4")
TOKENS = [[7, 11, 2, 93, 41, 5, 60, 33]]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unquantised_conversion_has_the_hubs_dense_weights_bit_for_bit(family, tmp_path):
    folder = mlx_folder(family, tmp_path)
    found = []
    for source, name in ((open_source(tmp_path / "hub"), "hub"), (open_source(folder), "mlx")):
        path = tmp_path / f"{name}.safetensors"
        assert source.write_dense(path) == path.stat().st_size
        found.append(load_file(path))
    hub, mlx = found
    assert hub.keys() == mlx.keys()
    for name, tensor in hub.items():
        assert tensor.dtype == mlx[name].dtype
        assert torch.equal(tensor, mlx[name]), name


def test_a_norm_that_is_no_bf16_number_plus_one_is_refused(tmp_path):
    folder = mlx_folder("qwen3_next", tmp_path)
    tensors = arrays(folder)
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = mx.full(tensors[name].shape, 0.001, mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(StoreError, match=rf"{name} is no bf16 number plus 1; use backend=mlx"):
        open_source(folder).write_dense(tmp_path / "dense.safetensors")


def test_quantised_dense_weights_are_rounded_once_from_fp32(tmp_path):
    folder = mlx_folder("qwen2_moe", tmp_path, {"bits": 4, "group_size": 32})
    tensors, config = arrays(folder), json.loads((folder / "config.json").read_text())
    open_source(folder).write_dense(tmp_path / "dense.safetensors")
    found = load_file(tmp_path / "dense.safetensors")
    quantised = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales") and "switch" not in name]
    assert len(quantised) > 10
    for path in quantised:
        exact = torch.from_numpy(np.array(dequantised(tensors, config, path)))
        assert torch.equal(found[f"{path}.weight"], exact.bfloat16())


@pytest.mark.parametrize("family", LOGITS)
def test_the_whole_model_computes_what_mlx_lm_computes(family, tmp_path):
    """Both in fp32 from the same codes: what is left is the order of sums."""
    quant, changes = {"bits": 8, "group_size": 32}, {}
    if family == "qwen2_moe":  # mlx-lm's has no other way
        changes["norm_topk_prob"] = False
    folder = mlx_folder(family, tmp_path, quant, lambda p, _: "switch_mlp" in p or ".experts" in p, **changes)
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    theirs = np.array(model(mx.array(TOKENS)))[0]
    with torch.no_grad():
        ours = load_whole(folder, "float32")(torch.tensor(TOKENS)).logits[0].numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("bits", [4, 6])
def test_the_geometry_of_a_pack_has_its_true_bytes(bits, tmp_path):
    folder = mlx_folder("qwen3_moe", tmp_path, {"bits": bits, "group_size": 32})
    pack = write_pack(tmp_path / "pack", open_source(folder, dense="checkpoint"), QuantSpec("stored"), MlxLayout())
    geometry = as_packed(geometry_of(json.loads((folder / "config.json").read_text()), "tiny"), pack)
    assert geometry.expert_bytes == pack.expert_bytes == 3 * 128 * 64 * (bits + 1) // 8
    assert geometry.bits_per_weight == bits + 1
    assert geometry.slot_bytes == pack.slot_bytes
    assert stored_form(folder) == (pack.manifest.quant, pack.expert_bytes)
    assert folder_geometry(folder, "tiny", "stored") == geometry


def test_int8_in_mlx_bytes_is_booked_with_its_scales(tmp_path):
    mlx_folder("qwen3_moe", tmp_path)
    pack = write_pack(tmp_path / "pack", open_source(tmp_path / "hub"), QuantSpec("int8"), MlxLayout())
    plain = geometry_of(json.loads((tmp_path / "hub" / "config.json").read_text()), "tiny", "int8")
    assert as_packed(plain, pack).expert_bytes == pack.expert_bytes > plain.expert_bytes


@pytest.fixture
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("_home")
def test_a_quantised_folder_runs_and_is_its_own_reference(tmp_path):
    folder = mlx_folder("qwen3_moe", tmp_path, {"bits": 4, "group_size": 32})
    workload = {"requests": 1, "new_tokens": 12}
    asked = {"suite": "quick", "limit": 1}
    rows = moebench.run(
        system="lru", hw="m4pro", model=str(folder), quant="stored", budget="0.5", warmup_tokens=2, workload=workload,
        quality=asked,
    )  # fmt: skip
    (row,) = rows
    assert row.status == "ok", row.error
    assert row.metrics["kl_median_nats"].value < 1e-3
    assert row.config["quant"] == "stored"
