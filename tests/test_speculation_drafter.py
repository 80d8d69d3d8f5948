"""A dense model that drafts: its guesses are its own greedy ones whatever it remembers, and a whole run with it gives
the target's answers, books its memory and tells how much of its guesses held.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fixtures import make_experts
from speculation_fixtures import HYBRIDS
from torch_models import FAMILIES, native_model
from transformers import AutoModelForCausalLM

import moebench
import moebench.commands.trace
import moebench.harness.run
from moebench.backends.torch_draft import TorchDrafter
from moebench.backends.torch_experts import BackendError
from moebench.cli import main
from moebench.draft import Acceptance, lookup
from moebench.engine.loop import replay
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.hookspecs import hookimpl
from moebench.metrics import Metrics
from moebench.plugins import load_plugins
from moebench.quality import local
from moebench.step import DECODE
from moebench.systemspec import Equipment, SystemSpec
from moebench.trace.format import load

FOLDER = Path(str(resources.files("moebench.models.tinymoe"))) / "draft"
VOCABULARY = 384


@pytest.fixture(scope="module")
def drafter():
    return TorchDrafter(FOLDER, "float32", VOCABULARY)


def texts(seed, count=2):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 300, int(rng.integers(3, 30))) for _ in range(count)]


def test_a_chain_is_the_models_own_greedy_continuation(drafter):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for tokens in texts(0):
        whole = model.generate(torch.from_numpy(tokens)[None], max_new_tokens=5, do_sample=False, eos_token_id=None)
        draft = drafter.propose(tokens, 5)
        assert draft.is_chain
        assert draft.tokens.tolist() == whole[0, len(tokens) :].tolist()


def test_a_tree_holds_the_likeliest_children_of_every_node(drafter):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    (tokens,) = texts(1, 1)
    draft = drafter.propose(tokens, 3, 2)
    assert len(draft) == 2 + 4 + 8
    paths = draft.ancestors()
    for node in range(-1, len(draft)):
        children = np.flatnonzero(draft.parents == node)
        if len(children):
            path = np.append(tokens, draft.tokens[paths[node]] if node >= 0 else [])
            with torch.inference_mode():
                best = model(torch.from_numpy(path.astype(np.int64))[None]).logits[0, -1].softmax(-1).topk(2)
            assert draft.tokens[children].tolist() == best.indices.tolist()
            np.testing.assert_allclose(draft.probability[children], best.values.numpy(), rtol=1e-3)


def test_what_it_remembers_never_shows(drafter):
    rng = np.random.default_rng(2)
    drafter.reset(2)
    asked = texts(3, 3)
    for _ in range(25):
        which = int(rng.integers(3))
        depth, branching = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        fresh = TorchDrafter.__new__(TorchDrafter)
        fresh.__dict__ |= drafter.__dict__
        fresh.reset(1)
        one, two = (d.propose(asked[which], depth, branching) for d in (drafter, fresh))
        assert np.array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.probability, two.probability, atol=1e-5)
        right = int(rng.integers(0, depth + 1))  # some of the guesses hold, then another token comes
        path = [node for node in range(len(one)) if one.parents[node] == node - 1][:right]
        asked[which] = np.append(asked[which], [*one.tokens[path], int(rng.integers(3, 300))])
        assert len(drafter._texts) <= 2


def test_a_text_that_goes_on_is_not_computed_again(drafter):
    (tokens,) = texts(4, 1)
    widths = []
    drafter.reset(1)
    handle = drafter.model.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        draft = drafter.propose(tokens, 3)
        drafter.propose(np.append(tokens, draft.tokens[:2]), 3)
        drafter.propose(np.append(tokens, [*draft.tokens[:2], 5, 6]), 1)
    finally:
        handle.remove()
    assert widths == [len(tokens), 1, 1, 1, 1, 1, 2]


def test_its_sizes_and_its_vocabulary(drafter):
    model = drafter.model
    numbers = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert drafter.held_bytes == 4 * sum(numbers.values())
    assert drafter.bytes_per_level == drafter.held_bytes  # the embedding is the head, too
    assert drafter.kv_bytes_per_token == 4 * 2 * 6 * 2 * 32
    narrow = TorchDrafter(FOLDER, "float32", 40)
    assert (narrow.vocabulary, drafter.vocabulary) == (40, VOCABULARY)
    assert all(narrow.propose(tokens % 40, 4, 3).tokens.max() < 40 for tokens in texts(5, 4))


def test_a_model_that_cannot_go_back_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "lfm2_moe", HYBRIDS["lfm2_moe"])
    native_model("lfm2_moe").save_pretrained(tmp_path / "hybrid")
    with pytest.raises(BackendError, match="must be dense with full attention in every layer"):
        TorchDrafter(tmp_path / "hybrid", "float32", 96)


# --- a whole run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuessConfig:
    depth: int = 2
    branching: int = 2
    draft: str = str(FOLDER)


class Guess:
    """Drafts with the model it was given, or looks guesses up."""

    def __init__(self, config, run) -> None:
        self.config, self.run = config, run

    @hookimpl
    def draft(self, sequence, tokens, view):
        drafter = self.run.drafter
        if drafter is None:
            return lookup(tokens, self.config.depth, self.config.branching)
        view.account(nbytes=self.config.depth * drafter.bytes_per_level, syncs=self.config.depth)
        return drafter.propose(tokens, self.config.depth, self.config.branching)


def equip(config, target):
    if target.trace is not None:
        return Equipment({"draft": 10**6}, acceptance=Acceptance((0.62, 0.4), 2, "test"))
    return Equipment(draft=config.draft or None)


SPEC = SystemSpec(id="guess", title="Guess", summary="drafts", config=GuessConfig, make=Guess, equip=equip)
RUN = {"hw": "m4pro", "quality": "none", "warmup_tokens": 4, "budget": "0.4"}
LIVE = {**RUN, "model": "tinymoe", "workload.requests": 1, "workload.new_tokens": 28}
REPLAY = {**RUN, "model": "deepseek-vl2-tiny", "workload.requests": 1, "workload.prompt_tokens": 8,
          "workload.new_tokens": 40}  # fmt: skip


@pytest.fixture
def registry(monkeypatch):
    """A registry that knows the system, for runs and for the command line."""
    known = load_plugins()
    known.add("systems", "guess", SPEC, "test")
    for module in ("moebench.plugins", "moebench.harness.run", "moebench.commands.trace"):
        monkeypatch.setattr(sys.modules[module], "load_plugins", lambda: known)
    return known


def values(row):
    assert row.status == "ok"
    return {name: metric.value for name, metric in row.metrics.items()}


def test_a_run_with_a_draft_model_reports_its_rounds_and_books_it(registry):
    (plain,) = moebench.run(system="lru", **LIVE)
    tree, chain, looked = (
        values(moebench.run(system="guess", **LIVE, **{f"system.{name}": value for name, value in knobs.items()})[0])
        for knobs in ({}, {"branching": 1}, {"draft": ""})
    )
    assert tree["accepted_per_round"] >= chain["accepted_per_round"] > 1
    assert tree["verified_per_token"] > chain["verified_per_token"] >= 1
    assert plain.metrics["accepted_per_round"].reason == "nothing was drafted"
    drafter = TorchDrafter(FOLDER, "bfloat16", VOCABULARY)
    more = (chain["peak_active_gib"] - looked["peak_active_gib"]) * 2**30
    assert drafter.held_bytes + LIVE["workload.new_tokens"] * drafter.kv_bytes_per_token < more
    assert more < 1.5 * drafter.held_bytes


def test_quality_is_that_of_plain_decoding(registry, monkeypatch):
    monkeypatch.setitem(local.ITEMS, "quick", 1)
    monkeypatch.setattr(local, "NEW_TOKENS", 16)
    options = {**LIVE, "quality": "quick"}
    guess, plain = (values(moebench.run(system=name, **options)[0]) for name in ("guess", "lru"))
    for name in ("token_agreement", "quality_delta"):
        assert guess[name] == plain[name]


def test_a_replay_says_what_it_assumes(registry):
    (row,) = moebench.run(system="guess", **REPLAY)
    assert values(row)["accepted_per_round"] > 1.3
    assert (
        "assumed: acceptance 0.62, 0.40 by depth, by rank 0.67, 0.33 (test); rejected drafts route like "
        + ("neighbouring tokens")
        in row.assumptions
    )


def test_another_vocabulary_is_one_line(registry, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(FOLDER, folder)
    text = (folder / "tokenizer.json").read_text()
    config = json.loads(text)
    (one, two), *_ = zip(config["model"]["vocab"], list(config["model"]["vocab"])[1:], strict=False)
    vocab = config["model"]["vocab"]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (folder / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"has another vocabulary than .*: token .* is .* there and .* here"):
        moebench.run(system="guess", **LIVE, **{"system.draft": str(folder)})


def test_a_recorded_run_is_replayed_with_its_own_drafts(registry, tmp_path, capsys):
    words = ["trace", "record", "requests=2", "new_tokens=24"]
    assert main([*words, f"out={tmp_path / 'plain'}"]) == 0
    assert main([*words, f"out={tmp_path / 'guess'}", "system=guess"]) == 0
    plain, guess = load(tmp_path / "plain"), load(tmp_path / "guess")
    for name in ("experts", "phase", "sequence", "position", "weights"):
        assert np.array_equal(getattr(plain, name), getattr(guess, name))
    assert set(guess.channels) == {
        f"drafts.{part}" for part in ("parents", "accepted", "probability", "experts", "weights")
    }
    assert guess.channels["drafts.accepted"].any()
    metrics = Metrics(0, lambda: (0, 0))
    shape = dict(layers=guess.layers, experts=guess.expert_count, top_k=guess.top_k)
    geometry = Geometry("small", **shape, hidden=64, intermediate=64, other_parameters=1000)
    replay(guess, make_experts([Guess(None, None), metrics], geometry.keys, geometry=geometry))
    accepted = guess.channels["drafts.accepted"].sum()
    decoded = int((guess.phase == DECODE).sum())
    assert metrics.numbers()["accepted_per_round"][0] == decoded / (decoded - accepted)
    capsys.readouterr()
