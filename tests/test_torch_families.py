"""One experts function computes what transformers computes, for every family: logits, greedy tokens, quantised experts,
batches, chunks and windows of drafts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from family_checkpoints import FAMILIES, make_checkpoint, native
from torch_models import DictServer, make_backend, make_pack, run, step_of

from moebench.backends.torch_experts import expert_modules
from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_source import load_model
from moebench.draft import Draft
from moebench.routing import law_of_config
from moebench.step import VERIFY, Step
from moebench.store.layout import QuantSpec
from moebench.systems.edge0.student import dequantise_experts

STORED = {"gpt_oss_mxfp4", "qwen3_moe_fp8"}  # other bytes in the checkpoint, the same arithmetic
NAMES = sorted(FAMILIES.keys() - STORED)
TOKENS = np.random.default_rng(0).integers(3, 250, (2, 18))
LENGTHS = (9, 5)  # of prompts in a batch, the shorter one padded on the left


class Family:
    """One family's tiny model in float32, untouched, and backends over packs of it."""

    def __init__(self, name, folder) -> None:
        self.name, self.folder, self._made = name, folder, {}
        self.model = native(name, "float32")
        self.model.set_experts_implementation("eager")

    def backend(self, dtype="float32", quant="none", numerics="fast"):
        """(backend, server) made once for each kind."""
        kind = (dtype, quant, numerics)
        if kind not in self._made:
            folder = self.folder / "-".join(kind)
            folder.mkdir()
            pack = make_pack(folder, self.model, QuantSpec(quant), dtype)
            self._made[kind] = make_backend(pack, dtype=dtype, numerics=numerics), DictServer(pack)
        return self._made[kind]


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@torch.inference_mode()
def untouched(model, tokens=TOKENS, **options):
    """transformers' own logits [B, W, V] in one pass."""
    return model(torch.from_numpy(tokens), **options).logits.float().numpy()


def feed(backend, server, tokens, cuts, valid=None):
    """All logits [B, W, V] of ``tokens`` in passes that end at ``cuts``."""
    backend.reset(len(tokens))
    valid = np.ones(tokens.shape, bool) if valid is None else valid
    out = []
    for first, last in zip((0, *cuts), cuts, strict=False):
        past = valid[:, :first].sum(1)
        piece = run(backend, server, tokens[:, first:last], valid=valid[:, first:last], past=past, all_rows=True)
        out.append(piece.reshape(len(tokens), last - first, -1))
    return np.concatenate(out, 1)


def near(got, expected, share):
    """Equal within ``share`` of the largest expected number."""
    np.testing.assert_allclose(got, expected, atol=share * np.abs(expected).max(), rtol=0)


def test_logits_are_those_of_the_untouched_model(family):
    """A prompt at once, in chunks and step by step, of a batch and of one sequence."""
    expected, one = untouched(family.model), range(1, 19)
    for tokens, cuts in ((TOKENS, (18,)), (TOKENS, (7, 14, *range(15, 19))), (TOKENS[:1], one)):
        near(feed(*family.backend(), tokens, list(cuts)), expected[: len(tokens)], 5e-6)


def test_padded_batches_are_those_of_the_untouched_model(family):
    """Prompts of unequal length in chunks, then steps: the same as each in a batch of transformers' own."""
    width = max(LENGTHS)
    valid = np.ones(TOKENS.shape, bool)
    for row, length in enumerate(LENGTHS):
        valid[row, : width - length] = False
    position = np.maximum(valid.cumsum(1) - 1, 0)
    mask = {"attention_mask": torch.from_numpy(valid).long(), "position_ids": torch.from_numpy(position)}
    expected = untouched(family.model, **mask)
    sliding = any("Sliding" in type(layer).__name__ for layer in family.backend()[0].cache.layers)
    for cuts in ([9, *range(10, 19)],) if sliding else ([9, *range(10, 19)], [*range(1, 19)], [4, 8, 9, 10, 18]):
        got = feed(*family.backend(), TOKENS, cuts, valid)
        near(got[valid], expected[valid], 5e-6)


def test_greedy_tokens_are_those_of_generate(family):
    backend, server = family.backend()
    made = family.model.generate(torch.from_numpy(TOKENS[:1]), max_new_tokens=16, do_sample=False)[0, 18:].tolist()
    backend.reset(1)
    logits, out = run(backend, server, TOKENS[:1]), []
    for at in range(16):
        out.append(int(logits.argmax()))
        logits = run(backend, server, np.array([[out[-1]]]), past=[18 + at])
    assert out == made


def test_bf16_logits_are_those_of_the_untouched_model_at_bf16(family):
    """As near to the model in float32 as transformers' own in bf16 is, and as near to that one as roundings allow."""
    exact, theirs = untouched(family.model), untouched(native(family.name, "bfloat16"))
    got = feed(*family.backend("bfloat16"), TOKENS, [18])
    error, rounding = np.abs(got - exact).mean(), np.abs(theirs - exact).mean()
    assert error < 1.5 * rounding
    assert np.abs(got - theirs).mean() < 2 * rounding


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_experts_compute_what_their_codes_stand_for(family, quant):
    """Their kernels take bf16 inputs, so within bf16 of a model whose expert weights are the dequantised ones."""
    model = native(family.name, "float32")
    model.set_experts_implementation("eager")
    dequantise_experts(model, quant)
    expected = untouched(model)
    got = feed(*family.backend("float32", quant), TOKENS, [18])
    chosen = np.abs(got - expected).max(-1) < 0.05 * np.abs(expected).max()  # but where a router's tie fell elsewhere
    assert chosen.mean() > 0.9
    assert np.abs(got - expected)[chosen].mean() < 0.004 * np.abs(expected).max()
    if quant == "int4":  # int8 lies about as far from the model as bf16 does
        assert np.abs(untouched(family.model) - expected).mean() > 3 * np.abs(got - expected)[chosen].mean()


def test_row_invariant_numerics_gives_every_row_the_bits_of_steps(family):
    """Chunks, windows and equal batches; every kernel in use was probed at start."""
    backend, server = family.backend("bfloat16", "none", "row_invariant")
    single = feed(backend, server, TOKENS[:1], range(1, 19))
    for cuts in ([18], [5, 6, 13, 18]):
        assert np.array_equal(feed(backend, server, TOKENS[:1], cuts), single)
    assert np.array_equal(feed(backend, server, TOKENS, [16, 17, 18])[:1], single)


def verify(backend, server, tokens, past, parents):
    """A pass that verifies: the last token and a draft whose nodes have these parents."""
    draft = Draft(tokens[1:], np.array(parents, np.int32), np.ones(len(parents)))
    depth = np.concatenate([[0], 1 + draft.depth - draft.depth.min()])
    plain = step_of(np.ones((1, len(tokens)), bool), [past], VERIFY)
    position = (past + depth).astype(np.int32)
    step = Step(0, VERIFY, plain.sequence, position, plain.valid, 0, (draft,))
    server.begin(step)
    return backend.forward(step, tokens[None], server, all_rows=True)


def test_windows_of_drafts_give_the_bits_of_plain_decoding(family):
    """A chain everywhere, a tree where all is attention; what was rejected leaves no trace."""
    backend, server = family.backend("bfloat16", "none", "row_invariant")
    tokens = TOKENS[0]
    prompt = 2  # all of it is shorter than the sliding window of 8
    single = feed(backend, server, tokens[None, :7], range(1, 8))[0]
    backend.reset(1)
    run(backend, server, tokens[None, :prompt])
    wrong = np.array([tokens[2], tokens[3], 7, 9])
    chain = verify(backend, server, wrong, prompt, [-1, 0, 1])
    assert np.array_equal(chain[:2], single[2:4])
    backend.retain(np.array([[True, True, False, False]]))
    if backend.trees:
        nodes = np.array([tokens[4], 11, tokens[5]])  # 11 and the right one are siblings
        branches = verify(backend, server, nodes, 4, [-1, -1])
        assert np.array_equal(branches[[0, 2]], single[4:6])
        backend.retain(np.array([[True, False, True]]))
    else:
        run(backend, server, tokens[None, 4:6], past=[4])
    assert np.array_equal(run(backend, server, tokens[None, 6:7], past=[6]), single[None, 6])


def test_the_law_chooses_what_the_router_chose(family):
    """Best first, with the router's weights, from the router's own logits and bias."""
    backend, server = family.backend()
    law, seen, native_routing = law_of_config(backend.model.config.to_dict()), {}, {}
    server.routing = native_routing.setdefault
    stop = backend.observe_router_logits(lambda layer, logits: seen.setdefault(layer, logits.float().numpy()))
    backend.reset(2)
    run(backend, server, TOKENS)
    stop()
    del server.routing
    biases = backend.selection_bias()
    assert len(seen) == len(native_routing) == len(expert_modules(backend.model))
    for layer, logits in seen.items():
        own = native_routing[layer]
        mine = law.apply(logits, own.experts.shape[1], biases.get(layer))
        np.testing.assert_array_equal(mine.experts, own.experts)
        np.testing.assert_allclose(mine.weights, own.weights.float().numpy(), rtol=1e-5)


def test_geometry_counts_the_model_and_its_cache(family):
    backend, server = family.backend()
    geometry = geometry_of(backend.model.config.to_dict(), family.name, quant="none")
    parameters = list(backend.model.named_parameters())
    biases = sum(p.numel() for n, p in parameters if ".experts." in n and n.endswith("bias"))
    held = geometry.dense_parameters + geometry.keys * geometry.expert_parameters
    assert held + biases == sum(p.numel() for _, p in parameters)
    assert (geometry.experts, geometry.layers) == (server.experts, len(expert_modules(backend.model)))
    assert geometry.dense_layers == backend.model.config.num_hidden_layers - geometry.layers
    assert geometry.tied == ("lm_head.weight" not in dict(parameters))
    bf16, server = family.backend("bfloat16")
    for length in (1, 5):
        run_of(bf16, server, length)
        assert bf16.kv_bytes() == length * geometry.kv_bytes_per_token + geometry.fixed_state_bytes


def run_of(backend, server, length):
    backend.reset(1)
    run(backend, server, TOKENS[:1, :length])


def test_all_but_experts_is_loaded_as_from_pretrained_does(family, tmp_path):
    """Every dense tensor and every buffer in the dtype and with the bits of transformers; experts stay on meta."""
    backend, _ = family.backend("bfloat16")
    theirs = load_model(make_checkpoint(family.name, tmp_path / "tiny", dtype="float32"), "bfloat16")
    tensors = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    ours = {**dict(backend.model.named_parameters()), **dict(backend.model.named_buffers())}
    assert ours.keys() == tensors.keys()
    for name, tensor in ours.items():
        assert tensor.is_meta == (".experts." in name)
        assert tensor.dtype == tensors[name].dtype, name
        assert tensor.is_meta or torch.equal(tensor, tensors[name]), name


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "yarn": ("qwen3_moe", {"rope_parameters": {"rope_theta": 1e6, **YARN}}),
    "yarn, mscale": ("deepseek_v3", {"rope_parameters": {"rope_theta": 1e4, **YARN, "mscale": 1.0,
                     "mscale_all_dim": 1.0}}),
    "yarn, sinks": ("gpt_oss", {"rope_parameters": {"rope_theta": 150000.0, **YARN, "truncate": False}}),
    "llama3": ("mixtral", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    "linear": ("olmoe", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "dynamic": ("qwen2_moe", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "longrope": ("phimoe", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16,
                 "long_factor": [2.0] * 16, "short_mscale": 1.2, "long_mscale": 1.2,
                 "original_max_position_embeddings": 64}}),
    "partial": ("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                "partial_rotary_factor": 0.25}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_every_scaling_of_positions_is_restored(kind, tmp_path):
    """Frequencies are in no file: those of a model whose dense weights alone are loaded are from_pretrained's."""
    name, changes = ROPES[kind]
    folder = make_checkpoint(name, tmp_path / "tiny", dtype="float32", **changes)
    theirs = load_model(folder, "float32")
    pack = make_pack(tmp_path, folder)
    backend = make_backend(pack)
    ours = dict(backend.model.named_buffers())
    plain = dict(native(name, "float32").named_buffers())
    assert kind == "dynamic" or any(ours[n].shape != plain[n].shape or (ours[n] != plain[n]).any() for n in ours)
    assert all(torch.equal(tensor, ours[n]) for n, tensor in theirs.named_buffers())
    scaling = [m.attention_scaling for m in backend.model.modules() if hasattr(m, "attention_scaling")]
    assert scaling == [m.attention_scaling for m in theirs.modules() if hasattr(m, "attention_scaling")]
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    near(feed(backend, DictServer(pack), TOKENS, [18]), expected, 5e-6)
