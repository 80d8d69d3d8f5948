"""A dense feed-forward layer split into a shared part and experts: what is exact, and what each step is worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from smollm2_fixtures import SHAPE, make_dense, make_ids

from moebench.errors import UsageError
from moebench.models.smollm2_moe import split as splitting
from moebench.models.smollm2_moe.clusters import balanced, borrowed, profiles, shared_neurons
from moebench.models.smollm2_moe.split import expert_norms, fill, inner, route, split_layer, split_model
from moebench.models.smollm2_moe.student import Shape, SplitFeedForward, copy_of, install


@pytest.fixture
def layer():
    return make_dense().model.layers[1].mlp


def inputs(rows: int, seed: int = 0) -> torch.Tensor:
    """Rows [N, H] around a few directions, so that neurons have something to fire together on."""
    rng = torch.Generator().manual_seed(seed)
    topics = torch.randn(6, SHAPE.hidden, generator=torch.Generator().manual_seed(99))
    return topics[torch.randint(6, (rows,), generator=rng)] + 0.5 * torch.randn(rows, SHAPE.hidden, generator=rng)


@torch.inference_mode()
def parts_of(layer, x, shape=SHAPE):
    """A filled, unfitted layer with its members."""
    shared, members = splitting.partition((inner(layer, x).abs()).numpy(), shape, 0)
    chosen = np.random.default_rng(0).random((len(x), shape.experts)) < 0.5
    squares = (inner(layer, x) ** 2).numpy()
    squares[:, shared] = 0
    extra = borrowed(squares, members, chosen, shape.width - shape.own)
    split = SplitFeedForward(shape)
    fill(split, layer, shared, members, extra)
    return split, shared, members, extra


@torch.inference_mode()
def test_with_all_experts_the_parts_sum_to_the_dense_layer(layer):
    every = Shape(**{**vars(SHAPE), "top_k": SHAPE.experts})
    x = inputs(200)
    split, *_ = parts_of(layer, x, every)
    split.down.data[:, every.shared :] *= every.experts  # an untrained router gives each expert 1/E
    torch.testing.assert_close(split(x), layer(x), rtol=1e-4, atol=1e-4)
    split.gate.data[every.shared] += 1  # a neuron of the first expert
    assert not torch.allclose(split(x), layer(x), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_copies_are_of_other_experts_and_of_no_shared_neuron(layer):
    _, shared, members, extra = parts_of(layer, inputs(300))
    for own, copies in zip(members, extra, strict=True):
        assert len(set(copies.tolist())) == SHAPE.width - SHAPE.own
        assert not set(copies.tolist()) & (set(own.tolist()) | set(shared.tolist()))


@given(groups=st.integers(1, 9), size=st.integers(1, 9), seed=st.integers(0, 5), flat=st.booleans())
@settings(max_examples=40, deadline=None)
def test_clusters_are_a_balanced_partition_of_any_points(groups, size, seed, flat):
    points = np.random.default_rng(seed).normal(size=(groups * size, 5)).astype(np.float32) * (not flat)
    found = balanced(points, groups, seed)
    assert found.shape == (groups, size)
    assert np.array_equal(np.sort(found.ravel()), np.arange(groups * size))


def test_neurons_that_fire_together_share_a_cluster():
    rng = np.random.default_rng(1)
    group = rng.permutation(np.repeat(np.arange(4), 10))
    fires = rng.random((500, 4)) < 0.3
    contribution = (fires[:, group] * rng.uniform(0.5, 2, 40) + 0.05 * rng.random((500, 40))).astype(np.float32)
    for members in balanced(profiles(contribution), 4, 0):
        assert len(set(group[members])) == 1


def test_shared_neurons_give_most():
    energy = np.array([3.0, 9, 1, 7, 8])
    assert shared_neurons(energy, 2).tolist() == [1, 4]


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="7 neurons do not form 2"):
        balanced(np.zeros((7, 2), np.float32), 2, 0)


@torch.inference_mode()
def test_a_regressed_router_finds_more_than_a_random_one(layer):
    x, new = inputs(600), inputs(300, seed=1)
    _, _, members, _ = parts_of(layer, x)
    squares = [expert_norms(layer, inner(layer, rows), members) ** 2 for rows in (x, new)]

    def captured(router: torch.Tensor) -> float:
        split = SplitFeedForward(SHAPE)
        split.router.data = router
        return float((squares[1] * (split.weights(new) > 0)).sum() / squares[1].sum())

    rng = torch.Generator().manual_seed(0)
    chance = [captured(torch.randn(SHAPE.experts, SHAPE.hidden, generator=rng)) for _ in range(10)]
    assert captured(route(squares[0], x)) > max(chance) + 0.05


@torch.inference_mode()
def test_norms_are_those_of_the_experts_outputs(layer):
    x = inputs(20)
    _, _, members, _ = parts_of(layer, x)
    norms = expert_norms(layer, inner(layer, x), members)
    one = inner(layer, x)[:, members[2]] @ layer.down_proj.weight[:, members[2]].T
    torch.testing.assert_close(norms[:, 2], one.norm(dim=-1), rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_the_refit_helps_on_inputs_it_has_not_seen(layer):
    x, new = inputs(3000), inputs(500, seed=1)
    split, given_there, report = split_layer(layer, x, layer(x), 0.0, SHAPE, 0, 0)
    torch.testing.assert_close(given_there, split(x), rtol=1e-3, atol=1e-3)
    assert 0 < report.error < report.unfitted
    assert report.captured <= report.best <= 1
    error = float((split(new) - layer(new)).square().sum() / layer(new).square().sum())
    assert error < 0.8 * report.unfitted


def test_a_layer_that_makes_up_for_those_before_it_ends_nearer_to_the_dense_model():
    tiny_dense, tiny_ids = make_dense(), make_ids()

    def distance(pull: float) -> float:
        layers, _ = split_model(tiny_dense, tiny_ids, SHAPE, 0, lambda done, of: None, pull)
        made = install(copy_of(tiny_dense), layers)
        with torch.inference_mode():
            ids = torch.from_numpy(tiny_ids)
            return float((made.model(ids)[0] - tiny_dense.model(ids)[0]).square().mean())

    assert distance(1.0) < distance(0.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top_k": 9}, "top_k=9"),
        ({"experts": 7}, "192 neurons do not form 7"),
        ({"width": 16}, "do not fit a width of 16"),
        ({"shared": 0}, "256 neurons do not form"),
    ],
)
def test_a_split_that_cannot_be_is_refused(change, says):
    with pytest.raises(UsageError, match=says):
        Shape(**{**vars(SHAPE), **change})
