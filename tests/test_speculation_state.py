"""Every prefix of a window that can be accepted leaves the model as a fresh run over it would: attention of all kinds,
and layers with recurrent or convolution state, whose cache cannot be cropped.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_models
from speculation_fixtures import HYBRIDS, VOCABULARY, tree
from torch_models import DictServer, make_backend, make_pack, native_model, run

from moebench.backends.torch_experts import BackendError
from moebench.draft import Draft, chain
from moebench.step import VERIFY, Step

TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (1, 24))
PROMPT, TOLERANCE = 9, 2e-5
ROUTED_IN_FP32 = ("bailing_hybrid", "deepseek_v3")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(backend, server) by family and dtype, on torch's plain kernels; tiny hybrids are added to the families."""
    torch_models.FAMILIES.update(HYBRIDS)
    made = {}

    def make(family, dtype):
        if (family, dtype) not in made:
            pack = make_pack(tmp_path_factory.mktemp(family), native_model(family), dtype=dtype)
            probed = dtype == "bfloat16" and family not in ROUTED_IN_FP32
            backend = make_backend(pack, dtype=dtype, numerics="row_invariant" if probed else "fast")
            backend.numerics = "row_invariant"  # torch's plain kernels for all; those in fp32 are not row-invariant
            made[family, dtype] = backend, DictServer(pack)
        return made[family, dtype]

    yield make
    for family in HYBRIDS:
        del torch_models.FAMILIES[family]


def verify(backend, server, last, draft, past):
    """Logits [1 + n, V] of a window of one sequence."""
    n = len(draft)
    position = past + np.append(0, draft.depth)
    step = Step(0, VERIFY, np.zeros(n + 1, np.int32), position.astype(np.int32), np.ones(n + 1, bool), 0, (draft,))
    server.begin(step)
    return backend.forward(step, np.append(last, draft.tokens)[None], server, all_rows=True)


def plain(backend, server, tokens):
    """Logits [T - PROMPT + 1, V] after the prompt and after each further token, one by one."""
    backend.reset(1)
    rows = [run(backend, server, tokens[:, :PROMPT])]
    rows += [run(backend, server, tokens[:, i : i + 1], past=[i]) for i in range(PROMPT, tokens.shape[1])]
    return np.concatenate(rows)


def close(one, two, dtype):
    """Bit for bit in bf16, whose plain kernels are row-invariant; within rounding in fp32, whose are not."""
    return np.array_equal(one, two) if dtype == "bfloat16" else np.abs(one - two).max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", [*HYBRIDS, "qwen3_moe", "deepseek_v3"])
def test_every_accepted_prefix_equals_a_fresh_run(models, family, dtype):
    backend, server = models(family, dtype)
    assert backend.trees == (family not in HYBRIDS)
    fresh = plain(backend, server, TOKENS)
    held = {}
    for width in (2, 3, 6):
        for accepted in range(1, width + 1):
            window = TOKENS[0, PROMPT : PROMPT + width].copy()
            window[accepted:] = (window[accepted:] + 7) % VOCABULARY
            backend.reset(1)
            run(backend, server, TOKENS[:, :PROMPT])
            logits = verify(backend, server, window[0], chain(window[1:]), PROMPT)
            assert close(logits[:accepted], fresh[1 : 1 + accepted], dtype)
            backend.retain(np.arange(width)[None] < accepted)
            assert held.setdefault(accepted, backend.kv_bytes()) == backend.kv_bytes()
            for at in range(PROMPT + accepted, PROMPT + accepted + 3):
                assert close(
                    run(backend, server, TOKENS[:, at : at + 1], past=[at]), fresh[at - PROMPT + 1][None], dtype
                )


@pytest.mark.parametrize("family", ["qwen3_next", "bailing_hybrid"])
def test_a_plain_crop_would_be_silently_wrong(models, family):
    """What transformers' own crop leaves after two rejected tokens, against the states that were kept."""
    backend, server = models(family, "float32")
    fresh = plain(backend, server, TOKENS)
    window = TOKENS[0, PROMPT : PROMPT + 4].copy()
    window[2:] = (window[2:] + 7) % VOCABULARY
    backend.reset(1)
    backend.cache.activate_past_recording()
    run(backend, server, TOKENS[:, :PROMPT])
    run(backend, server, window[None], past=[PROMPT], all_rows=True)
    backend.cache.crop(-2)
    backend._seen = backend._seen[:, :-2]
    cropped = run(backend, server, TOKENS[:, PROMPT + 2 : PROMPT + 3], past=[PROMPT + 2])
    assert np.abs(cropped - fresh[3]).max() > 100 * TOLERANCE
    backend.reset(1)
    run(backend, server, TOKENS[:, :PROMPT])
    verify(backend, server, window[0], chain(window[1:]), PROMPT)
    backend.retain(np.array([[True, True, False, False]]))
    kept = run(backend, server, TOKENS[:, PROMPT + 2 : PROMPT + 3], past=[PROMPT + 2])
    assert np.abs(kept - fresh[3]).max() < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("numerics", ["row_invariant", "fast"])
def test_every_path_of_a_tree_equals_a_fresh_run(tmp_path, family, numerics):
    changes = {"sliding_window": 64} if family == "gpt_oss" else {}
    pack = make_pack(tmp_path, native_model(family, **changes))
    server = DictServer(pack)
    for attention in ("eager", "sdpa") if numerics == "fast" and family != "gpt_oss" else ("eager",):
        backend = make_backend(pack, attention=attention)
        backend.numerics = numerics
        for seed in range(3):
            draft = tree(np.random.default_rng(seed), 7)
            for node in (3, 6):
                path = np.flatnonzero(draft.ancestors()[node])
                text = np.concatenate([TOKENS[0, : PROMPT + 1], draft.tokens[path], TOKENS[0, -2:]])[None]
                fresh = plain(backend, server, text)
                backend.reset(1)
                run(backend, server, TOKENS[:, :PROMPT])
                logits = verify(backend, server, TOKENS[0, PROMPT], draft, PROMPT)
                np.testing.assert_allclose(logits[np.append(0, 1 + path)], fresh[1 : 2 + len(path)], atol=TOLERANCE)
                kept = np.zeros((1, 8), bool)
                kept[0, np.append(0, 1 + path)] = True
                backend.retain(kept)
                assert backend.length == PROMPT + 1 + len(path)
                at = PROMPT + 1 + len(path)
                after = run(backend, server, text[:, at : at + 1], past=[at])
                np.testing.assert_allclose(after[0], fresh[2 + len(path)], atol=TOLERANCE)


def test_a_sibling_seen_by_mistake_would_show(models):
    """A causal mask over a tree, as if it were a chain, gives other logits for the second branch."""
    backend, server = models("qwen3_moe", "float32")
    draft = Draft([5, 6], [-1, -1], [1, 1])
    results = []
    for shown in (draft, chain([5, 6])):
        backend.reset(1)
        run(backend, server, TOKENS[:, :PROMPT])
        results.append(verify(backend, server, TOKENS[0, PROMPT], shown, PROMPT))
        backend.retain(np.array([[True, False, False]]))
    assert np.abs(results[0][2] - results[1][2]).max() > 100 * TOLERANCE


def test_states_are_kept_for_a_window_only(models):
    backend, server = models("qwen3_next", "float32")
    backend.reset(1)
    run(backend, server, TOKENS[:, :PROMPT])
    verify(backend, server, TOKENS[0, PROMPT], chain(TOKENS[0, PROMPT + 1 : PROMPT + 4]), PROMPT)
    backend.retain(np.ones((1, 4), bool))
    assert backend._memory._states is None
    whole = run(backend, server, TOKENS[:, PROMPT + 4 : PROMPT + 8], past=[PROMPT + 4])
    assert backend._memory._states is None
    assert np.abs(whole - plain(backend, server, TOKENS[:, : PROMPT + 8])[-1]).max() < TOLERANCE


def test_batches_on_layers_with_state_are_refused(models):
    backend, server = models("lfm2_moe", "float32")
    backend.reset(2)
    run(backend, server, TOKENS[:, :4].repeat(2, 0))
    step = Step(0, VERIFY, np.repeat(np.arange(2, dtype=np.int32), 2), np.array([4, 5] * 2, np.int32),
                np.ones(4, bool), 0, (chain([1]), chain([2])))  # fmt: skip
    server.begin(step)
    with pytest.raises(BackendError, match=r"at a time, as it has LinearAttentionLayer: set workload\.batch=1"):
        backend.forward(step, np.ones((2, 2), np.int64), server)
    assert torch.is_inference_mode_enabled() is False
