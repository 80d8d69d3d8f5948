"""What mlx-lm would not do as a configuration says is refused by backend=mlx, before anything is packed; what MLX
quantised is booked and modeled in its own bytes.
"""

from __future__ import annotations

import pytest

pytest.importorskip("mlx_lm")

from family_checkpoints import make_checkpoint
from mlx_checkpoints import mlx_folder

import moebench
from moebench.backends.base import BackendError
from moebench.harness import costs
from moebench.harness.backend import require_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "short_mscale": 1.0, "long_mscale": 1.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024, "factor": 4.0, **FACTORS}


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {"rope_parameters": YARN}, r"does not scale positions as the model does \(yarn\)"),
        ("mixtral", {"rope_parameters": YARN}, r"does not scale positions as the model does \(yarn\)"),
        ("phimoe", {"rope_parameters": LONG}, "takes the long factors of longrope at every length"),
        ("mixtral", {"sliding_window": 8}, "attends to everything, the model to a window of 8"),
        ("olmoe", {"clip_qkv": 2.0}, "runs with clip_qkv=None, the model has 2.0"),
    ],
)
def test_what_mlx_lm_does_not_read_is_refused(family, changes, said, tmp_path):
    folder = make_checkpoint(family, tmp_path / family, tokenizer=False, **changes)
    require_model("torch", folder)
    with pytest.raises(BackendError, match=f"{said}; use backend=torch"):
        require_model("mlx", folder)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("olmoe", {"rope_parameters": YARN}),
        ("gpt_oss", {}),
        ("mixtral", {"sliding_window": 4096}),
        ("phimoe", {"rope_parameters": {**LONG, "short_factor": LONG["long_factor"]}}),
    ],
)
def test_what_it_reads_or_what_changes_nothing_is_not(family, changes, tmp_path):
    require_model("mlx", make_checkpoint(family, tmp_path / family, tokenizer=False, **changes))


def test_a_model_that_cannot_run_is_refused_before_it_is_packed(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    folder = make_checkpoint("flex_olmo", tmp_path / "flex_olmo")
    (row,) = moebench.run(system="lru", hw="m4pro", model=str(folder), backend="mlx", quality="none")
    assert row.status == "failed"
    assert "no model type 'flex_olmo'; use backend=torch" in row.error
    assert not (tmp_path / "home" / "packs").exists()


def test_dense_weights_that_mlx_quantised_take_the_time_of_their_own_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    folder = mlx_folder("qwen3_moe", tmp_path, {"bits": 4, "group_size": 64})
    bits, build = [], costs.build
    monkeypatch.setattr(costs, "build", lambda *args, **given: bits.append(args[3]) or build(*args, **given))
    few = {"requests": 1, "new_tokens": 4}
    common = {"system": "lru", "hw": "m4pro", "model": str(folder), "quality": "none", "quant": "stored"}
    for backend in ("torch", "mlx"):
        (row,) = moebench.run(**common, backend=backend, workload=few, warmup_tokens=0, budget="0.5")
        assert row.status == "ok", row.error
    assert bits[0] == 16  # dequantised
    assert 4.5 <= bits[-1] < 5  # 4 bits, 32 for a group of 64, norms and the router
