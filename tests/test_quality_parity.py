"""Parity on held-out text: KL is what its formula says, text is met once, and what alters decoding alone is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.backends.torch_model import NativeTorchBackend, TorchBackend
from moebench.commands.compose import jobs, register_groups, resolve
from moebench.commands.record import RecordedSystem, RecordingExperts
from moebench.config import QualityConfig, RunConfig
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.harness.assets import load_live, load_tokenizer
from moebench.harness.plan import EMBEDDED, embedded_folder
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.quality import local, parity
from moebench.step import DECODE, Routing
from moebench.store.pages import aligned_buffer

VOCABULARY = 384

# --- arithmetic ----------------------------------------------------------------------------------------------------


def logs(seed, rows, vocabulary, scale=3.0):
    return parity.log_softmax(np.random.default_rng(seed).normal(size=(rows, vocabulary)).astype(np.float32) * scale)


def top(values, count):
    ids = np.argsort(-values, axis=1)[:, :count]
    return ids, np.take_along_axis(values, ids, 1)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 40), st.data())
def test_kl_is_its_formula_and_with_a_rest_a_lower_bound_that_grows_to_it(seed, rows, vocabulary, data):
    native, system = logs(seed, rows, vocabulary), logs(seed + 1, rows, vocabulary)
    whole = (np.exp(native) * (native - system)).sum(1)
    assert np.allclose(parity.kl(*top(native, vocabulary), system), whole, atol=1e-9)
    few, more = sorted(data.draw(st.lists(st.integers(1, vocabulary), min_size=2, max_size=2)))
    bounds = [parity.kl(*top(native, count), system) for count in (few, more)]
    assert (bounds[0] >= 0).all()
    assert (bounds[0] <= bounds[1] + 1e-9).all()
    assert (bounds[1] <= whole + 1e-9).all()
    assert (parity.kl(*top(native, few), native) < 1e-9).all()


@given(st.integers(0, 2**32 - 1), st.floats(-50, 50))
def test_log_probabilities_sum_to_one_and_shifts_of_all_logits_do_not_matter(seed, shift):
    logits = np.random.default_rng(seed).normal(size=(3, 9)).astype(np.float32) * 20
    found = parity.log_softmax(logits)
    assert np.allclose(np.exp(found).sum(1), 1.0)
    assert np.allclose(parity.log_softmax(logits + np.float32(shift)), found, atol=1e-4)


# --- models --------------------------------------------------------------------------------------------------------


class OtherExperts:
    """Runs other experts than the router chose, while it decodes only."""

    @hookimpl
    def route(self, step, layer, native):
        return Routing((native.experts + 1) % 32, native.weights) if step.phase == DECODE else None


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded_folder())


@pytest.fixture(scope="module")
def pairs(tokenizer):
    items = local.load_items("quick", 2)
    found = parity.encode(tokenizer, [parity.Text(item["prompt"], item["completion"]) for item in items])
    return [(given, predicted[:20]) for given, predicted in found]


@pytest.fixture(scope="module")
def native(pairs):
    return parity.predict(Loop(NativeTorchBackend(embedded_folder()), None, 64), pairs, VOCABULARY, 20)


@pytest.fixture(scope="module")
def compared(pairs, native):
    """Parity of lossless experts, of int4 experts, and of a system that alters decoding."""
    found = {}
    for name, quant, plugins in (("none", "none", []), ("int4", "int4", []), ("other", "none", [OtherExperts()])):
        model = load_live(embedded_folder(), EMBEDDED, quant, "packed")
        backend = TorchBackend(model.pack, model.pack.dense_path, model.config)
        system = RecordedSystem(name, Hooks(plugins), model.geometry)
        loop = Loop(backend, RecordingExperts(model.pack, aligned_buffer(model.pack.slot_bytes), system), 64)
        found[name] = parity.compare(loop, pairs, native, VOCABULARY, 20)
    return found


def test_every_predicted_token_is_met_once_and_the_likeliest_come_first(pairs, native):
    assert len(native.follows) == sum(len(predicted) for _, predicted in pairs)
    assert np.allclose(np.exp(native.log_probabilities.astype(float)).sum(1), 1.0, atol=1e-5)
    assert (np.diff(native.log_probabilities, axis=1) <= 0).all()
    tokens = [token for _, predicted in pairs for token in predicted]
    where = native.ids == np.array(tokens)[:, None]
    assert (where.sum(1) == 1).all()
    assert np.array_equal(native.log_probabilities[where], native.follows)


def test_more_loss_is_less_agreement_more_kl_and_more_perplexity(compared):
    none, int4, other = (compared[name] for name in ("none", "int4", "other"))
    assert none.agreement >= int4.agreement > other.agreement
    assert none.kl_median <= int4.kl_median < other.kl_median
    assert none.kl_p99 < int4.kl_p99 < other.kl_p99
    assert none.kl_p99 < 0.05
    assert int4.perplexity < other.perplexity
    assert none.perplexity == pytest.approx(none.native_perplexity, rel=0.01)
    assert {found.native_perplexity for found in compared.values()} == {none.native_perplexity}


def test_what_alters_decoding_alone_is_seen(compared):
    """In prompts nothing is altered: text that ran as a prompt would show no loss at all."""
    assert compared["other"].agreement < 0.9
    assert compared["other"].kl_median > 1e-3


def test_few_tokens_have_no_p99(native, pairs):
    short = [(given, predicted[:3]) for given, predicted in pairs]
    loop = Loop(NativeTorchBackend(embedded_folder()), None, 64)
    found = parity.compare(loop, short, parity.predict(loop, short, VOCABULARY, 20), VOCABULARY, 20)
    assert (found.tokens, found.kl_p99) == (30, None)
    assert found.agreement == 1.0


# --- text ----------------------------------------------------------------------------------------------------------


def test_text_of_a_file_plain_or_as_json_lines(tokenizer, tmp_path):
    plain = tmp_path / "text.txt"
    plain.write_text("chain: 3 + 4 ? " * 100)
    ids = tokenizer(plain.read_text())["input_ids"]
    found = parity.held_out(str(plain), [], tokenizer)
    assert [token for given, predicted in found for token in (*given, *predicted)] == ids
    assert {len(given) for given, _ in found} == {1}
    assert max(len(predicted) for _, predicted in found) == parity.WINDOW - 1
    lines = tmp_path / "text.jsonl"
    lines.write_text('{"prompt": "chain: 3 + 4 ?", "completion": " # 7"}\n')
    ((given, predicted),) = parity.held_out(str(lines), [], tokenizer)
    assert (tokenizer.decode(given), tokenizer.decode(predicted)) == ("chain: 3 + 4 ?", " # 7")
    assert parity.held_out("", [([1], [2])], tokenizer) == [([1], [2])]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.txt", None, "No such file"),
        ("empty.txt", "", "has no text to predict"),
        ("a.jsonl", '{"prompt": "x"}\n', "item 1: needs texts 'prompt' and 'completion'"),
        ("b.jsonl", "nonsense\n", "line 1: not JSON"),
        ("bytes.txt", b"\xff\xfe", "decode"),
    ],
)
def test_a_file_without_text_is_one_line(tokenizer, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=words):
        parity.held_out(str(tmp_path / name), [], tokenizer)


# --- options -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registry():
    found = load_plugins()
    register_groups(found)
    return found


def quality(registry, *words, sweep=False):
    return [resolve(job, registry).quality for job in jobs(["system=lru", *words], registry, sweep)]


def test_a_word_is_the_suite_and_its_commas_list_tasks(registry):
    assert quality(registry) == [QualityConfig()]
    assert quality(registry, "quality=local", "quality.limit=3") == [QualityConfig("local", limit=3)]
    assert quality(registry, "quality.data_dir=/d", "quality=piqa,gsm8k") == [
        QualityConfig("piqa,gsm8k", data_dir="/d")
    ]
    assert quality(registry, "quality.suite='piqa,gsm8k'") == [QualityConfig("piqa,gsm8k")]
    swept = quality(registry, "quality=none,quick", sweep=True)
    assert [config.suite for config in swept] == ["none", "quick"]
    assert quality(registry, "quality='chain,lists'", sweep=True) == [QualityConfig("chain,lists")]
    assert RunConfig("lru", "m4pro", quality="local").quality == QualityConfig("local")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quality.limits=3"], "unknown option of quality 'limits'"),
        (["quality.limit=-1"], "quality: limit must be at least 0"),
        (["quality.batch=0"], "quality: batch must be at least 1"),
        (["quality=none", "quality.limit=3"], r"quality\.limit has no effect with quality=none"),
        (["quality=none", "quality.batch=3"], r"quality\.batch has no effect with quality=none"),
        (["quality.data_dir=/d"], r"quality\.data_dir has no effect with quality=quick"),
        (["quality=local", "quality.unsafe_code=true"], r"quality\.unsafe_code has no effect with quality=local"),
        (["quality=,"], "quality= is empty"),
    ],
)
def test_options_that_cannot_be_or_change_nothing_are_one_line(registry, words, message):
    with pytest.raises(UsageError, match=message):
        quality(registry, *words)
