"""Published heads and adapters, in both spellings, become the artefact they describe; what does not fit is one line."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from artefact_fixtures import model_folder, random_heads, random_pairs
from safetensors.torch import save_file

from moebench.errors import UsageError
from moebench.systems.edge0.artefact import load
from moebench.systems.edge0.prepare import PREPARATION, PrepareOptions

Q = "model.layers.{}.self_attn.q_proj"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Qwen3-MoE of 4 MoE layers, 8 experts, top 4, hidden 64."""
    return model_folder(tmp_path_factory.mktemp("m") / "small", num_experts_per_tok=4)


@pytest.fixture(scope="module")
def dense_first(tmp_path_factory):
    """A DeepSeek-V3 whose first of 5 layers is dense: 4 MoE layers, top 2 of 8, hidden 64."""
    return model_folder(tmp_path_factory.mktemp("m") / "dense_first", "deepseek_v3", num_hidden_layers=5)


def tensors_of(heads, layout="layers.{}.{}.weight", shift=0, dtype=torch.float16):
    """Published tensors of heads."""
    return {
        layout.format(n + shift, part): torch.tensor(matrix).to(dtype)
        for n, head in heads.items() for part, matrix in head.items()
    }  # fmt: skip


def sides_of(pairs, prefix=""):
    """Published tensors of adapters."""
    return {f"{prefix}{name}.lora_{s}": torch.tensor(pair["AB".index(s)]) for name, pair in pairs.items() for s in "AB"}


def publish(folder, prerouter, told=None, lora=None, lora_told=None):
    """A folder as others publish it."""
    folder.mkdir(exist_ok=True)
    save_file(prerouter, folder / "prerouter_x.safetensors", metadata=told)
    if lora is not None:
        save_file(lora, folder / "lora_x.safetensors", metadata=lora_told)
    return folder


def take(source, model, out, **options):
    """Import and read back."""
    return load(PREPARATION.convert(PrepareOptions(**options), source, model, model.name, out))


def same(head, other):
    return all(np.array_equal(matrix, other[part]) for part, matrix in head.items())


@pytest.mark.parametrize("layout", ["layers.{}.{}.weight", "layers.{}.mlp.prerouter.{}.weight"])
@pytest.mark.parametrize("owners", ["0,1", "[1, 0]", None])
def test_both_spellings_become_the_same_artefact(small, tmp_path, layout, owners):
    heads, pairs = random_heads((0, 1)), random_pairs([Q.format(0), "model.layers.3.self_attn.q_proj"])
    told = {
        "model": "x-35b",
        "K": "2",
        "source": "somewhere",
        "source_md5": "0",
        **({"owners": owners} if owners else {}),
    }
    lora = sides_of(pairs, "language_model.")
    source = publish(tmp_path / "p", tensors_of(heads, layout), told, lora, {"r": "2", "alpha": "6", "K": "2"})
    made = take(source, small, tmp_path / "out", first_token="heads")
    assert (made.plan.top_k, made.plan.consumers, made.plan.first_token) == (2, (1, 2), "heads")
    assert all(same(heads[n], made.heads[n]) for n in heads)
    assert made.adapters.scale == 3.0
    assert all(np.array_equal(x, y) for n in pairs for x, y in zip(pairs[n], made.adapters.pairs[n], strict=True))
    assert (made.base.layers, made.base.experts, made.base.hidden, made.base.native_top_k) == (4, 8, 64, 4)
    digest = hashlib.md5((source / "prerouter_x.safetensors").read_bytes()).hexdigest()
    assert made.provenance["imported"]["md5"] == digest
    assert made.provenance["imported"]["said"]["source"] == "somewhere"


def test_layers_are_counted_without_the_first_dense_ones(dense_first, tmp_path):
    heads = random_heads((0, 1))
    made = take(publish(tmp_path / "p", tensors_of(heads, shift=1), {"K": "2"}), dense_first, tmp_path / "out")
    assert made.plan.consumers == (1, 2)
    assert same(made.heads[1], heads[1])
    assert made.adapters is None
    with pytest.raises(UsageError, match=r"layer 0 cannot own a head: owners lie within 1\.\.3"):
        take(publish(tmp_path / "q", tensors_of(heads), {"K": "2"}), dense_first, tmp_path / "out")


def test_the_last_layers_head_is_taken_only_when_asked_for(small, tmp_path):
    source = publish(tmp_path / "p", tensors_of(random_heads((1, 2))), {"K": "2"})
    assert take(source, small, tmp_path / "out").plan.owners == (1,)
    assert take(source, small, tmp_path / "out", last_layer="head").plan.owners == (1, 2)
    alone = publish(tmp_path / "q", tensors_of(random_heads((2,))), {"K": "2"})
    with pytest.raises(UsageError, match="last_layer=head"):
        take(alone, small, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_precisions_become_fp16(small, tmp_path, dtype):
    heads = random_heads((0,))
    made = take(publish(tmp_path / "p", tensors_of(heads, dtype=dtype), {"K": "1"}), small, tmp_path / "out")
    for part, matrix in heads[0].items():
        expected = torch.tensor(matrix).to(dtype).to(torch.float16).numpy()
        assert np.array_equal(made.heads[0][part], expected)


def test_what_a_file_does_not_say_an_option_says(small, tmp_path):
    pairs = random_pairs([Q.format(0)], rank=4)
    source = publish(tmp_path / "p", tensors_of(random_heads((0,))), None, sides_of(pairs))
    made = take(source, small, tmp_path / "out", k=3, alpha=8.0)
    assert (made.plan.top_k, made.rank, made.adapters.scale) == (3, 4, 2.0)


def bad_head(part="fc1", change=lambda t: t, key="layers.0.{}.weight"):
    tensors = tensors_of(random_heads((0,)))
    tensors[key.format(part)] = change(tensors.pop(f"layers.0.{part}.weight"))
    return tensors


GOOD, PAIR = tensors_of(random_heads((0,))), sides_of(random_pairs([Q.format(0)]))


@pytest.mark.parametrize(
    ("prerouter", "told", "options", "hint"),
    [
        (GOOD, None, {}, "does not say its K; give k=N"),
        (GOOD, {"K": "2"}, {"k": 1}, "is for K 2, not for k=1"),
        (GOOD, {"K": "two"}, {}, "'two' is not a number"),
        (GOOD, {"K": "5"}, {}, r"k=5 is not within 1\.\.4"),
        (GOOD, {"K": "2", "owners": "0,1"}, {}, r"owners \[0, 1\], its tensors \[0\]"),
        (GOOD, {"K": "2", "owners": "all"}, {}, "'all' are no list"),
        (GOOD, {"K": "2"}, {"seed": 1}, "seed would change nothing"),
        (GOOD, {"K": "2"}, {"alpha": 4.0}, "alpha=4 scales adapters"),
        ({"a": torch.zeros(2)}, {"K": "2"}, {}, "a is no tensor of a head"),
        (bad_head(key="layers.7.{}.weight"), {"K": "2"}, {}, r"layer 7 cannot own a head: owners lie within 0\.\.2"),
        (bad_head(key="layers.1.{}.weight"), {"K": "2"}, {}, "fc1.weight is missing"),
        (bad_head(change=lambda t: t[:, 1:].contiguous()), {"K": "2"}, {}, r"fc1.*expected float16 \(512, 80\)"),
        (bad_head(change=lambda t: t.float() * 1e6), {"K": "2"}, {}, "numbers that fp16 cannot"),
        (bad_head(change=lambda t: t.double()), {"K": "2"}, {}, "not one of fp16, bf16, fp32"),
        (
            {**GOOD, "layers.0.mlp.prerouter.fc1.weight": torch.zeros(2)},
            {"K": "2"},
            {},
            "fc1 of layer 0 .* twice",
        ),
    ],
)
def test_heads_that_do_not_fit_are_one_line(small, tmp_path, prerouter, told, options, hint):
    source = publish(tmp_path / "p", prerouter, told)
    with pytest.raises(UsageError, match=hint) as caught:
        take(source, small, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lora", "told", "options", "hint"),
    [
        (PAIR, {"K": "1"}, {}, "is for K 1, not for k=2"),
        (PAIR, {"r": "16"}, {}, "is for r 16"),
        (PAIR, {"alpha": "16"}, {"alpha": 8.0}, "says alpha 16, not alpha=8"),
        (PAIR, {"alpha": "-1"}, {}, "not a positive number"),
        (
            sides_of(random_pairs(["model.layers.0.mlp.gate"])),
            None,
            {},
            "no dense projection .*, as are model",
        ),
        (sides_of(random_pairs(["lm_head"])), None, {}, "lm_head is no dense projection"),
        (sides_of(random_pairs([Q.format(0)], hidden=32)), None, {}, r"A \(2, 32\).*maps 64 to 64"),
        (PAIR | sides_of(random_pairs([Q.format(1)], rank=3)), None, {}, r"ranks \[2, 3\]"),
        (PAIR | sides_of(random_pairs([Q.format(0)]), "x."), None, {}, "is there twice"),
        ({f"{Q.format(0)}.lora_A": torch.zeros(2, 64)}, None, {}, "NAME.lora_A with NAME.lora_B"),
    ],
)
def test_adapters_that_do_not_fit_are_one_line(small, tmp_path, lora, told, options, hint):
    source = publish(tmp_path / "p", GOOD, {"K": "2"}, lora, told)
    with pytest.raises(UsageError, match=hint) as caught:
        take(source, small, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_must_hold_one_file_of_heads(small, tmp_path):
    (tmp_path / "p").mkdir()
    with pytest.raises(UsageError, match=r"holds no prerouter"):
        take(tmp_path / "p", small, tmp_path / "out")
    source = publish(tmp_path / "p", GOOD, {"K": "2"})
    (source / "prerouter_k4.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"leave one"):
        take(source, small, tmp_path / "out")
    (source / "prerouter_x.safetensors").unlink()
    with pytest.raises(UsageError, match=r"prerouter_k4.safetensors is unreadable"):
        take(source, small, tmp_path / "out")
