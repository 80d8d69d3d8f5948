"""Each routing law equals a slow reference written out row by row, with ties, k = E and all groups kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.routing import LAWS, RoutingError, RoutingLaw, law_of_config


def best(values, k):
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def softmax(values):
    top = max(values)
    parts = [math.exp(v - top) for v in values]
    return [p / sum(parts) for p in parts]


def mixed(row, k, jitter):
    """SparseMixer: each best expert's share among those left that are near it."""
    ids, weights = [], []
    for i in best(row, k):
        ids.append(i)
        top = row[i]
        left = [
            j
            for j in range(len(row))
            if j not in ids[:-1] and not (top != row[j] and (top - row[j]) > 2 * jitter * max(abs(row[j]), top))
        ]
        total = sum(math.exp(row[j] - top) for j in left)
        weights.append(1 / total)
    return ids, weights


def reference(law, row, k, bias):
    """One row of one law in plain Python: (ids, weights)."""
    if law.name == "topk_softmax":
        ids = best(row, k)
        return ids, softmax([row[i] for i in ids])
    if law.name == "sparsemixer":
        return mixed(row, k, law.jitter)
    soft = law.name == "softmax_topk"
    scores = softmax(row) if soft else [1 / (1 + math.exp(-v)) for v in row]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size, counted = len(row) // law.n_group, 1 if soft else 2
    groups = [sum(sorted(choice[g * size : (g + 1) * size])[-counted:]) for g in range(law.n_group)]
    kept = best(groups, law.topk_group)
    ids = [i for i in best(choice, len(row)) if i // size in kept][:k]
    weights = [scores[i] for i in ids]
    if law.renormalise:
        weights = [w / sum(weights) for w in weights]
    return ids, [w * law.scale for w in weights]


# Quarters, so that ties are frequent and every comparison is exact in fp32 and fp64 alike.
quarters = st.integers(-12, 12).map(lambda v: v / 4)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(LAWS))
    scored = name in ("softmax_topk", "sigmoid_group")
    groups = draw(st.integers(1, 3)) if scored else 1
    experts = groups * draw(st.integers(2, 5))
    kept = draw(st.integers(1, groups))
    k = draw(st.integers(1, kept * (experts // groups)))
    law = RoutingLaw(
        name,
        renormalise=name == "topk_softmax" or (scored and draw(st.booleans())),
        n_group=groups,
        topk_group=kept,
        scale=draw(st.sampled_from([1.0, 2.5])) if scored else 1.0,
        jitter=0.125 if name == "sparsemixer" else 0.0,
    )
    rows = draw(st.lists(st.lists(quarters, min_size=experts, max_size=experts), min_size=1, max_size=3))
    return law, rows, k


@settings(max_examples=150, deadline=None)
@given(cases())
def test_laws_match_the_reference(case):
    law, rows, k = case
    bias = np.zeros(len(rows[0]), np.float32) if law.scores else None
    routing = law.apply(np.array(rows, np.float32), k, bias)
    assert routing.experts.shape == routing.weights.shape == (len(rows), k)
    assert routing.weights.dtype == np.float32
    for row, ids, weights in zip(rows, routing.experts.tolist(), routing.weights, strict=True):
        expected_ids, expected = reference(law, row, k, [0.0] * len(row))
        if law.n_group == 1:
            assert ids == expected_ids
        else:  # sums of two sigmoids may round differently in fp32: compare the chosen scores, not tied ids
            assert len(set(ids)) == k
        np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_group_limit_and_bias():
    """Group 1 holds the best expert but group 0 the best pair; a bias moves selection and leaves weights alone."""
    logits = np.array([[2.0, 2.0, 3.0, -9.0]], np.float32)
    law = RoutingLaw("sigmoid_group", renormalise=False, n_group=2, topk_group=1)
    assert law.apply(logits, 2).experts.tolist() == [[0, 1]]
    assert RoutingLaw("sigmoid_group", n_group=2, topk_group=2).apply(logits, 2).experts.tolist() == [[2, 0]]
    biased = law.apply(logits, 2, np.array([0, 0, 0, 5], np.float32))
    assert biased.experts.tolist() == [[3, 2]]
    np.testing.assert_allclose(biased.weights, 1 / (1 + np.exp([[9.0, -3.0]])), rtol=1e-6)


def test_all_groups_kept_is_no_limit():
    logits = np.random.default_rng(0).normal(size=(20, 12)).astype(np.float32)
    bias = np.random.default_rng(1).normal(size=12).astype(np.float32)
    limited = RoutingLaw("sigmoid_group", n_group=3, topk_group=3).apply(logits, 5, bias)
    free = RoutingLaw("sigmoid_group").apply(logits, 5, bias)
    assert (limited.experts == free.experts).all()
    assert (limited.weights == free.weights).all()


def test_every_expert_chosen_in_index_order_when_all_tie():
    for law in (RoutingLaw("softmax_topk"), RoutingLaw("topk_softmax"), RoutingLaw("sigmoid_group")):
        routing = law.apply(np.zeros((2, 6), np.float32), 6)
        assert routing.experts.tolist() == [list(range(6))] * 2
        np.testing.assert_allclose(routing.weights, 1 / 6, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"name": "top1"}, "valid: softmax_topk, topk_softmax, sigmoid_group, sparsemixer"),
        ({"name": "topk_softmax", "scale": 2.0}, "belong to softmax_topk and sigmoid_group"),
        ({"name": "softmax_topk", "jitter": 0.1}, "jitter belongs to sparsemixer"),
        ({"name": "sparsemixer"}, "renormalise must be off"),
        ({"name": "topk_softmax", "renormalise": False}, "cannot be off"),
        ({"name": "sigmoid_group", "n_group": 2, "topk_group": 3}, "topk_group 3"),
    ],
)
def test_wrong_laws_are_refused(arguments, part):
    with pytest.raises(RoutingError, match=part):
        RoutingLaw(**arguments)


def test_wrong_use_is_refused():
    logits = np.zeros((1, 6), np.float32)
    with pytest.raises(RoutingError, match="top-k 7"):
        RoutingLaw("softmax_topk").apply(logits, 7)
    with pytest.raises(RoutingError, match="takes no bias"):
        RoutingLaw("topk_softmax").apply(logits, 2, np.zeros(6, np.float32))
    with pytest.raises(RoutingError, match="do not form 4 groups"):
        RoutingLaw("sigmoid_group", n_group=4).apply(logits, 2)
    with pytest.raises(RoutingError, match="exceeds the experts of 1 groups"):
        RoutingLaw("sigmoid_group", n_group=3).apply(logits, 3)
    with pytest.raises(RoutingError, match=r"known: qwen2_moe, .*phimoe"):
        law_of_config({"model_type": "llama"})
