"""The probe covers every kernel, tells row-invariant ones from others; a run that needs them all is refused by name."""

from __future__ import annotations

import pytest
import torch
from family_checkpoints import native
from torch_models import make_backend, make_pack, native_model

from moebench.backends import probe, torch_model
from moebench.backends.torch_experts import BackendError, expert_modules


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("p"), native_model("qwen3_moe"), dtype="bfloat16")


def test_every_kind_of_kernel_is_reported(pack):
    report = make_backend(pack, dtype="bfloat16").probe_row_invariance()
    kinds = (
        "Linear 96x64",
        "TopKRouter 8x64",
        "RMSNorm 64",
        "expert gate_up",
        "expert down",
        "expert gate",
        "weighted sum",
    )
    for kind in (*kinds, "eager attention, 4 heads of 16", "heads of 16, padded"):
        assert any(kind in name for name in report), kind
    for entry in report.values():
        assert entry["equal"] == (entry["max_abs_diff"] == 0) == (entry["first_unequal_rows"] is None)


def depends_on_batch(x, w, s):
    return torch.nn.functional.linear(x, w) * (1 + 2.0**-6 * (len(x) == 3))


def test_a_kernel_that_depends_on_the_batch_is_named(pack):
    backend = make_backend(pack, dtype="bfloat16", numerics="row_invariant")
    next(iter(expert_modules(backend.model).values())).moebench.down = depends_on_batch
    report = backend.probe_row_invariance()
    unequal = {name: entry for name, entry in report.items() if not entry["equal"] and "padded" not in name}
    assert list(unequal) == ["expert down_proj 64x32 BF16"]
    assert unequal["expert down_proj 64x32 BF16"]["first_unequal_rows"] == 3
    assert unequal["expert down_proj 64x32 BF16"]["max_abs_diff"] > 0
    with pytest.raises(BackendError, match=r"row_invariant: here kernel expert down_proj 64x32 BF16 .* for 3 rows"):
        probe.require_row_invariance(report)


def test_row_invariant_numerics_refuses_at_start(pack, monkeypatch):
    bad = {"sdpa attention": {"equal": False, "max_abs_diff": 0.5, "first_unequal_rows": 4}}
    monkeypatch.setattr("moebench.backends.torch_model.probe_kernels", lambda *given: bad)
    make_backend(pack, dtype="bfloat16", numerics="fast")
    with pytest.raises(BackendError, match="kernel sdpa attention gives other bits for 4 rows"):
        make_backend(pack, dtype="bfloat16", numerics="row_invariant")
    with pytest.raises(BackendError, match="'loose' is not one of row_invariant, fast"):
        make_backend(pack, numerics="loose")


@pytest.mark.parametrize(
    ("family", "kernel"), [("deepseek_v3", "DeepseekV3TopkRouter 8x128 float32"), ("minimax_m2", "MiniMaxM2TopKRouter")]
)
def test_routers_that_are_left_as_they_are_are_named(family, kernel, tmp_path, monkeypatch):
    """Float32 products, and float32 sigmoids over bf16 ones: what the rows' own passes mend, the probe would find."""
    pack = make_pack(tmp_path, native(family, "float32"), dtype="bfloat16")
    make_backend(pack, dtype="bfloat16", numerics="row_invariant")
    monkeypatch.setattr(torch_model, "settle_routers", lambda model, exact: None)
    with pytest.raises(BackendError, match=f"here kernel {kernel}.* gives other bits"):
        make_backend(pack, dtype="bfloat16", numerics="row_invariant")
