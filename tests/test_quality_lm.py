"""Any system under lm-eval: likelihoods are those of transformers' own forward pass and bit for bit those of decoding,
answers are those of the loop, and results come in the order of the requests.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lm_eval")

from moebench.backends.torch_model import NativeTorchBackend, TorchBackend
from moebench.commands.record import RecordingExperts
from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.harness.assets import load_live
from moebench.harness.plan import EMBEDDED, embedded_folder
from moebench.quality import local
from moebench.quality.batches import TOKENS, batches
from moebench.quality.lm import LoopLM
from moebench.quality.parity import log_softmax
from moebench.store.pages import aligned_buffer

ITEMS = [item for task in local.TASKS for item in [i for i in local.load_items("local") if i["task"] == task][:2]]
LENGTH, VOCABULARY = 2048, 384


@pytest.fixture(scope="module")
def model():
    """The embedded model, served expert by expert from a pack without loss."""
    return load_live(embedded_folder(), EMBEDDED, "none", "packed")


@pytest.fixture(scope="module")
def backend(model):
    return TorchBackend(model.pack, model.pack.dense_path, model.config)


@pytest.fixture
def loop(model, backend):
    return Loop(backend, RecordingExperts(model.pack, aligned_buffer(model.pack.slot_bytes)), 16)


def lm(loop, model, batch=4, decoded=False, length=LENGTH):
    return LoopLM(loop, model.tokenizer, model.ends, length, VOCABULARY, batch, decoded)


def ask(*args):
    return SimpleNamespace(args=args)


def texts(model, items=ITEMS):
    prompts = [model.tokenizer(item["prompt"])["input_ids"] for item in items]
    return prompts, [model.tokenizer(item["completion"])["input_ids"][:12] for item in items]


def scored(loop, prompts, continuations, decoded=False):
    """Logits by (sequence, index)."""
    found = {}
    for sequence, index, logits in loop.score(prompts, continuations, decoded):
        for at, row in zip(zip(sequence.tolist(), index.tolist(), strict=True), logits, strict=True):
            assert at not in found
            found[at] = row
    assert set(found) == {(b, i) for b, given in enumerate(continuations) for i in range(len(given))}
    return found


# --- scoring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 256])
def test_scoring_in_passes_gives_the_bits_of_decoding_token_by_token(loop, model, chunk):
    (prompt,), (continuation,) = texts(model, ITEMS[2:3])
    decoded = scored(loop, [prompt], [continuation], decoded=True)
    loop.chunk = chunk
    passes = scored(loop, [prompt], [continuation])
    assert all(np.array_equal(passes[at], row) for at, row in decoded.items())


def test_so_it_does_for_a_batch_of_texts_of_all_lengths(loop, model):
    prompts, continuations = texts(model, ITEMS[::3])
    continuations[0] = continuations[0][:1]
    decoded = scored(loop, prompts, continuations, decoded=True)
    passes = scored(loop, prompts, continuations)
    assert all(np.array_equal(passes[at], row) for at, row in decoded.items())
    moved = scored(loop, prompts, [[5, *given[1:]] for given in continuations])
    assert not np.array_equal(moved[2, 1], passes[2, 1])
    assert np.array_equal(moved[2, 0], passes[2, 0])


# --- likelihoods ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native():
    """transformers' own model and the same behind the loop, both in fp32."""
    backend = NativeTorchBackend(embedded_folder(), dtype="float32")
    return backend.model, Loop(backend, None, 32)


def forward(plain, ids):
    """fp32 log-probabilities [T, V] of one whole text by the model's own forward pass."""
    with torch.inference_mode():
        return log_softmax(plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy())


PAIRS = [(item["prompt"], item["completion"]) for item in ITEMS[::3]] + [
    ("chain: 3 + 4 ?  ", "7"), ("", "chain: 3 + 4 ?"), (ITEMS[0]["prompt"], " # 5"),
]  # fmt: skip


@pytest.mark.parametrize("decoded", [False, True])
def test_likelihoods_are_those_of_the_models_own_forward_pass_in_the_order_of_the_requests(native, model, decoded):
    plain, loop = native
    order = random.Random(1).sample(range(len(PAIRS)), len(PAIRS))
    found = lm(loop, model, decoded=decoded).loglikelihood([ask(*PAIRS[i]) for i in order], disable_tqdm=True)
    for i, (likelihood, greedy) in zip(order, found, strict=True):
        context, continuation = PAIRS[i]
        whole = model.tokenizer(context + continuation)["input_ids"]
        given = len(model.tokenizer(context.rstrip())["input_ids"]) if context else 1
        whole = whole if context else [model.tokenizer.eos_token_id, *whole]
        logs = forward(plain, whole[:-1])[given - 1 :]
        expected = logs[np.arange(len(logs)), whole[given:]]
        assert likelihood == pytest.approx(expected.sum(), abs=1e-3)
        assert greedy == bool((logs.argmax(1) == whole[given:]).all())
    assert {greedy for _, greedy in found} == {True, False}


def test_a_context_that_is_too_long_loses_its_beginning(native, model):
    plain, loop = native
    context, continuation = ITEMS[2]["prompt"], ITEMS[2]["completion"]
    ids = model.tokenizer(context + continuation)["input_ids"]
    length = len(ids) - 9
    ((likelihood, _),) = lm(loop, model, length=length).loglikelihood([ask(context, continuation)], disable_tqdm=True)
    kept = ids[-(length + 1) :]
    predicted = len(ids) - len(model.tokenizer(context)["input_ids"])
    logs = forward(plain, kept[:-1])[-predicted:]
    assert likelihood == pytest.approx(logs[np.arange(predicted), kept[-predicted:]].sum(), abs=1e-3)
    with pytest.raises(UsageError, match="does not fit this model of 3"):
        lm(loop, model, length=3).loglikelihood([ask(context, continuation)], disable_tqdm=True)


@pytest.mark.parametrize("length", [2048, 16, 7])
def test_rolling_likelihood_predicts_every_token_once_in_windows_of_the_models_length(native, model, length):
    plain, loop = native
    asked = [item["prompt"] for item in ITEMS[:3]]
    found = lm(loop, model, length=length).loglikelihood_rolling([ask(text) for text in asked])
    for text, likelihood in zip(asked, found, strict=True):
        ids, expected, at = [model.tokenizer.eos_token_id, *model.tokenizer(text)["input_ids"]], 0.0, 1
        while at < len(ids):
            window = min(length, len(ids) - at)
            start = max(0, at + window - 1 - length)  # the window reads at most `length` tokens
            logs = forward(plain, ids[start : at + window - 1])[-window:]
            expected += logs[np.arange(window), ids[at : at + window]].sum()
            at += window
        assert likelihood == pytest.approx(expected, abs=2e-3)


# --- answers -------------------------------------------------------------------------------------------------------

UNTIL = {"until": [], "max_gen_toks": 12, "do_sample": False}


def test_answers_are_those_of_the_loop_in_the_order_of_the_requests(loop, model):
    asked = [ask(item["prompt"], UNTIL) for item in ITEMS]
    found = lm(loop, model, batch=4).generate_until(asked)
    for item, answer in list(zip(ITEMS, found, strict=True))[::4]:
        prompt = model.tokenizer(item["prompt"])["input_ids"]
        out = loop.generate([prompt], 12, stop=model.ends)
        assert answer == model.tokenizer.decode(out.tokens[0], skip_special_tokens=True)


def test_an_answer_ends_before_its_first_stop_text_and_no_pass_runs_after_it(loop, model):
    prompt = ITEMS[0]["prompt"]
    (whole,) = lm(loop, model).generate_until([ask(prompt, {"max_gen_toks": 24})])
    stops = [whole[9:12], whole[5:7]]
    before = loop.steps
    (cut,) = lm(loop, model).generate_until([ask(prompt, {"until": stops, "max_gen_toks": 24})])
    assert cut == min((whole.split(stop)[0] for stop in stops), key=len)
    prefill = -(-len(model.tokenizer(prompt)["input_ids"]) // loop.chunk)
    assert loop.steps - before - prefill < 10
    (word,) = lm(loop, model).generate_until([ask(prompt, {"until": stops[0], "max_gen_toks": 24})])
    assert word == whole.split(stops[0])[0]


def test_answers_are_as_long_as_asked_and_fit_the_model(loop, model):
    prompt = ITEMS[1]["prompt"]
    tokens = len(model.tokenizer(prompt)["input_ids"])
    short, long = lm(loop, model).generate_until(
        [ask(prompt, {"max_gen_toks": 3}), ask(prompt, {"max_gen_toks": 10_000})]
    )
    assert long.startswith(short)
    assert len(model.tokenizer(short)["input_ids"]) == 3
    (tight,) = lm(loop, model, length=tokens + 5).generate_until([ask(prompt, {"max_gen_toks": 10_000})])
    assert 0 < len(model.tokenizer(tight)["input_ids"]) <= (tokens + 5) // 4


@pytest.mark.parametrize("options", [{"do_sample": True, "temperature": 0.7}, {"num_beams": 4}])
def test_sampling_is_refused(loop, model, options):
    with pytest.raises(UsageError, match="decode greedily"):
        lm(loop, model).generate_until([ask("chain: 3 ?", options)])


# --- batches -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30_000), max_size=60), st.integers(1, 25), st.sampled_from([0, 384, 150_000]))
@settings(max_examples=60)
def test_every_text_is_in_one_batch_that_its_longest_leaves_room_for(lengths, most, vocabulary):
    groups = list(batches(lengths, most, vocabulary))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) <= most
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= TOKENS
