"""Families under backend=mlx give the logits of mlx-lm's own model bit for bit, of transformers' within rounding."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import torch
from family_checkpoints import make_checkpoint
from mlx_checkpoints import mlx_folder
from mlx_models import MlxServer, config_of, make_backend, make_pack, own_forward
from safetensors.torch import load_file, save_file
from torch_models import run
from transformers import AutoModelForCausalLM

from moebench.backends.base import BackendError
from moebench.checkpoint.open import open_source
from moebench.store.layout import QuantSpec
from moebench.store.pack import file_hash
from moebench.store.plain import PlainLayout
from moebench.store.writer import write_pack

# What transformers and mlx-lm differ by, of logits up to about 3: rounding, but for gpt-oss, whose rotary frequencies
# mlx-lm interpolates from another dimension on.
BOUNDS = {
    "qwen3_moe": 1e-5, "qwen3_next": 1e-5, "qwen3_5_moe": 1e-5, "olmoe": 1e-5, "mixtral": 1e-5, "deepseek_v3": 1e-5,
    "glm4_moe": 1e-5, "gpt_oss": 1e-2, "granitemoe": 1e-5, "phimoe": 1e-5, "ernie4_5_moe": 1e-5, "lfm2_moe": 1e-5,
    "dots1": 1e-5,
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(2, 300, (1, 12))


def without_selection_bias(folder):
    """Zeros where mlx-lm leaves a tensor out: with any other numbers the model is refused."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    zeros = {n: torch.zeros_like(t) for n, t in tensors.items() if n.endswith("e_score_correction_bias")}
    save_file(tensors | zeros, file, {"format": "pt"})


@pytest.mark.parametrize("family", BOUNDS)
def test_logits_are_those_of_mlx_lm_and_of_transformers(family, tmp_path):
    folder = make_checkpoint(family, tmp_path / "checkpoint", tokenizer=False)
    if family == "ernie4_5_moe":
        without_selection_bias(folder)
    pack = make_pack(folder, tmp_path / "pack")
    backend = make_backend(folder, pack)
    logits = run(backend, MlxServer(backend, pack, np.random.default_rng(1)), TOKENS, all_rows=True)
    if family not in ("gpt_oss", "qwen3_5_moe"):  # of which mlx-lm's own loader reads fused or MXFP4 experts only
        assert np.array_equal(logits, own_forward(folder, TOKENS))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = model(input_ids=torch.from_numpy(TOKENS)).logits[0].numpy()
    assert np.abs(logits - theirs).max() < BOUNDS[family]
    assert np.array_equal(logits.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        ("qwen3_moe", {"bits": 4, "group_size": 64}),
        ("qwen3_next", {"bits": 6, "group_size": 32}),
        ("deepseek_v3", {"bits": 8, "group_size": 32}),
        ("mixtral", {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
        ("qwen3_next", None),
    ],
)
def test_what_mlx_quantised_runs_as_it_is_stored(family, quant, tmp_path):
    folder = mlx_folder(family, tmp_path, quant)
    pack = make_pack(folder, tmp_path / "pack", "stored" if quant else "none")
    backend = make_backend(folder, pack)
    logits = run(backend, MlxServer(backend, pack, np.random.default_rng(1)), TOKENS, all_rows=True)
    assert np.array_equal(logits, own_forward(folder, TOKENS))


def test_what_mlx_lm_cannot_run_is_one_line(tmp_path):
    folder = make_checkpoint("flex_olmo", tmp_path / "checkpoint", tokenizer=False)
    with pytest.raises(BackendError, match="no model type 'flex_olmo'; use backend=torch"):
        make_backend(folder, make_pack(folder, tmp_path / "pack"))
    folder = make_checkpoint("qwen2_moe", tmp_path / "other", tokenizer=False)
    assert config_of(folder)["norm_topk_prob"]
    with pytest.raises(BackendError, match="norm_topk_prob"):
        make_backend(folder, make_pack(folder, tmp_path / "other-pack"))


def test_a_selection_bias_is_never_left_out_in_silence(tmp_path):
    folder = make_checkpoint("ernie4_5_moe", tmp_path / "checkpoint", tokenizer=False)
    pack = make_pack(folder, tmp_path / "pack")
    weights = mx.load(str(pack.dense_path))
    name = next(name for name in weights if name.endswith("e_score_correction_bias"))
    weights[name] = weights[name] + 1
    mx.save_safetensors(str(pack.dense_path), weights)
    object.__setattr__(pack.manifest, "dense_hash", file_hash(pack.dense_path))
    with pytest.raises(BackendError, match="leaves out e_score_correction_bias"):
        make_backend(folder, pack)


def test_a_damaged_dense_file_and_a_foreign_layout_are_refused(tmp_path):
    folder = make_checkpoint("qwen3_moe", tmp_path / "checkpoint", tokenizer=False)
    pack = make_pack(folder, tmp_path / "pack")
    data = bytearray(pack.dense_path.read_bytes())
    data[-1] ^= 1
    pack.dense_path.write_bytes(data)
    with pytest.raises(BackendError, match="is damaged"):
        make_backend(folder, pack)
    plain = write_pack(tmp_path / "plain", open_source(folder), QuantSpec("none"), PlainLayout())
    with pytest.raises(BackendError, match="byte layout is plain; mlx reads mlx"):
        make_backend(folder, plain)
