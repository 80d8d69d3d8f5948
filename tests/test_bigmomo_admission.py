"""What a window admits: node values and node pruning, expert pruning and where dropped weights go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.draft import Draft, chain
from moebench.systems.bigmomo.admission import kept_nodes, node_values, pruned_experts


@st.composite
def drafts(draw, most=12):
    n = draw(st.integers(1, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(n)]
    probability = draw(st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 1.0]), min_size=n, max_size=n))
    return Draft(np.arange(n), parents, probability)


acceptances = st.lists(st.floats(0, 1), min_size=12, max_size=12).map(lambda shares: sorted(shares, reverse=True))


@given(drafts(), acceptances)
def test_values_lie_within_0_and_1_and_never_rise_along_a_path(draft, by_depth):
    values = node_values(draft, by_depth)
    assert ((values >= 0) & (values <= 1)).all()
    inner = draft.parents >= 0
    assert (values[inner] <= values[draft.parents[inner]]).all()


def test_the_value_of_a_node_is_acceptance_at_its_depth_times_the_probabilities_on_its_path():
    draft = Draft([5, 6, 7], [-1, 0, 0], [0.5, 0.5, 0.25])
    assert node_values(draft, [0.8, 0.6]).tolist() == pytest.approx([0.4, 0.15, 0.075])


@given(drafts(), acceptances, st.floats(0.01, 1))
def test_the_kept_nodes_are_ancestor_closed_hold_rho_of_the_value_and_are_the_fewest(draft, by_depth, rho):
    values = node_values(draft, by_depth)
    kept = kept_nodes(values, rho)
    draft.keep(kept)  # raises where a node stands without its parent
    assert values[kept].sum() >= rho * values.sum() - 1e-12
    if rho < 1 and kept.any():
        fewer = np.sort(values)[::-1][: kept.sum() - 1].sum()
        assert fewer < rho * values.sum() + 1e-12
        assert values[kept].min() >= values[~kept].max(initial=0)


@given(drafts(), acceptances)
def test_rho_1_keeps_all_even_what_has_no_value(draft, by_depth):
    assert kept_nodes(node_values(draft, by_depth), 1.0).all()


def test_less_rho_keeps_fewer_nodes():
    values = node_values(chain([1, 2, 3, 4]), [0.8, 0.6, 0.4, 0.2])
    assert [int(kept_nodes(values, rho).sum()) for rho in (0.3, 0.6, 0.8, 0.95, 1.0)] == [1, 2, 3, 4, 4]
    assert not kept_nodes(np.zeros(3), 0.5).any()


@st.composite
def windows(draw):
    """Experts, scores, values and costs of one layer's window; some experts are resident."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, k, many = draw(st.integers(1, 7)), draw(st.integers(1, 4)), 9
    experts = np.stack([rng.choice(many, k, replace=False) for _ in range(rows)])
    scores = rng.dirichlet(np.ones(k), rows).astype(np.float32)
    if draw(st.booleans()):
        scores = np.round(scores, 1)  # ties
    values = rng.random(rows) * rng.integers(0, 2, rows) if draw(st.booleans()) else rng.random(rows)
    cost = np.where(rng.random(len(np.unique(experts))) < 0.3, 0.0, rng.random() + 0.1)
    return experts, scores, values, cost


def lost(experts, scores, values, dropped):
    """Impact of dropping experts one after another, by hand."""
    alive, total = np.ones(experts.shape, bool), 0.0
    for expert in dropped:
        for row in np.flatnonzero((alive & (experts == expert)).any(1)):
            own = scores[row, experts[row] == expert][0]
            others = scores[row, alive[row] & (experts[row] != expert)]
            total += values[row] * np.abs(others - own).min()
        alive &= experts != expert
    return total


@given(windows(), st.floats(0.01, 0.99))
def test_pruning_stays_within_tau_and_leaves_every_row_an_expert_and_its_weight(window, tau):
    experts, scores, values, cost = window
    found = pruned_experts(experts, scores, values, cost, tau)
    assert found.impact <= tau + 1e-9
    total = sum(lost(experts, scores, values, [e]) for e in np.unique(experts) if experts.shape[1] > 1)
    assert lost(experts, scores, values, found.dropped) == pytest.approx(found.impact * total, abs=1e-6)
    assert (found.experts >= 0).any(1).all()
    assert np.allclose(found.weights.sum(1), scores.sum(1), atol=1e-6)
    gone = np.isin(experts, found.dropped)
    assert ((found.experts == -1) == gone).all()
    assert (found.weights[gone] == 0).all()
    assert (found.experts[~gone] == experts[~gone]).all()
    resident = np.unique(experts)[cost == 0]
    assert not np.isin(found.dropped, resident).any()


@given(windows())
def test_tau_0_drops_only_what_changes_nothing(window):
    experts, scores, values, cost = window
    found = pruned_experts(experts, scores, values, cost, 0.0)
    assert lost(experts, scores, values, found.dropped) == pytest.approx(0, abs=1e-12)


def test_more_tau_drops_more():
    rng = np.random.default_rng(3)
    experts = np.stack([rng.choice(32, 4, replace=False) for _ in range(7)])
    scores, values = rng.dirichlet(np.ones(4), 7), rng.random(7)
    cost = np.full(len(np.unique(experts)), 1e-3)
    counts = [len(pruned_experts(experts, scores, values, cost, tau).dropped) for tau in (0.01, 0.05, 0.2, 0.5, 0.9)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_of_two_experts_of_one_impact_the_one_that_is_dear_to_move_goes_first():
    experts = np.array([[0, 1, 2], [0, 3, 2]])  # 1 and 3 mean the same to rows of one value
    scores, values = np.array([[0.6, 0.3, 0.1]] * 2), np.ones(2)
    for cheap, dear in ((1, 3), (3, 1)):
        cost = np.full(4, 1e3)
        cost[[0, 2]] = 1e-9  # nobody would save anything there
        cost[cheap] = 1.0
        assert pruned_experts(experts, scores, values, cost, 0.5).dropped[0] == dear


def test_a_dropped_weight_goes_to_the_nearest_score():
    found = pruned_experts(np.array([[4, 5, 6]]), np.array([[0.5, 0.3, 0.2]]), np.ones(1), np.array([0, 0, 1.0]), 0.5)
    assert found.experts.tolist() == [[4, 5, -1]]
    assert found.weights[0].tolist() == pytest.approx([0.5, 0.5, 0])
