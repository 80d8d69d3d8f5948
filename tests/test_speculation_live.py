"""Whatever is drafted, pruned, cached or evicted, the answer and every logit behind it are those of plain greedy
decoding; windows keep the stop token, the length and the memory of plain decoding.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import pytest
from engine_fixtures import Adversary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speculation_fixtures import HOST_SYNC_S, VOCABULARY, Desk, Drafting, ancestors_closed, tree

from moebench.backends import torch_model
from moebench.backends.torch_experts import BackendError
from moebench.draft import Draft, chain
from moebench.engine.loop import seeded_sampler
from moebench.errors import PluginError, UsageError
from moebench.plugins import load_plugins
from moebench.step import VERIFY
from moebench.systemspec import RunContext

PROMPTS = [[3, 14, 15, 92, 6, 5], [35, 8], [9, 79, 32, 38], [11]]
TOKENS = 12
FAMILIES = ("qwen3_moe", "olmoe", "granitemoe", "gpt_oss")


@pytest.fixture(scope="module")
def desks(tmp_path_factory):
    """A desk per family, made when first asked for."""
    changes = {"gpt_oss": {"sliding_window": 64}}
    return lru_cache(lambda name: Desk(tmp_path_factory.mktemp(name), name, **changes.get(name, {})))


@pytest.fixture(scope="module")
def plain(desks):
    """Plain greedy answers, by family and prompts."""
    return lru_cache(lambda name, count: desks(name).answer(PROMPTS[:count], TOKENS))


def check_same(out, expected, alive=None):
    """Equal tokens, and equal logits behind each of them."""
    assert out.tokens == expected.tokens
    for b, tokens in enumerate(expected.tokens):
        for i in range(len(tokens)):
            assert np.array_equal(out.logits[i][b], expected.logits[i][b])


def follow(answers, prompts, depth):
    """A guess that drafts what comes."""
    return lambda b, tokens: chain(answers[b][len(tokens) - len(prompts[b]) :][:depth])


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from(FAMILIES),
    count=st.sampled_from([1, 1, 4]),
    right=st.sampled_from([0.0, 0.4, 0.8, 1.0]),
    twins=st.booleans(),
    cut=st.booleans(),
    slots=st.sampled_from([3, 5, 9, None]),
    policy=st.sampled_from(["lru", "random", "adversary"]),
)
def test_the_answer_is_the_targets_own(desks, plain, seed, family, count, right, twins, cut, slots, policy):
    count = 1 if family == "gpt_oss" else count  # sliding windows verify one sequence at a time
    desk, expected, prompts = desks(family), plain(family, count), PROMPTS[:count]
    rng = np.random.default_rng(seed)

    def guess(b, tokens):
        if rng.random() < 0.15:
            return None
        truth = expected.tokens[b][len(tokens) - len(prompts[b]) :]
        return tree(rng, int(rng.integers(0, 9)), truth, right, twins)

    system = Drafting(guess, ancestors_closed(rng) if cut else None)
    spec = None if policy == "adversary" else load_plugins().system(policy)
    keeper = (
        Adversary(seed) if spec is None else spec.make(spec.config(), RunContext(desk.geometry, slots or 99, "shared"))
    )
    check_same(desk.answer(prompts, TOKENS, [system, keeper], slots), expected)
    for sequence, tokens in system.asked:
        whole = prompts[sequence] + expected.tokens[sequence]
        assert tokens.tolist() == whole[: len(tokens)]


def test_right_chains_save_passes_and_wrong_ones_cost_rows(desks, plain):
    desk, expected = desks("qwen3_moe"), plain("qwen3_moe", 1)
    good = Drafting(follow(expected.tokens, PROMPTS, 3))
    check_same(desk.answer(PROMPTS[:1], TOKENS, [good]), expected)
    assert [step.emits for step in good.steps if step.phase != 0] == [4, 4, 3]
    assert [step.phase for step in good.steps if step.phase != 0] == [VERIFY] * 3
    bad = Drafting(lambda b, tokens: chain([(expected.tokens[0][len(tokens) - 6] + 1) % VOCABULARY] * 3))
    check_same(desk.answer(PROMPTS[:1], TOKENS, [bad]), expected)
    emits = [step.emits for step in bad.steps if step.phase != 0]
    assert emits == [1] * (TOKENS - 1)
    assert sum(step.rows for step in bad.steps if step.phase == VERIFY) == 4 * (TOKENS - 4) + 3 + 2


def test_rows_of_a_step_say_what_they_are(desks, plain):
    desk, expected = desks("qwen3_moe"), plain("qwen3_moe", 4)
    rng = np.random.default_rng(3)

    def guess(b, tokens):
        return tree(rng, 2 + b, expected.tokens[b][len(tokens) - len(PROMPTS[b]) :], 0.7)

    system = Drafting(guess)
    desk.answer(PROMPTS, TOKENS, [system])
    verify = [step for step in system.steps if step.phase == VERIFY]
    assert len(verify) > 3
    for step in verify:
        assert step.emits == step.accepted.sum()
        assert not (step.accepted & ~step.valid).any()
        nodes = np.concatenate(step.node_rows())
        assert step.valid[nodes].all()
        for sequence, (draft, rows) in enumerate(zip(step.drafts, step.node_rows(), strict=True)):
            assert (step.sequence[rows] == sequence).all()
            assert np.array_equal(step.position[rows], step.position[rows[:1] - 1].repeat(len(draft)) + draft.depth)
            for node, row in enumerate(rows.tolist()):
                parent = draft.parents[node]
                assert not step.accepted[row] or step.accepted[rows[0] - 1 if parent < 0 else rows[parent]]


@pytest.mark.parametrize("count", [1, 4])
def test_stop_tokens_and_lengths_end_a_window_where_plain_decoding_ends(desks, plain, count):
    desk, expected, prompts = desks("qwen3_moe"), plain("qwen3_moe", count), PROMPTS[:count]
    for stop in {expected.tokens[0][5], expected.tokens[-1][8]}:
        for new_tokens in (1, 2, 9, TOKENS):
            one = desk.answer(prompts, new_tokens, stop=(stop,))
            system = Drafting(follow(expected.tokens, prompts, 6))
            check_same(desk.answer(prompts, new_tokens, [system], stop=(stop,)), one)
            decoded = sum(step.emits for step in system.steps if step.phase)
            assert decoded == sum(map(len, one.tokens)) - count


@pytest.mark.parametrize("count", [1, 4])
def test_forced_continuations_are_verified_against_themselves(desks, count):
    desk, prompts = desks("qwen3_moe"), PROMPTS[:count]
    forced = [np.random.default_rng(b).integers(0, VOCABULARY, 7 + b).tolist() for b in range(count)]
    one = desk.answer(prompts, 10, forced=forced)
    rng = np.random.default_rng(5)

    def guess(b, tokens):
        return tree(rng, 5, forced[b][len(tokens) - len(prompts[b]) :], 0.8)

    system = Drafting(guess)
    check_same(desk.answer(prompts, 10, [system], forced=forced), one)
    assert max(step.emits for step in system.steps) > count


def test_rejected_rows_leave_the_cache(desks, plain):
    desk, expected = desks("qwen3_moe"), plain("qwen3_moe", 1)
    desk.answer(PROMPTS[:1], TOKENS)
    held = desk.backend.kv_bytes()
    rng = np.random.default_rng(0)
    system = Drafting(lambda b, tokens: tree(rng, 6, expected.tokens[b][len(tokens) - 6 :], 0.5))
    desk.answer(PROMPTS[:1], TOKENS, [system])
    assert (desk.backend.kv_bytes(), desk.backend.length) == (held, len(PROMPTS[0]) + TOKENS - 1)


def test_attention_by_path_is_what_keeps_the_bits(desks, monkeypatch):
    """With a mask alone the columns between a row's own shift the sums: proves that the comparison can fail."""
    desk = desks("qwen3_moe")
    expected = desk.answer(PROMPTS, 40)
    monkeypatch.setattr(torch_model, "attention_by_path", lambda *given: nullcontext())
    different = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)

        def guess(b, tokens, rng=rng):
            return tree(rng, 6, expected.tokens[b][len(tokens) - len(PROMPTS[b]) :], 0.6)

        out = desk.answer(PROMPTS, 40, [Drafting(guess)], forced=expected.tokens)
        different += not all(np.array_equal(a, b) for a, b in zip(out.logits, expected.logits, strict=True))
    assert different


def test_sequences_that_keep_different_rows_of_chains_keep_their_bits(desks):
    desk, rng = desks("olmoe"), np.random.default_rng(1)
    expected = desk.answer(PROMPTS, 60)

    def guess(b, tokens):
        right = expected.tokens[b][len(tokens) - len(PROMPTS[b]) :][:3]
        return chain(right if rng.random() < 0.5 else [(token + 1) % VOCABULARY for token in right])

    check_same(desk.answer(PROMPTS, 60, [Drafting(guess)], forced=expected.tokens), expected)


def test_without_rollback_the_answer_would_be_wrong(desks, plain, monkeypatch):
    desk, expected = desks("qwen3_moe"), plain("qwen3_moe", 1)
    monkeypatch.setattr(type(desk.backend), "retain", lambda backend, kept: None)
    system = Drafting(lambda b, tokens: chain([1, 2, 3]))
    out = desk.answer(PROMPTS[:1], TOKENS, [system], forced=expected.tokens)
    assert any(not np.array_equal(a, b) for a, b in zip(out.logits, expected.logits, strict=True))


def test_drafting_takes_modeled_time_and_the_next_token_waits_for_it(desks):
    desk, took = desks("qwen3_moe"), []
    for syncs in (0, 5):
        system = Drafting(lambda b, tokens: None, syncs=syncs)
        desk.answer(PROMPTS[:1], TOKENS, [system])
        took.append(desk.elapsed)
    assert took[1] - took[0] == pytest.approx(5 * HOST_SYNC_S * len(system.asked))


def test_wrong_use_is_one_line(desks, plain):
    desk = desks("qwen3_moe")
    nothing = Drafting(lambda b, tokens: None)
    with pytest.raises(UsageError, match="a system that drafts decodes greedily"):
        desk.answer(PROMPTS[:1], 4, [nothing], sampler=seeded_sampler(1))
    with pytest.raises(PluginError, match="prune: a mask over 3 nodes"):
        desk.answer(PROMPTS[:1], 9, [Drafting(lambda b, tokens: chain([1, 2, 3]), lambda draft: np.ones(2, bool))])
    with pytest.raises(PluginError, match=f"draft names token {VOCABULARY}; the model has {VOCABULARY}"):
        desk.answer(PROMPTS[:1], 9, [Drafting(lambda b, tokens: chain([VOCABULARY]))])
    sliding = desks("gpt_oss")
    with pytest.raises(BackendError, match=r"at a time, as it has DynamicSlidingWindowLayer: set workload\.batch=1"):
        sliding.answer(PROMPTS[:2], 9, [Drafting(lambda b, tokens: chain([1]))])
    with pytest.raises(BackendError, match="beyond its sliding window of 64 positions"):
        sliding.answer([[1] * 60], 9, [Drafting(lambda b, tokens: chain([1, 2, 3, 4]))])


def test_a_tree_on_a_model_that_verifies_chains_is_refused(desks, monkeypatch):
    desk = desks("qwen3_moe")
    monkeypatch.setattr(type(desk.backend), "trees", False)
    with pytest.raises(UsageError, match="it verifies chains, and a tree was drafted"):
        desk.answer(PROMPTS[:1], 9, [Drafting(lambda b, tokens: Draft([1, 2], [-1, -1], [1, 1]))])
