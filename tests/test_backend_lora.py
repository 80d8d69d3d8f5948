"""Adapters are served beside the weights bit for bit, leave no trace, keep rows apart and refuse what does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_models import FAMILIES, DictServer, make_backend, make_pack, native_model, run

from moebench.backends.base import Adapters
from moebench.backends.probe import PADDED, plain_kernels
from moebench.backends.torch_experts import BackendError, expert_modules, router_module
from moebench.backends.torch_lora import Branch, dense_projections
from moebench.backends.torch_model import NativeTorchBackend
from moebench.backends.torch_source import empty_model
from moebench.models import tinymoe

CHECKPOINT = Path(tinymoe.__file__).parent / "checkpoint"
TOKENS = np.random.default_rng(0).integers(2, 96, (3, 24))
Q = "model.layers.0.self_attn.q_proj"


def random_adapters(model, seed=0, rank=5, scale=1.7):
    """Adapters beside every dense projection, strong enough to change tokens."""
    rng = np.random.default_rng(seed)

    def half(*shape):
        return (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float16)

    return Adapters(
        scale, {n: (half(rank, m.in_features), half(m.out_features, rank)) for n, m in dense_projections(model).items()}
    )


@pytest.fixture(scope="module", params=["qwen3_moe", "tinymoe"])
def served(request, tmp_path_factory):
    """(row-invariant bf16 backend, server) of a random model and of tinymoe."""
    source = CHECKPOINT if request.param == "tinymoe" else native_model(request.param)
    pack = make_pack(tmp_path_factory.mktemp(request.param), source, dtype="bfloat16")
    return make_backend(pack, dtype="bfloat16", numerics="row_invariant"), DictServer(pack)


def steps(backend, server, tokens, cuts):
    """All logits [B, W, V] of ``tokens`` [B, W] fed in pieces that end at ``cuts``."""
    backend.reset(len(tokens))
    pieces, first = [], 0
    for last in cuts:
        piece = run(backend, server, tokens[:, first:last], past=[first] * len(tokens), all_rows=True)
        pieces.append(piece.reshape(len(tokens), last - first, -1))
        first = last
    return np.concatenate(pieces, axis=1)


def test_a_projection_gives_w_x_plus_scale_b_a_x(served):
    backend, server = served
    adapters = random_adapters(backend.model)
    backend.adapt(adapters)
    seen = {}

    def observe(name):
        return lambda module, inputs, output: seen.update({name: (inputs[0], output)})

    handles = [m.register_forward_hook(observe(name)) for name, m in dense_projections(backend.model).items()]
    steps(backend, server, TOKENS[:2], [9])
    for handle in handles:
        handle.remove()
    assert set(seen) == set(adapters.pairs)
    for name, (x, y) in seen.items():
        a, b = (torch.tensor(matrix).bfloat16() for matrix in adapters.pairs[name])
        with plain_kernels(True):  # as row-invariant numerics computes
            plain = F.linear(x, backend.model.get_submodule(name).weight)
            beside = F.linear(F.linear(x, a), b)
        assert torch.equal(y, plain + adapters.scale * beside), name
        assert not torch.equal(y, plain), name


def test_adapters_replace_each_other_and_none_restores_every_bit(served):
    backend, server = served
    backend.adapt(None)
    held, plain = backend.dense_bytes, steps(backend, server, TOKENS[:1], [20, 21])
    first, second = (random_adapters(backend.model, seed) for seed in (1, 2))
    backend.adapt(second)
    alone = steps(backend, server, TOKENS[:1], [20, 21])
    backend.adapt(first)
    assert backend.dense_bytes == held
    assert not np.array_equal(steps(backend, server, TOKENS[:1], [20, 21]), plain)
    backend.adapt(second)
    assert np.array_equal(steps(backend, server, TOKENS[:1], [20, 21]), alone)
    backend.adapt(None)
    assert np.array_equal(steps(backend, server, TOKENS[:1], [20, 21]), plain)
    one = Adapters(2.0, {Q: (first.pairs[Q][0], np.zeros_like(first.pairs[Q][1]))})
    backend.adapt(one)
    assert np.array_equal(steps(backend, server, TOKENS[:1], [20, 21]), plain)


@pytest.mark.parametrize("cuts", [[24], [5, 6, 13, 24]])
def test_windows_and_equal_batches_keep_the_bits_of_single_steps(served, cuts):
    backend, server = served
    backend.adapt(random_adapters(backend.model))
    together = steps(backend, server, TOKENS, cuts)
    for i in range(3):
        assert np.array_equal(together[i], steps(backend, server, TOKENS[i : i + 1], range(1, 25))[0])


@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 8), min_size=2, max_size=4), seed=st.integers(0, 99), gone=st.integers(0, 3))
def test_left_padded_rows_and_finished_sequences_change_no_other_row(served, lengths, seed, gone):
    """Exact where attention itself is exact under padding here, as the probe found; else to its last bits."""
    backend, server = served
    backend.adapt(random_adapters(backend.model, seed % 3, rank=1 + seed % 16))
    exact = all(entry["equal"] for name, entry in backend.probe_row_invariance().items() if name.endswith(PADDED))
    rng, batch, width, gone = np.random.default_rng(seed), len(lengths), max(lengths), gone % len(lengths)
    tokens = rng.integers(2, 96, (batch, width + 2))
    valid = np.arange(width) >= width - np.array(lengths)[:, None]
    projected = []
    handle = backend.model.get_submodule(Q).register_forward_hook(lambda m, i, o: projected.append(o))
    backend.reset(batch)
    together = [run(backend, server, np.where(valid, tokens[:, :width], 0), valid=valid)]
    together.append(run(backend, server, tokens[:, width : width + 1], past=lengths))
    going = (np.arange(batch) != gone)[:, None]
    past = [n + 1 for n in lengths]
    together.append(run(backend, server, np.where(going, tokens[:, width + 1 :], 0), valid=going, past=past))
    padded, projected[:] = list(projected), []
    for i, length in enumerate(lengths):
        backend.reset(1)
        own = tokens[i : i + 1, width - length :]
        for n, (first, last) in enumerate([(0, length), (length, length + 1), (length + 1, length + 2)]):
            alone = run(backend, server, own[:, first:last], past=[first])
            assert torch.equal(projected.pop()[0], padded[n][i, first - last :]) or (n == 2 and i == gone)
            if n == 2 and i == gone:
                continue
            if exact:
                assert np.array_equal(together[n][i], alone[0])
            np.testing.assert_allclose(together[n][i], alone[0], atol=0.03 * np.abs(alone).max())
    handle.remove()


def fits(linear, rank=2):
    return np.zeros((rank, linear.in_features), np.float16), np.zeros((linear.out_features, rank), np.float16)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.0.self_attn.q_prj", None, r"'model.layers.0.self_attn.q_prj' is beside no .* such as .*q_proj"),
        ("lm_head", None, "'lm_head' is beside no dense projection"),
        ("model.embed_tokens", None, "'model.embed_tokens' is beside no dense projection"),
        ("model.layers.0.mlp.gate", None, "mlp.gate' is beside no dense projection"),
        ("model.layers.0.mlp.experts", None, "mlp.experts' is beside no dense projection"),
        (Q, lambda a, b: (a.T, b), r"q_proj: A \(\d+, 2\) .* A must be \(r, \d+\)"),
        (Q, lambda a, b: (a, b[:-1]), r"q_proj: .* do not fit a projection of"),
        (Q, lambda a, b: (a, b[:, :1]), r"q_proj: .* do not fit a projection of"),
        (Q, lambda a, b: (a[0], b), r"q_proj: .* do not fit a projection of"),
        (Q, lambda a, b: (a + np.float16(np.nan), b), "q_proj holds numbers that are not finite"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(served, name, change, message):
    backend, server = served
    backend.adapt(random_adapters(backend.model))
    before = steps(backend, server, TOKENS[:1], [6])
    good = "model.layers.1.self_attn.o_proj"
    pair = fits(backend.model.get_submodule(Q))
    pairs = {good: fits(backend.model.get_submodule(good)), name: change(*pair) if change else pair}
    with pytest.raises(BackendError, match=message) as caught:
        backend.adapt(Adapters(1.0, pairs))
    assert "\n" not in str(caught.value)
    assert np.array_equal(steps(backend, server, TOKENS[:1], [6]), before)


def test_a_branch_that_depends_on_the_batch_is_refused_by_name(served, monkeypatch):
    backend, server = served
    backend.adapt(None)
    plain, honest = steps(backend, server, TOKENS[:1], [6]), Branch.__call__

    def dishonest(self, module, inputs, output):
        return honest(self, module, inputs, output) * (1 + 2.0**-6 * (inputs[0].shape[-2] == 3))

    monkeypatch.setattr(Branch, "__call__", dishonest)
    adapters = random_adapters(backend.model)
    with pytest.raises(BackendError, match=r"kernel Linear \S+ bfloat16 with adapter of rank 5 gives .* for 3 rows"):
        backend.adapt(adapters)
    assert np.array_equal(steps(backend, server, TOKENS[:1], [6]), plain)
    backend.numerics = "fast"
    backend.adapt(adapters)
    backend.numerics = "row_invariant"
    assert not np.array_equal(steps(backend, server, TOKENS[:1], [6]), plain)


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "qwen2_moe"])
def test_dense_projections_are_all_linear_layers_but_routing_experts_and_head(family):
    model = empty_model({"model_type": family}, "bfloat16") if family == "qwen2_moe" else native_model(family)
    names = set(dense_projections(model))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    gates = {name for name in linear if name.endswith("shared_expert_gate")}
    assert names == linear - gates - {"lm_head"}
    assert bool(gates) == (family == "qwen2_moe")
    for name, experts in expert_modules(model).items():
        assert not any(found.startswith(f"{name}.") for found in names)
        assert router_module(model, name) not in map(model.get_submodule, names)
        assert experts.num_experts > 1


def test_a_router_that_is_a_linear_layer_stays_out():
    """Families differ: some routers are linear layers, whose change would be a change of routing."""
    model = native_model("qwen3_moe")
    block = model.model.layers[1].mlp
    block.gate = nn.Linear(64, 8, bias=False)
    assert "model.layers.1.mlp.gate" not in dense_projections(model)


def test_edge0s_model_has_as_many_projections_as_its_adapters():
    """Qwen3.6-35B-A3B: 30 linear and 10 full attention layers, 40 shared experts; Edge0 adapts 310 modules."""
    model = empty_model({"model_type": "qwen3_5_moe_text"}, "bfloat16")
    assert len(dense_projections(model)) == 30 * 5 + 10 * 4 + 40 * 3 == 310


def test_the_native_backend_stays_unmodified():
    backend = NativeTorchBackend(CHECKPOINT)
    backend.adapt(None)
    with pytest.raises(BackendError, match="unmodified model, without adapters"):
        backend.adapt(Adapters(1.0))
