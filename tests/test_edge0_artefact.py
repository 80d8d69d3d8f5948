"""Edge0's files: what was saved is what is loaded; damage and misfits are one line; a folder is whole or not there."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from artefact_fixtures import BASE, artefact, random_heads, random_pairs, target
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from moebench import artefact as artefact_files
from moebench.backends.base import Adapters
from moebench.errors import UsageError
from moebench.systems.edge0.artefact import LORA, PREROUTER, Artefact, Base, check, find, load, save
from moebench.systems.edge0.heads import Plan


def equal(one, two):
    """Whether two artefacts are the same, bit by bit."""
    same = (one.base, one.plan, dict(one.provenance)) == (two.base, two.plan, dict(two.provenance))
    heads = sorted(one.heads) == sorted(two.heads) and all(
        np.array_equal(matrix, two.heads[n][part]) for n, head in one.heads.items() for part, matrix in head.items()
    )
    if one.adapters is None or two.adapters is None:
        return same and heads and one.adapters is two.adapters
    ones, twos = one.adapters, two.adapters
    return same and heads and ones.scale == twos.scale and ones.pairs.keys() == twos.pairs.keys() and all(
        np.array_equal(a, b) for name in ones.pairs for a, b in zip(ones.pairs[name], twos.pairs[name], strict=True)
    )  # fmt: skip


@settings(max_examples=15)
@given(
    layers=st.integers(3, 6), experts=st.integers(2, 9), hidden=st.integers(1, 12), rank=st.integers(0, 3),
    alpha=st.floats(0.1, 64), first_token=st.sampled_from(["gate", "heads"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_round_trip(tmp_path_factory, layers, experts, hidden, rank, alpha, first_token, seed):
    base = Base("m", "h", layers, experts, hidden, experts, "int4")
    plan = Plan(layers, 1 + seed % experts, tuple(range(2, layers)), first_token)
    adapters = Adapters(alpha / rank, random_pairs(["x.y", "z"], rank, hidden)) if rank else None
    made = Artefact(base, plan, random_heads(plan.owners, base, seed), adapters, {"losses": {"tune": 0.5}})
    read = load(save(made, tmp_path_factory.mktemp("a") / "m"))
    assert read.rank == rank
    if rank:  # alpha is what the file holds
        assert read.adapters.scale == pytest.approx(made.adapters.scale, rel=1e-15)
        read = dataclasses.replace(read, adapters=Adapters(made.adapters.scale, read.adapters.pairs))
    assert equal(made, read)


def test_equal_sees_a_difference():
    assert equal(artefact(), artefact())
    assert not equal(artefact(), artefact(seed=1))
    assert not equal(artefact(), artefact(adapters=False))


def test_a_new_save_replaces_the_old_folder_and_its_files(tmp_path):
    save(artefact(), tmp_path / "a")
    save(artefact(adapters=False, seed=3), tmp_path / "a")
    assert equal(load(tmp_path / "a"), artefact(adapters=False, seed=3))
    assert [p.name for p in (tmp_path / "a").iterdir()] == [PREROUTER]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_save_that_fails_leaves_what_stood(tmp_path, monkeypatch):
    save(artefact(), tmp_path / "a")
    written = []

    def failing(tensors, metadata):
        if written:
            raise OSError("no space")
        written.append(1)
        return b"half"

    monkeypatch.setattr("safetensors.numpy.save", failing)
    with pytest.raises(OSError, match="no space"):
        save(artefact(seed=1), tmp_path / "a")
    assert written
    assert equal(load(tmp_path / "a"), artefact())
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda a: {"heads": {0: a.heads[0]}}, r"heads of layers \[0\] are not those of \[0, 1\]"),
        (lambda a: {"heads": random_heads((0, 1), dataclasses.replace(BASE, hidden=63))}, "expected float16"),
        (lambda a: {"heads": {**a.heads, 1: {k: v.astype(np.float32) for k, v in a.heads[1].items()}}}, "float32"),
        (lambda a: {"heads": {**a.heads, 1: {"fc1": a.heads[1]["fc1"]}}}, "layers.1.fc2.weight is missing"),
        (
            lambda a: {"heads": {**a.heads, 1: {**a.heads[1], "fc2": a.heads[1]["fc2"] * np.inf}}},
            "layers.1.fc2.*finite",
        ),
        (lambda a: {"plan": Plan(5, 1, (1, 2))}, "5 layers is not for a model of 4"),
        (lambda a: {"adapters": Adapters(1.0, {})}, "without matrices"),
        (lambda a: {"adapters": Adapters(1.0, {**random_pairs("x"), **random_pairs("y", rank=3)})}, "y.lora_A"),
        (lambda a: {"adapters": Adapters(1.0, {"x": (np.full((2, 4), np.nan, np.float16),) * 2})}, "x.lora_A.*finite"),
    ],
)
def test_what_is_no_artefact_cannot_be_made(change, hint):
    made = artefact()
    with np.errstate(invalid="ignore"), pytest.raises(UsageError, match=hint):
        dataclasses.replace(made, **change(made))


def rewrite(file, tensors=lambda t: t, header=lambda h: h):
    """Write a file anew with other tensors or another header, as if both had been meant."""
    new, told = tensors(load_file(file)), artefact_files.read_header(file)
    said = header({**told, "digest": artefact_files.digest(new)})
    save_file(new, file, metadata={artefact_files.HEADER: json.dumps(said)})


def flip(file, at):
    """Turn one bit of a file's numbers."""
    raw = bytearray(file.read_bytes())
    raw[-at] ^= 4
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "hint"),
    [
        (lambda f: (f / PREROUTER).unlink(), "no such file"),
        (lambda f: (f / LORA).unlink(), "no such file"),
        (lambda f: (f / PREROUTER).write_bytes(b"x" * 100), "no readable header"),
        (lambda f: (f / PREROUTER).write_bytes((f / PREROUTER).read_bytes()[:-10]), "no readable header"),
        (lambda f: save_file({"a": np.zeros(1)}, f / PREROUTER), "no readable header"),
        (lambda f: (f / LORA).write_bytes((f / PREROUTER).read_bytes()), "it is a prerouter file"),
        (lambda f: flip(f / PREROUTER, 100), "numbers are not those"),
        (lambda f: flip(f / LORA, 10), "numbers are not those"),
        (lambda f: rewrite(f / PREROUTER, header=lambda h: {**h, "schema": 2}), "schema is not 1"),
        (lambda f: rewrite(f / PREROUTER, header=lambda h: {"schema": 1}), "lacks kind"),
        (lambda f: rewrite(f / PREROUTER, header=lambda h: {**h, "top_k": 2}), "top_k differ"),
        (lambda f: rewrite(f / LORA, header=lambda h: {**h, "provenance": {}}), "provenance differ"),
        (lambda f: rewrite(f / PREROUTER, lambda t: {**t, "layers.0.fc3.weight": t["layers.0.fc1.weight"]}), "fc3"),
        (
            lambda f: rewrite(f / PREROUTER, lambda t: {k: v for k, v in t.items() if "1.fc2" not in k}),
            "1.fc2.*missing",
        ),
        (lambda f: rewrite(f / PREROUTER, lambda t: {k: v for k, v in t.items() if "rs.1." not in k}), r"layers \[0\]"),
        (lambda f: rewrite(f / LORA, lambda t: {k: v for k, v in t.items() if k != "b.lora_B"}), "not so: b.lora_B"),
        (lambda f: rewrite(f / LORA, lambda t: {**t, "odd": t["b.lora_B"]}), "not so"),
        (lambda f: [rewrite(f / n, header=lambda h: {**h, "rank": 3}) for n in (PREROUTER, LORA)], "rank 2, .* says 3"),
    ],
)
def test_damage_is_named_with_its_file_and_what_to_do(tmp_path, damage, hint):
    folder = save(artefact(), tmp_path / "a")
    damage(folder)
    with pytest.raises(UsageError, match=hint) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_the_model_it_was_made_for_is_served():
    made = artefact()
    check(made, target(), 1)
    for wrong, told in (
        ((target(weights_hash="xyz"), 1), ("abc", "xyz")),
        ((target(layers=5), 1), ("layers 4", "layers 5")),
        ((target(experts=16), 1), ("experts 8", "experts 16")),
        ((target(hidden=32), 1), ("hidden size 64", "hidden size 32")),
        ((target(), 2), ("K 1", "K 2")),
    ):
        with pytest.raises(UsageError) as caught:
            check(made, *wrong)
        assert all(text in str(caught.value) for text in told)
        assert f"moebench prepare system=edge0 model=small k={wrong[1]}" in str(caught.value)


def test_the_users_own_is_found_before_the_shipped_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(artefact_files.resources, "files", lambda package: tmp_path / "package")
    with pytest.raises(UsageError, match=r"none for this model.*moebench prepare system=edge0 model=small k=1"):
        find(target(), 1)
    shipped = save(artefact(top_k=1), tmp_path / "package" / "artefacts" / "s")
    assert find(target(), 1) == shipped
    with pytest.raises(UsageError, match=r"have K 1\).*k=2"):
        find(target(), 2)
    own = tmp_path / "home" / "artefacts" / "edge0"
    save(artefact(dataclasses.replace(BASE, weights_hash="other")), own / "a")
    save(artefact(top_k=2), own / "b")
    (own / "unrelated").mkdir()
    assert find(target(), 1) == shipped
    assert find(target(), 2) == own / "b"
    mine = save(artefact(top_k=1), own / "c")
    assert find(target(), 1) == mine
