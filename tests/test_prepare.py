"""``moebench prepare``: an interrupted fit ends with the bytes of an uninterrupted one; what cannot be is one line."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from artefact_fixtures import examples_file, model_folder, random_heads
from safetensors.torch import save_file

from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_threads import torch_threads
from moebench.checkpoint.open import open_source
from moebench.cli import main
from moebench.commands import prepare as command
from moebench.errors import UsageError
from moebench.plugins import load_plugins
from moebench.systems.edge0 import training
from moebench.systems.edge0.artefact import find, load
from moebench.systems.edge0.prepare import PREPARATION, PrepareOptions, fit
from moebench.systemspec import SystemSpec, Target

SHORT = {"steps_distil": 2, "steps_tune": 2, "steps_onpolicy": 2, "threads": 1, "rank": 2, "quant": "int8"}
SMALL = functools.partial(training.Recipe, examples=4, new_tokens=6)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(folder of a small random model, options of a short training on short sums)."""
    folder = tmp_path_factory.mktemp("m")
    return model_folder(folder / "small", num_experts_per_tok=4), PrepareOptions(
        data=str(examples_file(folder / "sums.jsonl")), **SHORT
    )


@pytest.fixture(autouse=True)
def few_examples(monkeypatch):
    """Small batches, so that a training takes a moment."""
    monkeypatch.setattr(training, "Recipe", SMALL)


class Stop:
    """A progress callback that interrupts after some steps."""

    def __init__(self, after):
        self.after, self.told = after, []

    def __call__(self, text, done, total):
        self.told.append((text, done, total))
        if len(self.told) == self.after:
            raise KeyboardInterrupt


def numbers(folder):
    """All matrices of an artefact by name, and its provenance without what differs from run to run."""
    made = load(folder)
    matrices = {f"{n}.{part}": m for n, head in made.heads.items() for part, m in head.items()}
    matrices |= {f"{name}.{i}": m for name, pair in made.adapters.pairs.items() for i, m in enumerate(pair)}
    return matrices, {k: v for k, v in made.provenance.items() if k != "seconds"}


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """The artefact of one uninterrupted training, and what was reported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Recipe", SMALL)
        told = Stop(0)
        return fit(small[1], small[0], "small", tmp_path_factory.mktemp("out"), told), told.told


def test_a_fit_reports_each_step_and_leaves_only_the_artefact(whole):
    folder, told = whole
    assert folder.name == "small-k2"
    assert [p.name for p in folder.parent.iterdir()] == ["small-k2"]
    assert [done for _, done, _ in told] == [1, 2, 3, 4, 5, 6]
    assert {total for *_, total in told} == {6}
    assert [text.split()[0] for text, *_ in told] == ["distil"] * 2 + ["tune"] * 2 + ["onpolicy"] * 2
    made = load(folder)
    assert made.plan.consumers == (1, 2)
    assert (made.rank, made.adapters.scale, made.base.quant) == (2, 16.0, "int8")
    assert set(made.provenance["losses"]) == {"distil", "tune", "onpolicy"}
    assert made.provenance["tokens"] > 0
    assert made.provenance["data"] == "sums.jsonl"
    assert "model.layers.3.self_attn.o_proj" in made.adapters.pairs


def test_every_phase_moves_what_it_should(small, whole, tmp_path):
    folder, options = small
    without = dataclasses.replace(options, steps_distil=0, steps_tune=0, steps_onpolicy=0)
    start, _ = numbers(fit(without, folder, "small", tmp_path / "start", lambda *a: None))
    heads_only, _ = numbers(
        fit(dataclasses.replace(without, steps_distil=2), folder, "small", tmp_path / "d", lambda *a: None)
    )
    end, _ = numbers(whole[0])
    for name, matrix in start.items():
        is_head = name[0].isdigit()
        assert np.array_equal(matrix, heads_only[name]) == (not is_head), name
        assert not np.array_equal(end[name], heads_only[name]), name


@pytest.mark.parametrize("after", [1, 2, 4, 5, 6])
def test_an_interrupted_fit_goes_on_to_the_same_bytes(small, whole, tmp_path, after):
    folder, options = small
    with pytest.raises(KeyboardInterrupt, match=r"goes on from .*small-k2\.training"):
        fit(options, folder, "small", tmp_path, Stop(after))
    assert [p.name for p in tmp_path.iterdir()] == ["small-k2.training"]
    torch.manual_seed(99)  # whatever happened in between
    rest = Stop(0)
    made = fit(options, folder, "small", tmp_path, rest)
    assert rest.told == whole[1][after:]
    matrices, provenance = numbers(made)
    expected, expected_provenance = numbers(whole[0])
    assert provenance == expected_provenance
    assert matrices.keys() == expected.keys()
    assert all(np.array_equal(matrix, expected[name]) for name, matrix in matrices.items())


def test_a_ctrl_c_within_a_step_loses_that_step_alone(small, whole, tmp_path, monkeypatch):
    folder, options = small
    calls, original = [], training.tune_loss

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:  # the second half of the second batch
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(training, "tune_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(options, folder, "small", tmp_path, lambda *a: None)
    rest = Stop(0)
    made = fit(options, folder, "small", tmp_path, rest)
    assert rest.told == whole[1][3:]
    assert all(np.array_equal(m, numbers(whole[0])[0][name]) for name, m in numbers(made)[0].items())


def test_other_options_do_not_go_on_from_a_state(small, tmp_path):
    folder, options = small
    with pytest.raises(KeyboardInterrupt):
        fit(options, folder, "small", tmp_path, Stop(1))
    state = tmp_path / "small-k2.training"
    before = state.read_bytes()
    with pytest.raises(UsageError, match=r"began with seed=0, not 1; go on with that, or remove the file"):
        fit(dataclasses.replace(options, seed=1), folder, "small", tmp_path, lambda *a: None)
    assert state.read_bytes() == before
    state.write_bytes(before[:100])
    with pytest.raises(UsageError, match=r"unreadable.*remove it to start anew"):
        fit(options, folder, "small", tmp_path, lambda *a: None)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"k": 5}, r"k=5 is not within 1\.\.4"),
        ({"first": 3}, "first=3 must be at most 2 with last_layer=gate"),
        ({"first": 4, "last_layer": "head"}, "first=4 must be at most 3"),
        ({"data": ""}, "only tinymoe has examples of its own"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl"),
    ],
)
def test_a_fit_that_cannot_be_is_one_line_before_it_starts(small, tmp_path, changes, hint):
    with pytest.raises(UsageError, match=hint):
        fit(dataclasses.replace(small[1], **changes), small[0], "small", tmp_path, lambda *a: None)
    assert not list(tmp_path.iterdir())


def test_options_change_the_plan(small, tmp_path):
    made = load(
        fit(
            dataclasses.replace(
                small[1], k=3, first=2, last_layer="head", first_token="heads", steps_tune=0, steps_onpolicy=0
            ),
            small[0], "small", tmp_path, lambda *a: None,
        )
    )  # fmt: skip
    assert (made.plan.top_k, made.plan.consumers, made.plan.first_token) == (3, (2, 3), "heads")


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch, tmp_path):
    """A system ``fake`` that prepares with Edge0's functions and one ``plain`` that prepares nothing."""
    registry = load_plugins()
    registry.systems.pop("fake", None)
    common = {"title": "t", "summary": "s", "make": lambda config, run: object()}
    registry.add("systems", "fake", SystemSpec(id="fake", prepare=PREPARATION, **common), "tests")
    bare = dataclasses.replace(PREPARATION, convert=None)
    registry.add("systems", "fitted", SystemSpec(id="fitted", prepare=bare, **common), "tests")
    monkeypatch.setattr(command, "load_plugins", lambda: registry)
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    return registry


def words(small, **changes):
    options = {**SHORT, "data": small[1].data, "model": str(small[0]), **changes}
    return ["prepare", "system=fake", *(f"{key}={value}" for key, value in options.items())]


def test_the_command_writes_where_the_system_looks(registered, small, tmp_path, capsys):
    assert main(words(small)) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    made = tmp_path / "home" / "artefacts" / "fake" / "small-k2"
    assert (document["artefact"], document["system"], document["model"]) == (str(made), "fake", "small")
    assert document["bytes"] == sum(f.stat().st_size for f in made.iterdir())
    found = load(made)
    made.parent.rename(made.parent.with_name("edge0"))
    source = open_source(small[0])
    target = Target("small", geometry_of(source.model["config"], "small"), source.model["weights_hash"])
    assert find(target, 2) == made.parent.with_name("edge0") / "small-k2"
    assert found.base.weights_hash == target.weights_hash


def test_ctrl_c_says_how_to_go_on_and_the_same_words_do(registered, small, tmp_path, capsys, monkeypatch):
    bars = []

    class Bar:
        def __enter__(self):
            bars.append(self)
            return self

        def __exit__(self, *error):
            return None

        def add_task(self, *arguments, **options):
            return 0

        def update(self, task, **state):
            if len(bars) == 1 and state["completed"] == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(command, "progress_bar", Bar)
    out = tmp_path / "mine"
    assert main(words(small, out=out)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"stopped by Ctrl-C; the same command goes on from {out / 'small-k2.training'}" in line
    assert main(words(small, out=out)) == 0
    assert [p.name for p in out.iterdir()] == ["small-k2"]


def test_import_is_a_word(registered, small, tmp_path, capsys):
    heads = {f"layers.0.{part}.weight": torch.tensor(m) for part, m in random_heads((0,))[0].items()}
    (tmp_path / "published").mkdir()
    save_file(heads, tmp_path / "published" / "prerouter.safetensors", metadata={"K": "2"})
    given = ["prepare", "system=fake", f"model={small[0]}", f"import={tmp_path / 'published'}"]
    assert main([*given, f"out={tmp_path / 'out'}"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert load(tmp_path / "out" / "small-k2").provenance["imported"]["file"] == "prerouter.safetensors"
    assert document["artefact"] == str(tmp_path / "out" / "small-k2")
    assert main([*given, "steps_tune=5"]) == 2
    assert "steps_tune would change nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ([], "prepare needs system=..."),
        (["system=lru"], "system lru needs no preparation; those that have one:"),
        (["system=fak"], "did you mean fake?"),
        (["system=fake", "kk=1"], "prepare system=fake has no option 'kk' (did you mean k?); valid: k, first"),
        (["system=fake", "threads=0"], "threads must be at least 1"),
        (["system=fake", "alpha=0"], "alpha must be a positive number"),
        (["system=fake", "quant=int3"], "int4, int8, none"),
        (["system=fake", "model=nowhere"], "model=nowhere is no model folder with config.json: it does not exist"),
        (["system=fake", "import=nowhere"], "import=nowhere is not a folder"),
        (["system=fitted", "import=."], "system fitted imports nothing"),
        (["system=fake", "k=9"], "k=9 is not within 1..4, the experts that tinymoe runs itself"),
    ],
)
def test_wrong_use_is_one_line(registered, given, hint, capsys):
    assert main(["prepare", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_help_adds_the_options_of_a_named_system(registered, capsys):
    assert main(["prepare", "--help"]) == 0
    plain = capsys.readouterr().out
    assert "import=text" in plain
    assert "fake" in plain
    assert "steps_tune" not in plain
    assert main(["prepare", "system=fake", "--help"]) == 0
    assert capsys.readouterr().out.count("steps_tune=a whole number") == 1


def test_threads_are_put_back():
    before = torch.get_num_threads()

    def fail():
        with torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.get_num_threads() == before
