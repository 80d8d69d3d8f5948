"""Adapters are distilled without touching the model and start as the replayed router; published ones come whole."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from artefact_fixtures import examples_file, model_folder
from safetensors.torch import save_file

from moebench.artefact import read_header, sha256
from moebench.backends.torch_source import folder_hash
from moebench.cli import main
from moebench.errors import UsageError
from moebench.systems.specprefetch.adapters import Shape
from moebench.systems.specprefetch.artefact import load
from moebench.systems.specprefetch.importer import convert
from moebench.systems.specprefetch.prepare import SCRIPTS, PrepareOptions, fit
from moebench.systems.specprefetch.training import Adapters, Teacher, items


def silent(text, done, total):
    """No progress is shown."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return examples_file(tmp_path_factory.mktemp("data") / "sums.jsonl")


@pytest.fixture(scope="module")
def teacher(folder):
    return Teacher(folder)


def batch(data, folder, count=12):
    """Items as token ids."""
    draw, _ = items(str(data), folder)
    rng = random.Random(0)
    return [draw(rng) for _ in range(count)]


@pytest.mark.parametrize("kind", ["pairs", "shared"])
@pytest.mark.parametrize("base", ["next_gate", "none"])
def test_the_loss_falls_on_a_fixed_batch_and_the_model_stays_as_it_is(teacher, folder, data, kind, base):
    """S5, S7."""
    before = {name: p.clone() for name, p in teacher.model.named_parameters()}
    torch.manual_seed(0)
    student = Adapters(Shape(teacher.layers, teacher.experts, teacher.hidden, 4, 2, kind, base), teacher.gates)
    x = teacher.features(batch(data, folder))
    optimizer, losses = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.0), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = student.loss(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(losses))
    for name, parameter in teacher.model.named_parameters():
        assert parameter.grad is None
        assert not parameter.requires_grad
        assert torch.equal(parameter, before[name])
    assert teacher.gates.grad is None


def test_at_the_start_a_prediction_is_the_replayed_router(teacher, folder, data):
    """S4, and the loss of a prediction that is the truth is zero."""
    x = teacher.features(batch(data, folder))
    gate = Adapters(Shape(teacher.layers, teacher.experts, teacher.hidden, 4, 2), teacher.gates)
    none = Adapters(Shape(teacher.layers, teacher.experts, teacher.hidden, 4, 2, base="none"), teacher.gates)
    for said, (layer, lag) in zip(gate(x), gate.shape.pairs, strict=True):
        assert torch.equal(said, x[layer] @ teacher.gates[layer + lag].T)
    assert not none(x).any()
    same = x[:1].expand_as(x)
    alike = Adapters(gate.shape, teacher.gates)
    assert alike.loss(same).item() == pytest.approx(0.0, abs=1e-6)
    assert gate.loss(x).item() > 1e-4


def test_features_are_what_routers_see_at_the_answers_tokens(teacher, folder, data):
    """Batched and padded as one by one; the end token is answered by nothing."""
    some = batch(data, folder, 3)
    together = teacher.features(some)
    alone = torch.cat([teacher.features([item]) for item in some], dim=1)
    assert together.shape == (teacher.layers, sum(len(c) for _, c in some) - 3, teacher.hidden)
    assert torch.allclose(together, alone, atol=1e-5)


def test_prepare_writes_an_artefact_that_says_how_it_was_made(folder, data, tmp_path, capsys):
    words = [f"model={folder}", f"out={tmp_path}", f"data={data}", "steps=6", "examples=4", "threads=1", "rank=3"]
    assert main(["prepare", "system=specprefetch", *words]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    made = load(Path(document["artefact"]))
    assert made.weights_hash == folder_hash(folder)
    assert (made.shape.rank, made.shape.horizon, made.top_k) == (3, 2, 2)
    told = made.provenance
    assert told["data"] == {"file": "sums.jsonl", "sha256": sha256(data)}
    assert set(told["scripts"]) == set(SCRIPTS)
    assert any(b.any() for _, b in made.adapters.values())
    again = load(
        fit(
            PrepareOptions(data=str(data), steps=6, examples=4, threads=1, rank=3),
            folder,
            "small",
            tmp_path / "b",
            silent,
        )
    )
    assert all(
        np.array_equal(x, y) for n in made.adapters for x, y in zip(made.adapters[n], again.adapters[n], strict=True)
    )
    with pytest.raises(UsageError, match="only tinymoe has items"):
        fit(PrepareOptions(steps=1), folder, "small", tmp_path, silent)


@pytest.mark.parametrize(("shape", "millions"), [
    (Shape(48, 128, 2048, 64, 2), 12.95), (Shape(48, 128, 2048, 32, 2), 6.476),
    (Shape(11, 64, 1280, 64, 2), 1.634), (Shape(11, 64, 1280, 32, 2), 0.817),
])  # fmt: skip
def test_parameters_are_those_that_were_published(shape, millions):
    """S9: pairs * r * (D + n), for Qwen3-VL-30B-A3B and DeepSeek-VL2-Tiny at ranks 64 and 32 with two horizons."""
    assert shape.parameters == len(shape.pairs) * shape.rank * (shape.hidden + shape.experts)
    assert shape.parameters / 1e6 == pytest.approx(millions, rel=1e-3)
    assert Shape(shape.layers, 128, 2048, 64, 2, "shared").parameters == 2 * 64 * (2048 + 128)


def published(
    folder, layers=4, horizons=(1, 2), rank=3, hidden=64, experts=8, prefix="", drop=(), dtype=torch.bfloat16
):
    """A folder as SpecPrefetch's code writes it, with other tensors beside; returns the matrices by key."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{prefix}next1_head.weight": torch.zeros(3, 3, dtype=torch.int32)}
    for h in horizons:
        for layer in range(layers - h):
            for side, shape in (("A", (rank, hidden)), ("B", (experts, rank))):
                tensors[f"{prefix}lora_{side}.layer{layer}_h{h}"] = torch.randn(shape, generator=generator).bfloat16()
    tensors = {key: tensor for key, tensor in tensors.items() if key not in drop}
    save_file(tensors, str(folder / "model.safetensors"))
    return tensors


@pytest.mark.parametrize(("prefix", "horizons"), [("", (1, 2)), ("model.", (1,))])
def test_published_adapters_are_taken_whole(folder, tmp_path, prefix, horizons, capsys):
    given = published(tmp_path / "hf", prefix=prefix, horizons=horizons)
    words = [f"model={folder}", f"out={tmp_path}", f"import={tmp_path / 'hf'}"]
    assert main(["prepare", "system=specprefetch", *words]) == 0
    made = load(Path(json.loads(capsys.readouterr().out.strip().splitlines()[-1])["artefact"]))
    assert made.shape == Shape(4, 8, 64, 3, len(horizons))
    for layer, lag in made.shape.pairs:
        for side, matrix in zip("AB", made.adapters[f"layers.{layer}.h{lag}"], strict=True):
            assert np.array_equal(matrix, given[f"{prefix}lora_{side}.layer{layer}_h{lag}"].to(torch.float16).numpy())
    teacher = Teacher(folder)
    assert all(np.array_equal(g, own) for g, own in zip(made.gates, teacher.gate_arrays(), strict=True))
    assert list(made.provenance["imported"]) == ["model.safetensors"]


@pytest.mark.parametrize(("changes", "words"), [
    ({"layers": 5}, "predicts layer 4 of small"), ({"hidden": 32}, r"does not fit small: layers\.0\.h1\.A"),
    ({"experts": 16}, r"layers\.0\.h1\.B"), ({"drop": ("lora_B.layer1_h1",)}, "lacks its A or its B"),
    ({"drop": ("lora_A.layer1_h1", "lora_B.layer1_h1")}, r"lacks the adapters layers\.1\.h1"),
    ({"dtype": torch.int32}, "is torch.int32, not one of"), ({"horizons": ()}, "holds no adapters"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(folder, tmp_path, changes, words):
    if changes.get("dtype") == torch.int32:
        source = tmp_path / "hf"
        source.mkdir()
        save_file({"lora_A.layer0_h1": torch.zeros(3, 64, dtype=torch.int32)}, str(source / "model.safetensors"))
    else:
        published(tmp_path / "hf", **changes)
    with pytest.raises(UsageError, match=words) as error:
        convert(PrepareOptions(), tmp_path / "hf", folder, "small", tmp_path)
    assert "\n" not in str(error.value)


def test_an_import_refuses_what_it_would_not_use(folder, tmp_path):
    published(tmp_path / "hf")
    with pytest.raises(UsageError, match="import takes base, horizon; steps would change nothing"):
        convert(PrepareOptions(steps=5), tmp_path / "hf", folder, "small", tmp_path)
    made = load(convert(PrepareOptions(horizon=1, base="none"), tmp_path / "hf", folder, "small", tmp_path))
    assert (made.shape.horizon, made.shape.base) == (1, "none")


def test_the_shipped_artefacts_are_for_the_shipped_model():
    from moebench.harness.plan import embedded_folder
    from moebench.systems import specprefetch

    own = folder_hash(embedded_folder())
    headers = [
        read_header(f) for f in (Path(specprefetch.__file__).parent / "artefacts").glob("*/adapters.safetensors")
    ]
    variants = {(h["shape"]["kind"], h["shape"]["base"]) for h in headers}
    assert variants == {(kind, base) for kind in ("pairs", "shared") for base in ("next_gate", "none")}
    for header in headers:
        assert header["weights_hash"] == own
        assert "training items" in header["provenance"]["data"]
        assert header["provenance"]["kl"]["last"] < header["provenance"]["kl"]["first"]
