"""Counted acceptance: what counts as right, files that are refused, and how they are made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speculation_fixtures import tree

from moebench.cli import main
from moebench.draft import Draft, chain, lookup
from moebench.engine.speculate import right_path
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.harness.plan import embedded_folder
from moebench.systems.bigmomo.acceptance import LOOKUP, Counted, assumed, check, draft_hash_of, find, load, save
from moebench.systems.bigmomo.prepare import PrepareOptions, count, path_ranks
from moebench.systemspec import Target

GEOMETRY = Geometry("small", layers=2, experts=8, top_k=2, hidden=64, intermediate=64, other_parameters=1000)
RIGHT = np.array([[60, 30], [70, 50]])


def counted(**changes):
    """Acceptance of a model that does not exist."""
    told = {"model": "small", "weights_hash": "m", "top_k": GEOMETRY.top_k, "draft": "d", "draft_hash": "h"}
    found = {"places": 100, "right": RIGHT.astype(np.int64), "provenance": {"seed": 1}}
    return Counted(**{**told, **found, **changes})


def test_a_file_says_what_was_counted_and_is_found_by_both_hashes(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    folder = save(counted(), tmp_path / "artefacts" / "bigmomo" / "small-d")
    back = load(folder)
    assert back.by_depth(2, 1) == (0.6, 0.3)
    assert back.by_depth(1, 2) == (0.7,)
    target = Target("small", GEOMETRY, "m")
    assert find(target, "h") == folder
    check(back, target, "h")
    for other, draft in ((replace(target, weights_hash="x"), "h"), (target, "x"), (target, LOOKUP)):
        with pytest.raises(UsageError, match="moebench prepare system=bigmomo model=small"):
            find(other, draft)
        with pytest.raises(UsageError, match="count it: moebench prepare"):
            check(back, other, draft)
    with pytest.raises(UsageError, match=f"model has K {GEOMETRY.top_k}; this run's has 1"):
        check(back, replace(target, geometry=replace(GEOMETRY, top_k=1)), "h")
    with pytest.raises(UsageError, match="to depth 2 and branching 2, not to 3 and 1"):
        back.by_depth(3, 1)


@pytest.mark.parametrize(
    "right", [[[101, 3]], [[-1, -2]], [[3, 4]], [[5, 1], [4, 1]], np.zeros((0, 0), int), np.array([[0.5]])]
)
def test_counts_that_cannot_be_are_refused(right):
    with pytest.raises(UsageError, match="counts of right drafts"):
        counted(right=np.asarray(right))


def test_damage_is_one_line(tmp_path):
    folder = save(counted(), tmp_path / "a")
    file = next(folder.iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UsageError, match="not those that were written"):
        load(folder)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from([0.3, 0.9]))
def test_the_levels_that_hold_are_those_that_verification_would_accept(seed, nodes, right):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 96, 12).tolist()
    draft = tree(rng, nodes, truth, right)
    siblings = [set() for _ in range(nodes + 1)]
    for parent, token in zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True):
        if token in siblings[parent + 1]:
            return  # a draft model never proposes one token twice after the same node
        siblings[parent + 1].add(token)
    choices = np.array([truth[depth] for depth in [0, *draft.depth.tolist()]])
    assert len(path_ranks(draft, np.array(truth))) == len(right_path(draft, choices)) - 1


def test_counting_along_a_text_that_repeats():
    text = [7, 8, 9] * 6
    places, right = count(lookup, text[:4], text[4:], 2, 2)
    assert places == len(text) - 4 - 2
    assert right.tolist() == [[places] * 2] * 2
    second = Draft([5, 6], [-1, -1], [0.6, 0.4])
    _, right = count(lambda *_: second, [1], [6, 6, 6, 6], 1, 2)
    assert right.tolist() == [[0], [3]]  # right with two guesses only
    _, right = count(lambda *_: chain([6]), [1], [6, 6, 6, 6], 1, 2)
    assert right.tolist() == [[3], [3]]


def test_assumed_acceptance_rises_with_branching_and_falls_with_depth():
    one, two = assumed(3, 1, 0.0).by_depth, assumed(3, 2, 0.0).by_depth
    assert (np.diff(one) < 0).all()
    assert (np.array(two) > one).all()
    assert (one[0] + one[1]) / 2 == pytest.approx(0.69, abs=1e-3)  # what was published


def test_prepare_counts_tinymoes_own_draft(tmp_path, capsys):
    words = ["requests=3", "new_tokens=12", "depth=2", "branching=2", f"out={tmp_path}"]
    assert main(["prepare", "system=bigmomo", "model=tinymoe", *words]) == 0
    made = load(tmp_path / "tinymoe-draft")
    assert made.draft_hash == draft_hash_of(embedded_folder().parent / "draft")
    assert 0 < made.right[0, 1] <= made.right[1, 1] <= made.places
    shipped = load(find(Target("tinymoe", GEOMETRY, made.weights_hash), made.draft_hash))
    assert shipped.right.shape >= (2, 2)
    assert shipped.by_depth(1, 1)[0] > 0.8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft": "none"}, "no acceptance"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_prepare_refuses_what_cannot_be(changes, words):
    with pytest.raises(UsageError, match=words):
        PrepareOptions(**changes)
