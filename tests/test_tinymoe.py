"""tinymoe is what its papers say: provenance, sizes, disjoint items, and answers that are mostly right."""

from __future__ import annotations

import hashlib
import json
import random
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.models.tinymoe.domains import DOMAINS, generate
from moebench.quality import local
from moebench.trace.format import load

HOME = Path(str(resources.files("moebench.models.tinymoe")))
CHECKPOINT = HOME / "checkpoint"


def test_the_scripts_that_made_the_weights_are_the_ones_that_ship():
    sessions = json.loads((CHECKPOINT / "provenance.json").read_text())["sessions"]
    for name, digest in sessions[-1]["script_sha256"].items():
        assert hashlib.sha256((HOME / name).read_bytes()).hexdigest() == digest


def test_the_checkpoint_is_small():
    assert sum(p.stat().st_size for p in CHECKPOINT.iterdir()) < 32 * 2**20


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), domain=st.sampled_from(sorted(DOMAINS)), level=st.floats(0, 1))
def test_training_and_test_items_never_meet_and_answers_follow_from_the_text(seed, domain, level):
    train = generate(domain, random.Random(seed), test=False, level=level)
    test = generate(domain, random.Random(seed), test=True, level=level)
    assert not train.is_test
    assert test.is_test
    assert generate(domain, random.Random(seed), test=True, level=level) == test
    assert local.answer_of(test.completion) == test.answer


def test_shipped_items_are_test_items_full_length_and_all_different():
    items = local.load_items("local")
    prompts = [json.loads(line) for line in (HOME / "tasks" / "prompts.jsonl").read_text().splitlines()]
    assert len(items) == 500
    assert len({i["prompt"] for i in [*items, *prompts]}) == len(items) + len(prompts)
    for item in [*items, *prompts]:
        digest = hashlib.blake2b(item["prompt"].encode(), digest_size=8).digest()
        assert int.from_bytes(digest, "big") % 23 == 0


def test_plain_transformers_loads_it_and_it_answers():
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    assert model.config.model_type == "qwen3_moe"
    right = 0
    items = [i for task in local.TASKS for i in [x for x in local.load_items("local") if x["task"] == task][:6]]
    for item in items:
        ids = tokenizer(item["prompt"], return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=local.NEW_TOKENS, do_sample=False)
        text = tokenizer.decode(out[0][ids["input_ids"].shape[1] :], skip_special_tokens=True)
        right += local.answer_of(text) == item["answer"]
    assert right >= 24  # 94 % over all items; 30 here


def test_the_draft_is_small_dense_and_speaks_the_same_tokens():
    transformers = pytest.importorskip("transformers")
    draft = transformers.AutoModelForCausalLM.from_pretrained(HOME / "draft")
    assert draft.config.model_type == "qwen3"
    assert (HOME / "draft" / "model.safetensors").stat().st_size <= 3 * 2**20
    assert (HOME / "draft" / "tokenizer.json").read_bytes() == (CHECKPOINT / "tokenizer.json").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(HOME / "draft")
    item = next(i for i in local.load_items("local") if i["task"] == "chain")
    ids = tokenizer(item["prompt"] + item["completion"], return_tensors="pt")["input_ids"]
    start = len(tokenizer(item["prompt"])["input_ids"])
    right = draft(ids).logits[0, start - 1 : -1].argmax(-1) == ids[0, start:]
    assert right.float().mean() > 0.7


def test_the_recorded_trace_is_the_models_shape():
    trace = load(HOME / "traces" / "held_out.safetensors")
    assert (trace.layers, trace.expert_count, trace.top_k) == (8, 32, 4)
    assert trace.metadata["model"] == "tinymoe"
