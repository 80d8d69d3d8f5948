"""One experts function computes what transformers computes, for six families; the laws choose as the routers do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_models import FAMILIES, DictServer, make_backend, make_pack, native_model, run

from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_source import load_model
from moebench.routing import law_of_config

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 11))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    """(name, logits of the untouched model, backend, server) of one family in fp32."""
    model = native_model(request.param)
    with torch.inference_mode():
        logits = model(torch.from_numpy(TOKENS)).logits.numpy()
    pack = make_pack(tmp_path_factory.mktemp(request.param), model)
    return request.param, logits, make_backend(pack), DictServer(pack)


def test_prefill_and_decode_match_the_untouched_model(family):
    _, expected, backend, server = family
    backend.reset(2)
    got = run(backend, server, TOKENS[:, :8], all_rows=True).reshape(2, 8, -1)
    np.testing.assert_allclose(got, expected[:, :8], atol=2e-4 * np.abs(expected).max())
    assert (got.argmax(-1) == expected[:, :8].argmax(-1)).all()
    for i in range(8, 11):
        got = run(backend, server, TOKENS[:, i : i + 1], past=[i, i])
        np.testing.assert_allclose(got, expected[:, i], atol=2e-4 * np.abs(expected).max())


def test_single_row_decode_matches_the_untouched_model(family):
    _, expected, backend, server = family
    backend.reset(1)
    for i in range(11):
        got = run(backend, server, TOKENS[:1, i : i + 1], past=[i])
        np.testing.assert_allclose(got, expected[:1, i], atol=2e-4 * np.abs(expected).max())


def test_expert_parameters_stay_on_meta_and_all_else_is_loaded(family):
    _, _, backend, _ = family
    on_meta = {name for name, p in backend.model.named_parameters() if p.is_meta}
    assert on_meta == {name for name, _ in backend.model.named_parameters() if ".experts." in name}
    assert not any(b.is_meta for b in backend.model.buffers())
    held = {p.data_ptr(): p.nbytes for p in (*backend.model.parameters(), *backend.model.buffers()) if not p.is_meta}
    assert backend.dense_bytes == sum(held.values())


def test_the_law_chooses_what_the_router_chose(family):
    name, _, backend, server = family
    law, seen, native = law_of_config(backend.model.config.to_dict()), {}, {}
    server.routing = native.setdefault
    stop = backend.observe_router_logits(lambda layer, logits: seen.setdefault(layer, logits.float().numpy()))
    backend.reset(2)
    run(backend, server, TOKENS)
    stop()
    del server.routing
    assert len(seen) == len(native) == server_layers(backend)
    biases = [b.numpy() for n, b in backend.model.named_buffers() if "correction_bias" in n] or [None] * len(seen)
    for layer, logits in seen.items():
        mine = law.apply(logits, native[layer].experts.shape[1], biases[layer])
        ids, weights = native[layer].experts, native[layer].weights.float().numpy()
        if name == "deepseek_v3":  # its own top-k is not sorted
            mine = sort_row(mine.experts, mine.weights)
            ids, weights = sort_row(ids, weights)
        else:
            mine = (mine.experts, mine.weights)
        np.testing.assert_array_equal(mine[0], ids)
        np.testing.assert_allclose(mine[1], weights, rtol=1e-5)


def sort_row(ids, weights):
    order = np.argsort(ids, axis=1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)


def server_layers(backend):
    return sum(name.endswith(".experts") for name, _ in backend.model.named_modules())


def test_geometry_counts_the_model(family):
    name, _, backend, server = family
    geometry = geometry_of(backend.model.config.to_dict(), name, quant="none")
    parameters = sum(p.numel() for p in backend.model.parameters())
    biases = sum(p.numel() for n, p in backend.model.named_parameters() if ".experts." in n and n.endswith("bias"))
    assert geometry.dense_parameters + geometry.keys * geometry.expert_parameters + biases == parameters
    assert geometry.experts == server.experts
    assert geometry.layers == server_layers(backend)
    backend.reset(1)
    run(backend, server, TOKENS[:1, :5])
    assert backend.kv_bytes() == 5 * 2 * geometry.kv_bytes_per_token  # fp32 here, bf16 in the geometry


def test_bf16_keeps_what_the_family_keeps_in_float32(tmp_path):
    """DeepSeek's router stays float32 in a bf16 model, as from_pretrained keeps it; the source is left alone."""
    model = native_model("deepseek_v3")
    model.save_pretrained(tmp_path / "tiny")
    backend = make_backend(make_pack(tmp_path, model, dtype="bfloat16"), dtype="bfloat16")
    native = load_model(tmp_path / "tiny", "bfloat16").state_dict()
    ours = {n: t for n, t in backend.model.state_dict().items() if not t.is_meta}
    assert {n: t.dtype for n, t in ours.items()} == {n: native[n].dtype for n in ours}
    assert all(torch.equal(t, native[n]) for n, t in ours.items())
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
