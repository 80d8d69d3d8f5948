"""Drafts as values: their shape is checked, depth and paths follow from the parents, a kept part is a tree again; what
a look-up guesses stood in the text.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speculation_fixtures import ancestors_closed, tree

from moebench.draft import Acceptance, Draft, chain, lookup
from moebench.engine.speculate import right_path, verified
from moebench.errors import PluginError

trees = st.builds(lambda seed, n: tree(np.random.default_rng(seed), n), st.integers(0, 10**6), st.integers(0, 12))


def path_of(draft, node):
    path = []
    while node >= 0:
        path.append(node)
        node = int(draft.parents[node])
    return path


@given(trees)
def test_depth_and_ancestors_follow_the_parents(draft):
    for node in range(len(draft)):
        path = path_of(draft, node)
        assert draft.depth[node] == len(path)
        assert np.flatnonzero(draft.ancestors()[node]).tolist() == sorted(path)
    assert draft.levels == max(draft.depth.tolist(), default=0)
    assert draft.is_chain == all(len(path_of(draft, i)) == i + 1 for i in range(len(draft)))


@given(trees, st.integers(0, 10**6))
def test_a_kept_part_is_the_same_tree_without_the_rest(draft, seed):
    mask = ancestors_closed(np.random.default_rng(seed))(draft)
    part = draft.keep(mask)
    for new, old in enumerate(np.flatnonzero(mask).tolist()):
        assert draft.tokens[path_of(draft, old)].tolist() == part.tokens[path_of(part, new)].tolist()
        assert part.probability[new] == draft.probability[old]
    orphaned = mask.copy()
    parents = set(draft.parents[mask].tolist()) - {-1}
    if parents:
        orphaned[min(parents)] = False
        with pytest.raises(ValueError, match="kept without its parent"):
            draft.keep(orphaned)


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        (([1, 2], [-1], [1, 1]), "one length"),
        (([1, 2], [-1, 1], [1, 1]), "an earlier node"),
        (([1], [-2], [1]), "an earlier node"),
        (([1], [-1], [1.5]), "between 0 and 1"),
        (([1], [-1], [np.nan]), "between 0 and 1"),
    ],
)
def test_what_is_no_draft_is_refused(columns, hint):
    with pytest.raises(ValueError, match=hint):
        Draft(*columns)


@pytest.mark.parametrize("mask", [[1, 0], [True], [True, False, True], np.ones((2, 1), bool)])
def test_a_pruning_that_fits_no_tree_names_the_hook(mask):
    with pytest.raises(PluginError, match="prune: "):
        verified(chain([5, 6]), 2, lambda draft, view: mask, None)
    with pytest.raises(PluginError, match="node 1 is kept without its parent"):
        verified(chain([5, 6]), 2, lambda draft, view: np.array([False, True]), None)


def test_nodes_too_deep_are_cut_before_the_hook_is_asked():
    seen = []
    mask = verified(Draft([1, 2, 3], [-1, 0, -1], [1, 1, 1]), 1, lambda draft, view: seen.append(draft), None)
    assert mask.tolist() == [True, False, True]
    assert seen[0].tokens.tolist() == [1, 3]


@given(trees, st.integers(0, 10**6))
def test_the_right_path_is_the_longest_that_the_target_agrees_with(draft, seed):
    rng = np.random.default_rng(seed)
    draft = Draft(draft.tokens % 3, draft.parents, draft.probability)  # few tokens: twins among siblings
    choices = rng.integers(0, 3, 1 + len(draft))

    def holds(node):
        return all(choices[draft.parents[i] + 1] == draft.tokens[i] for i in path_of(draft, node))

    right = [node for node in range(len(draft)) if holds(node)]
    path = right_path(draft, choices)
    assert path[0] == 0
    assert len(path) == 1 + max((int(draft.depth[node]) for node in right), default=0)
    assert all(holds(row - 1) for row in path[1:])
    assert [draft.parents[row - 1] + 1 for row in path[1:]] == path[:-1]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_every_path_of_a_look_up_followed_an_earlier_end_of_the_text(tokens, depth, branching):
    text = np.array(tokens, np.int64)
    draft = lookup(text, depth, branching)
    runs = [
        n for n in range(1, 5) if n < len(text) and any(tokens[i : i + n] == tokens[-n:] for i in range(len(text) - n))
    ]
    assert bool(len(draft)) == bool(runs)
    if not runs:
        return
    run = tokens[-runs[-1] :]
    for node in range(len(draft)):
        path = run + draft.tokens[path_of(draft, node)[::-1]].tolist()
        assert any(tokens[i : i + len(path)] == path for i in range(len(text) - len(path) + 1))
    children = np.bincount(draft.parents + 1, draft.probability)
    assert (children <= 1 + 1e-6).all()
    assert np.bincount(draft.parents + 1).max() <= branching


def test_a_look_up_takes_the_longest_and_latest_match():
    text = np.array([7, 1, 2, 9, 8, 1, 2, 5, 1, 2], np.int64)
    assert lookup(text, 3).tokens.tolist() == [5, 1, 2]
    both = lookup(text, 1, 2)
    assert (both.tokens.tolist(), both.probability.tolist()) == ([5, 9], [0.5, 0.5])
    assert not len(lookup(np.array([1, 2, 3], np.int64), 4))


@pytest.mark.parametrize("wrong", [((), 1), ((0.5, 0.6), 1), ((1.2,), 1), ((0.5,), 0), ((0.5,), 2, "x", (1.0,))])
def test_an_acceptance_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="acceptance"):
        Acceptance(*(*wrong, "x")[: max(3, len(wrong))])


def test_an_acceptance_says_what_it_assumes():
    line = Acceptance((0.62, 0.4), 2, "counted here").assumption()
    assert line.startswith(
        "assumed: acceptance 0.62, 0.40 by depth, by rank 0.67, 0.33 (counted here); rejected drafts"
    )
