"""Random checkpoints: whole or absent, in the layout of their format, never twice the same bytes, with the routing that
was promised.
"""

from __future__ import annotations

import errno
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench import model_card
from moebench.backends.torch_experts import expert_modules
from moebench.backends.torch_source import load_model
from moebench.checkpoint import random_write
from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.random_bits import STRETCH, TABLE, RandomBits
from moebench.checkpoint.random_config import configure
from moebench.checkpoint.random_plan import plan
from moebench.checkpoint.random_router import by_rank, chosen_by_token, router_rows, shares
from moebench.cli import main
from moebench.errors import MoebenchError, UsageError
from moebench.store.quant import from_bf16

SMALL = """
name: small
layers: 3
experts: 24
top_k: 2
hidden: 128
intermediate: 64
vocabulary: 512
other_parameters: 100000
"""
OWN = """
config: {model_type: mixtral, vocab_size: 512, hidden_size: 128, intermediate_size: 64, num_hidden_layers: 3,
  num_attention_heads: 4, num_key_value_heads: 2, num_local_experts: 24, num_experts_per_tok: 2}
"""


@pytest.fixture
def yaml(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MOEBENCH_PLUGINS", "")
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def make(yaml: Path, *words: str) -> Path:
    out = yaml.parent / f"model{len(list(yaml.parent.iterdir()))}"
    assert main(["model", "random", f"geometry={yaml}", f"out={out}", *words]) == 0
    return out


def blocks(data: np.ndarray, size: int = 4096) -> list[bytes]:
    raw = data.view(np.uint8)
    return [raw[i : i + size].tobytes() for i in range(0, len(raw) - size + 1, size)]


def test_bits_are_gaussian_in_their_frequencies_and_never_twice_the_same():
    bits, seen, total = RandomBits(3), set(), 0
    out = np.empty(STRETCH, np.uint16)
    for expert in range(8):
        bits.fill(out, "weights", f"expert{expert}", 0, 0.05)
        numbers = from_bf16(out) / np.float32(0.05)
        assert abs(numbers.mean()) < 0.01
        assert numbers.std() == pytest.approx(1, rel=0.02)
        assert (numbers**4).mean() == pytest.approx(3, rel=0.08)
        found = blocks(out)
        total += len(found)
        seen |= set(found)
    assert len(seen) == total
    assert len(np.unique(out)) > 1000


def test_stretches_are_made_alone_and_depend_on_seed_and_key():
    def made(seed: int, key: str, start: int) -> bytes:
        out = np.empty(1000, np.uint16)
        RandomBits(seed).fill(out, "weights", key, start, 1.0)
        return out.tobytes()

    assert made(1, "a", STRETCH) == made(1, "a", STRETCH)
    assert len({made(1, "a", 0), made(2, "a", 0), made(1, "b", 0), made(1, "a", STRETCH)}) == 4


def test_a_zero_point_is_exactly_eight_steps_and_codes_are_centred_on_it():
    bits, key = RandomBits(0), "x.scales"
    scales, biases, codes = (np.empty(5001, np.uint16) for _ in range(3))
    bits.fill(scales, "scales", key, 0, 0.02)
    bits.fill(biases, "biases", key, 0, 0.02)
    bits.fill(codes, "codes", "x", 0, 0.02)
    assert (from_bf16(biases) == -8 * from_bf16(scales)).all()
    assert (from_bf16(scales) > 0).all()
    assert len(np.unique(scales)) > 50
    each = np.stack([codes >> shift & 15 for shift in (0, 4, 8, 12)]).astype(float)
    assert each.mean() == pytest.approx(8, abs=0.1)
    weights = (each - 8).ravel() * np.resize(from_bf16(scales), each.size)
    assert weights.std() == pytest.approx(0.02, rel=0.15)


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 300), st.integers(1, 20))
def test_shares_of_ranks_fall_and_add_up(experts, top_k):
    if top_k >= 0.4 * experts:
        with pytest.raises(UsageError, match="router=zipf"):
            shares(experts, top_k, "zipf")
        return
    found = shares(experts, top_k, "zipf")
    assert found.sum() == pytest.approx(top_k)
    assert (np.diff(found) <= 0).all()
    assert found.max() <= 0.4


@pytest.mark.parametrize("law", ["uniform", "zipf"])
def test_a_router_serves_the_shares_it_was_made_for(law):
    share = shares(64, 6, law)
    rows, order = router_rows(share, 256, 5, 1), by_rank(64, 5, 1)
    states = np.random.default_rng(0).standard_normal((20000, 256)).astype(np.float32)
    states *= 16 / np.linalg.norm(states, axis=1, keepdims=True)
    top = np.argpartition(-(states @ rows.T), 5, axis=1)[:, :6]
    found = np.bincount(top.ravel(), minlength=64)[order] / len(states)
    assert np.abs(found - share).max() < 0.03
    assert (found[:3].mean() > 5 * found[-10:].mean()) == (law == "zipf")


def test_tokens_that_choose_by_number_choose_different_experts():
    found = chosen_by_token(500, 6, 64, 0)
    assert all(len(set(row)) == 6 for row in found.tolist())
    assert found.min() >= 0
    assert found.max() < 64
    assert len(np.unique(found)) == 64


def test_a_stand_in_runs_in_transformers_with_the_promised_routing(yaml):
    folder = make(yaml, "router=zipf", "seed=4")
    model, known = load_model(folder, "float32"), json.loads((folder / "random.json").read_text())
    assert known["stand_in"]
    chosen: list[np.ndarray] = []
    for module in expert_modules(model).values():
        module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].numpy().ravel()))
    with torch.no_grad():
        logits = model(torch.arange(500)[None]).logits
    assert torch.isfinite(logits).all()
    assert len(set(logits[0].argmax(-1).tolist())) > 100  # decoding goes on to other tokens
    assert len(chosen) == 3
    for experts, order in zip(chosen, known["experts_by_rank"], strict=True):
        found = np.bincount(experts, minlength=24)[order] / 500
        assert np.abs(found - known["share_by_rank"]).max() < 0.12
        assert found[0] > 3 * found[-6:].mean()


def test_an_own_family_has_the_hubs_keys_and_its_own_sizes(yaml):
    yaml.write_text(SMALL + OWN)
    folder = make(yaml, "layers=2", "experts=8")
    found = Checkpoint(folder)
    assert found.config["model_type"] == "mixtral"
    assert found.tensors["model.layers.1.block_sparse_moe.experts.7.w2.weight"].shape == (128, 64)
    assert not any(".layers.2." in name or "experts.8." in name for name in found.tensors)
    assert load_model(folder, "bfloat16").config.num_local_experts == 8
    experts = [found.read(f"model.layers.{n}.block_sparse_moe.experts.{e}.w1.weight") for n in (0, 1) for e in range(8)]
    assert len({block for expert in experts for block in blocks(expert.ravel())}) == 16 * 4


def test_the_same_words_give_the_same_bytes_whatever_the_shards(yaml, monkeypatch):
    one = make(yaml)
    monkeypatch.setattr(random_write, "SHARD_BYTES", 400_000)
    two, other = make(yaml), make(yaml, "seed=1")
    assert len(list(two.glob("*.safetensors"))) > 3
    first, second, third = Checkpoint(one), Checkpoint(two), Checkpoint(other)
    assert set(first.tensors) == set(second.tensors)
    assert all((first.read(name) == second.read(name)).all() for name in first.tensors)
    expert = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert (first.read(expert) != third.read(expert)).any()


def test_a_prompt_of_any_text_is_read_back_and_the_folder_runs(yaml, capsys):
    from moebench.harness.assets import load_tokenizer

    folder = make(yaml)
    tokenizer, text = load_tokenizer(folder), "Ünïcode, tabs\t and\nlines 日本"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    words = ["workload.requests=1", "workload.new_tokens=20", "quality=none", "budget=0.5", "numerics=fast"]
    capsys.readouterr()
    code = main(["run", "system=lru", "hw=m4pro", f"model={folder}", f"out={yaml.parent / 'rows'}", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["status"] == "ok"
    assert row["metrics"]["ssd_mib_per_token"]["value"] > 0


def test_int4_is_what_mlx_writes_and_is_packed_as_it_is_stored(yaml, capsys):
    folder = make(yaml, "quant=int4")
    found = Checkpoint(folder)
    assert found.config["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert found.tensors["model.layers.0.mlp.switch_mlp.gate_proj.weight"].shape == (24, 64, 16)
    hashes = []
    for quant in ("stored", "int4"):
        out = yaml.parent / quant
        assert main(["pack", f"model={folder}", f"out={out}", f"quant={quant}"]) == 0, capsys.readouterr().err
        hashes.append(json.loads(capsys.readouterr().out.splitlines()[-1])["logical_hash"])
    assert hashes[0] == hashes[1]


def test_mlx_runs_an_int4_folder(yaml):
    mlx_lm, mx = pytest.importorskip("mlx_lm"), pytest.importorskip("mlx.core")
    model, tokenizer = mlx_lm.load(str(make(yaml, "quant=int4")))
    logits = model(mx.array([tokenizer.encode("some text")]))
    assert bool(mx.isfinite(logits).all())
    assert float(mx.std(logits)) > 0.2


def test_a_size_gives_as_many_layers_as_fit(yaml):
    card = model_card.load(yaml)
    sizes = [plan(configure(card, n, 24, "none"), 2, "none", 0).nbytes for n in (1, 2, 3)]
    for number, (low, high) in enumerate(itertools.pairwise(sizes), start=1):
        folder = make(yaml, f"gib={(low + 0.9 * (high - low)) / 2**30}")
        assert Checkpoint(folder).config["num_hidden_layers"] == number
        written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert low <= written < low + 100_000


def test_no_more_than_a_stretch_is_in_memory(yaml):
    card = model_card.load(yaml)
    wide = {**configure(card, 1, 24, "none"), "vocab_size": 20000}
    planned = plan(wide, 2, "none", 0)
    maker = random_write._Maker(planned, "uniform", 0)
    embedding = next(tensor for tensor in planned.tensors if tensor.name == "model.embed_tokens.weight")
    pieces = [piece.nbytes for piece in maker.pieces(embedding)]
    assert sum(pieces) == embedding.nbytes == 20000 * 128 * 2
    assert max(pieces) <= 2 * STRETCH < TABLE * 2


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_is_cut_short_leaves_nothing(yaml, monkeypatch, capsys, fault):
    def fail(file):
        file.close()
        raise fault

    monkeypatch.setattr(random_write, "_flush", fail)
    before = sorted(yaml.parent.iterdir())
    assert main(["model", "random", f"geometry={yaml}", f"out={yaml.parent / 'cut'}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "removed" in line or "Ctrl-C" in line
    assert sorted(yaml.parent.iterdir()) == before


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(yaml, monkeypatch, capsys):
    monkeypatch.setattr(random_write, "RESERVE_BYTES", 1 << 60)
    assert main(["model", "random", f"geometry={yaml}", f"out={yaml.parent / 'm'}"]) == 2
    assert "GiB free" in capsys.readouterr().err
    assert not (yaml.parent / "m").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["layers=4"], "layers must be 1 to 3"),
        (["layers=0"], "layers must be 1 to 3"),
        (["experts=1"], "at least the 2"),
        (["experts=4", "router=zipf"], "router=zipf needs more than 5"),
        (["gib=0.0001"], "too small"),
        (["gib=nan"], "too small"),
        (["gib=9"], "more than all of small"),
        (["gib=1", "layers=1"], "give one of them"),
        (["seed=-1"], "seed must be"),
        (["quant=int8"], "none, int4"),
        (["out=/proc/nowhere/x"], "out=/proc/nowhere/x"),
    ],
)
def test_wrong_use_is_one_line(yaml, words, hint, capsys):
    out = [] if any(word.startswith("out=") for word in words) else [f"out={yaml.parent / 'm'}"]
    assert main(["model", "random", f"geometry={yaml}", *words, *out]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
    assert not (yaml.parent / "m").exists()


def test_what_stands_there_is_kept(yaml, capsys):
    folder = make(yaml)
    before = (folder / "config.json").read_bytes()
    assert main(["model", "random", f"geometry={yaml}", f"out={folder}"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (folder / "config.json").read_bytes() == before
    with pytest.raises(UsageError, match="exists already"):
        random_write.write_random(folder, None, {}, "uniform", 0, {}, print)  # type: ignore[arg-type]
    assert issubclass(UsageError, MoebenchError)


def test_the_subcommands_are_listed(capsys):
    assert main(["model", "--help"]) == 0
    assert "random" in capsys.readouterr().out
    assert main(["model", "randon"]) == 2
    assert "did you mean random" in capsys.readouterr().err
