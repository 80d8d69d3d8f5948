"""What the nets learn from: Belady's next-use distances, the features that the policy sees, requests held out."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import make_trace
from flashmoe_fixtures import random_nets, with_requests
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.residency.replay import events
from moebench.systems.flashmoe.labels import demands, features, next_use, samples
from moebench.systems.flashmoe.policy import Learned

USES = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=12)


@settings(max_examples=60)
@given(used=USES, horizon=st.integers(2, 9))
def test_a_label_is_the_distance_to_the_next_use_clipped_at_the_horizon(used, horizon):
    used = np.array(used)
    labels = next_use(used, horizon)
    for step in range(len(used)):
        for expert in range(3):
            ahead = np.flatnonzero(used[step + 1 :, expert])
            assert labels[step, expert] == (min(ahead[0] + 1, horizon) if len(ahead) else horizon)


def test_features_by_hand():
    used = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 0]], bool)
    recency, frequency = features(used, np.array([0, 0, 0, 1]))
    assert recency == pytest.approx(np.array([[1, 0, 0], [1, 1, 0], [1 / 2, 1, 0], [1 / 3, 1, 0]]))
    assert frequency == pytest.approx(np.array([[1, 0, 0], [1, 1 / 2, 0], [1, 1, 0], [0, 1, 0]]))


@pytest.mark.parametrize("chunk", [1, 4])
def test_the_policy_sees_the_very_features_that_the_nets_learned_from(chunk):
    trace = make_trace(60, sequences=3)
    used, request = demands(trace, chunk)
    expected = [features(used[:, layer], request) for layer in range(trace.layers)]
    policy, todo = Learned(48, 16, 4, seed=0, pools=4, nets=random_nets()), events(trace, chunk)
    seen = 0
    for keys, layer, step, now in zip(todo.keys, todo.layer, todo.step, todo.request, strict=True):
        if now != seen:
            policy.begin_request()
            seen = now
        policy.access(keys, [False] * len(keys))
        for mine, theirs in zip(policy.features(layer), expected[layer], strict=True):
            assert mine == pytest.approx(theirs[step], abs=1e-6)
            assert ((mine >= 0) & (mine <= 1)).all()
            assert not mine[~used[: step + 1, layer].any(axis=0)].any(), "what was never used has neither"
    policy.check_integrity()


def test_whole_requests_are_held_out_and_one_request_is_cut_in_time():
    many = samples(with_requests(make_trace(60), 10), 4, 9, 0.2)
    assert np.flatnonzero(many.held_out).tolist() == list(range(48, 60))
    assert many.target.min() == 0
    assert many.target.max() == 1
    one = samples(with_requests(make_trace(60), 1), 4, 9, 0.25)
    assert np.flatnonzero(one.held_out).tolist() == list(range(45, 60))


def test_steps_that_were_not_recorded_whole_are_left_out():
    trace = with_requests(make_trace(20), 1)
    trace.experts[7, 2] = -1
    used, request = demands(trace, 4)
    assert len(used) == len(request) == 19
    full = demands(with_requests(make_trace(20), 1), 4)[0]
    assert np.array_equal(used, np.delete(full, 7, axis=0))
