"""The order in which experts arrive never shows; padding and absent experts count as nothing; breaches are errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_models import DictServer, make_backend, make_pack, native_model, run

from moebench.backends.torch_experts import BackendError, expert_modules, expert_parameters
from moebench.step import Routing
from moebench.store.layout import QuantSpec
from moebench.store.quant import dequantize, quantize

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 9))
QUANTS = {"none": QuantSpec("none"), "int8": QuantSpec("int8"), "int4": QuantSpec("int4", 32)}


@pytest.fixture(scope="module", params=QUANTS)
def packed(request, tmp_path_factory):
    """(quant, pack) of a small Qwen3-MoE."""
    return QUANTS[request.param], make_pack(
        tmp_path_factory.mktemp("p"), native_model("qwen3_moe"), QUANTS[request.param]
    )


def logits_of(backend, server, tokens=TOKENS):
    """Prefill of 6 tokens, a window of 2, one step: all rows of all passes."""
    backend.reset(len(tokens))
    out = [run(backend, server, tokens[:, :6], all_rows=True)]
    for first, last in ((6, 8), (8, 9)):
        out.append(run(backend, server, tokens[:, first:last], past=[first] * len(tokens), all_rows=True))
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("batch", [1, 2])
def test_order_of_arrival_never_shows(packed, dtype, batch):
    _, pack = packed
    backend = make_backend(pack, dtype=dtype)
    plain = logits_of(backend, DictServer(pack), TOKENS[:batch])
    for seed in range(3):
        shuffled = logits_of(backend, DictServer(pack, np.random.default_rng(seed)), TOKENS[:batch])
        assert all(np.array_equal(a, b) for a, b in zip(plain, shuffled, strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kind", QUANTS)
def test_quantised_experts_compute_their_dequantised_weights(family, kind, tmp_path):
    model = native_model(family)
    pack = make_pack(tmp_path, model, QUANTS[kind])
    with torch.no_grad():
        for module in expert_modules(model).values():
            for name, parameter in expert_parameters(module).items():
                for expert in range(module.num_experts):
                    value = parameter[expert].T if module.is_transposed and parameter.dim() == 3 else parameter[expert]
                    value = torch.from_numpy(dequantize(quantize(name, value.contiguous().numpy(), QUANTS[kind])))
                    parameter[expert] = value.T if module.is_transposed and parameter.dim() == 3 else value
    with torch.inference_mode():
        expected = model(torch.from_numpy(TOKENS)).logits[:, -1].numpy()
    backend = make_backend(pack)
    backend.reset(2)
    got = run(backend, DictServer(pack), TOKENS)
    tolerance = 3e-4 if kind == "none" else 5e-2  # quantised kernels compute in bf16
    np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max())


def test_padding_demands_nothing_and_changes_nothing(packed):
    _, pack = packed
    backend, server = make_backend(pack, dtype="float32"), DictServer(pack)
    backend.reset(1)
    alone = run(backend, server, TOKENS[:1, :4])
    demands, server.demands = server.demands, []
    backend.reset(1)
    padded = np.concatenate([np.zeros((1, 5), np.int64), TOKENS[:1, :4]], axis=1)
    server.routing = lambda layer, native: shown.append(native.experts) or native
    shown = []
    got = run(backend, server, padded, valid=[[False] * 5 + [True] * 4])
    assert all((ids[:5] == -1).all() and (ids[5:] >= 0).all() for ids in shown)
    assert server.demands[0] == demands[0]
    np.testing.assert_allclose(got, alone, atol=1e-2 * np.abs(alone).max())
    assert (got.argmax(-1) == alone.argmax(-1)).all()


class Replacing(DictServer):
    """Changes the routing of every layer with ``change(ids, weights) -> (ids, weights)`` as numpy."""

    def routing(self, layer, native):
        return Routing(*self.change(native.experts, native.weights.float().numpy()))


def drop_second(ids, weights):
    ids = ids.copy()
    ids[:, 1] = -1
    return ids, np.where(ids < 0, np.nan, weights).astype(np.float32)


@pytest.mark.parametrize("batch", [1, 2])
def test_absent_experts_count_as_nothing(packed, batch):
    """Dropping the second expert equals routing to the first alone, whatever weight stands at the absent one."""
    _, pack = packed
    backend, server = make_backend(pack), Replacing(pack)
    server.change = drop_second
    dropped = logits_of(backend, server, TOKENS[:batch])
    server.change = lambda ids, weights: (ids[:, :1], weights[:, :1])
    single = logits_of(backend, server, TOKENS[:batch])
    native = logits_of(backend, DictServer(pack), TOKENS[:batch])
    assert all(np.array_equal(a, b) for a, b in zip(dropped, single, strict=True))
    assert not np.array_equal(dropped[0], native[0])


@pytest.mark.parametrize("batch", [1, 2])
def test_replaced_routing_is_executed(packed, batch):
    """The native routing handed back as numpy is the native result; an expert named twice counts twice."""
    _, pack = packed
    backend, server = make_backend(pack), Replacing(pack)
    server.change = lambda ids, weights: (ids.copy(), weights)
    same = logits_of(backend, server, TOKENS[:batch])
    assert all(map(np.array_equal, same, logits_of(backend, DictServer(pack), TOKENS[:batch])))
    server.change = lambda ids, weights: (np.repeat(ids[:, :1], 2, axis=1), weights)
    twice = logits_of(backend, server, TOKENS[:batch])
    server.change = lambda ids, weights: (ids[:, :1], weights.sum(axis=1, keepdims=True))
    once = logits_of(backend, server, TOKENS[:batch])
    np.testing.assert_allclose(twice[0], once[0], atol=1e-2 * np.abs(once[0]).max())


@pytest.mark.parametrize("width", [1, 4])
def test_a_server_that_leaves_an_expert_out_is_an_error(packed, width):
    _, pack = packed
    backend, server = make_backend(pack), DictServer(pack)
    server.items = lambda layer, demand: ((e, server.buffers[e]) for e in demand[1:])
    with pytest.raises(BackendError, match=r"layer 0: the server"):
        run(backend, server, TOKENS[:1, :width])


def test_wrong_use_is_refused_in_one_line(packed):
    _, pack = packed
    backend, server = make_backend(pack), DictServer(pack)
    server.items = lambda layer, demand: ((e, np.zeros(64, np.uint8)) for e in demand)
    with pytest.raises(BackendError, match="buffer of 64 bytes is shorter"):
        run(backend, server, TOKENS[:1, :1])
    with pytest.raises(BackendError, match="brings a server"):
        backend.model(torch.zeros(1, 1, dtype=torch.long))
    backend.reset(2)
    with pytest.raises(BackendError, match=r"do not fit 9 rows of 2 sequences"):
        run(backend, server, TOKENS[:1])
