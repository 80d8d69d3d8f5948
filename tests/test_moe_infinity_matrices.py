"""Activation matrices, the collection and matching: against a slow reference, and case by case."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Watch, costs, make_experts, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_infinity_fixtures import context, others

from moebench.engine.loop import replay
from moebench.step import DECODE, Step
from moebench.systems.moe_infinity import MoeInfinity, MoeInfinityConfig
from moebench.systems.moe_infinity.counting import count
from moebench.systems.moe_infinity.lookahead import SHARE, admitted, best, priorities, worthwhile
from moebench.systems.moe_infinity.matching import Matcher
from moebench.systems.moe_infinity.matrices import Activity, Collection
from moebench.systems.moe_infinity.replacement import EPSILON
from moebench.timeline.virtual import VirtualTimeline

LAYERS, EXPERTS = 3, 4


def one_row(position=0, sequence=0):
    return Step(0, DECODE, np.array([sequence]), np.array([position]), np.array([True]))


def collection(*matrices, capacity=0, persistent=0):
    start = np.array(matrices, float)
    return Collection(start, start.shape[1], start.shape[2], capacity or len(start), persistent)


def slow(matrix, entry, rows):
    """The mean of the cosines of some rows, as the formula reads."""
    found = []
    for row in rows:
        a, b = matrix[row], entry[row]
        found.append(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) if a.any() and b.any() else 0.0)
    return np.sum(found)


counts = st.lists(st.integers(0, 5), min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS)
matrices = counts.map(lambda values: np.array(values, float).reshape(LAYERS, EXPERTS))
passes = st.lists(
    st.lists(st.permutations(range(EXPERTS)).map(lambda p: p[:2]), min_size=LAYERS, max_size=LAYERS),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(matrices, min_size=1, max_size=5), passes, st.sampled_from(["observed", "masked"]))
def test_running_cosines_are_those_of_the_formula(entries, tokens, rows):
    held = collection(*entries)
    matcher, activity = Matcher(held, rows), Activity(LAYERS, EXPERTS)
    matcher.reset(1)
    for token in tokens:
        matcher.begin_step()
        for layer, ids in enumerate(token):
            seen = activity.observe(one_row(), layer, np.array([ids]))
            matcher.observe(layer, seen, activity.counts)
            compared = range(layer + 1) if rows == "observed" else range(layer + 1, LAYERS)
            want = np.array([slow(activity.counts[0], entry, compared) for entry in entries])
            chosen = int(matcher.nearest(layer)[0])
            assert want[chosen] == pytest.approx(want.max(), abs=1e-5)


def test_the_nearest_of_a_hand_made_collection():
    """Entry 1 routes as the request does in layer 0, entry 0 in layers 1 and 2."""
    a = [[1, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0]]
    b = [[0, 3, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    nearest = {}
    for rows in ("observed", "masked"):
        matcher, activity = Matcher(collection(a, b), rows), Activity(LAYERS, EXPERTS)
        for token in range(2):
            matcher.begin_step()
            for layer, expert in enumerate((1, 1, 2)):
                matcher.observe(layer, activity.observe(one_row(), layer, np.array([[expert]])), activity.counts)
                nearest[rows, token, layer] = int(matcher.nearest(layer)[0])
    assert nearest["observed", 0, 0] == nearest["observed", 1, 0] == 1
    assert nearest["observed", 0, 2] == 0
    assert nearest["masked", 0, 0] == 0  # nothing seen behind the layer: all tie, the first is taken
    assert nearest["masked", 1, 0] == 0  # layers 1 and 2 of the token before
    assert nearest["masked", 1, 2] == 0


def test_masked_rows_cannot_tell_entries_apart_in_the_first_pass():
    a, b = [[1, 0, 0, 0]] * 3, [[0, 1, 0, 0]] * 3
    chosen = {}
    for rows in ("observed", "masked"):
        matcher, activity = Matcher(collection(a, b), rows), Activity(LAYERS, EXPERTS)
        matcher.observe(0, activity.observe(one_row(), 0, np.array([[1]])), activity.counts)
        chosen[rows] = int(matcher.nearest(0)[0])
    assert chosen == {"observed": 1, "masked": 0}


def test_every_sequence_of_a_batch_has_its_own_matrix_and_match():
    a, b = [[1, 0, 0, 0]] * 3, [[0, 1, 0, 0]] * 3
    matcher, activity = Matcher(collection(a, b), "observed"), Activity(LAYERS, EXPERTS)
    matcher.reset(3)
    activity.reset(np.array([4, 7, 9]))
    step = Step(0, DECODE, np.array([4, 7, 9]), np.zeros(3, int), np.array([True, True, False]))
    seen = activity.observe(step, 0, np.array([[1], [0], [3]]))
    matcher.observe(0, seen, activity.counts)
    assert matcher.nearest(0).tolist() == [1, 0, 0]
    assert activity.counts[:, 0].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]  # padding counts nothing
    assert activity.ratio[0].tolist() == [1.0, 1.0, 0.0, 0.0]  # ratios of a batch are added


def test_matrices_of_a_trace_count_every_token_once():
    trace = make_trace(60, 3)
    found = count(trace)
    assert found.shape == (3, trace.layers, trace.expert_count)
    assert found.sum(axis=(1, 2)).tolist() == [20 * trace.layers * trace.top_k] * 3
    assert found[1, 2, 5] == (trace.experts[20:40, 2] == 5).sum()


def test_a_finished_request_takes_a_free_place_first():
    held = collection([[1, 0, 0, 0]] * 3, capacity=2)
    assert held.add(np.array([[1, 0, 0, 0]] * 3, float), "nearest") == 1
    assert held.size == 2


def test_full_it_replaces_the_nearest_or_the_least_matched_behind_the_persistent():
    rows = [[[1, 0, 0, 0]] * 3, [[0, 1, 0, 0]] * 3, [[0, 0, 1, 0]] * 3]
    new = np.array([[0, 9, 1, 0]] * 3, float)
    assert collection(*rows).add(new, "nearest") == 1
    held = collection(*rows, persistent=1)
    held.matches[:] = [0, 5, 2]
    assert held.add(new, "least_matched") == 2
    assert held.matches.tolist() == [0, 5, 0]
    assert held.similarity(new)[2] == pytest.approx(1.0, abs=1e-6)


@given(matrices, matrices)
def test_similarity_is_the_mean_of_row_cosines(one, other):
    assert collection(other).similarity(one)[0] == pytest.approx(slow(one, other, range(LAYERS)) / LAYERS, abs=1e-5)


def test_the_ratio_of_an_entry_is_its_share_of_tokens():
    held = collection([[3, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 2]])
    assert held.ratio(0).tolist() == [pytest.approx([0.75, 0.25, 0, 0]), [0] * 4, [0, 0, 0, 1]]


def test_priorities_fall_with_distance():
    """The paper's weights behind layer 0 of three are 2/3 and 1/3; its code's are 3/4 and 2/4."""
    ratio = np.array([[9.0, 9], [0.5, 0.0], [0.5, 0.25]])
    assert priorities(ratio, 0, 3) == pytest.approx(np.array([[1 / 3, 0], [1 / 6, 1 / 12]]), abs=1e-6)
    assert priorities(ratio, 0, 4) == pytest.approx(np.array([[3 / 8, 0], [1 / 4, 1 / 8]]), abs=1e-6)
    assert priorities(ratio, 1, 3).shape == (1, 2)
    never = priorities(np.zeros((3, 2)), 0, 3)
    assert (never > 0).all()  # epsilon: what was never seen comes last, near layers first
    assert never[0, 0] == pytest.approx(EPSILON * 2 / 3)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.data(), st.integers(1, 8))
def test_the_best_are_those_of_a_sort_among_what_is_wanted(scores, data, count_):
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))))
    values = np.array(scores, float)
    found = best(values, wanted, count_)
    order = [i for i in np.argsort(-values, kind="stable").tolist() if wanted[i]]
    assert len(found) == min(count_, len(order))
    assert found.tolist() == order[: len(found)]  # ties by index, on every processor
    assert wanted[found].all()


@pytest.mark.parametrize(
    ("cost", "busy", "window", "expected"),
    [
        ([1.0, 1.0], 0.0, 0.0, 1),  # nothing known yet: one starts
        ([1.0, 1.0], 1.0, 0.0, 0),
        ([0.0, 0.0], 0.0, 9.0, 1),
        ([], 0.0, 0.0, 0),
        ([1.0, 1.0], 0.0, 1.0, 0),  # a window shorter than a read lets none through
        ([1.0, 1.0, 1.0], 0.0, 2 / SHARE, 2),
        ([1.0, 1.0, 1.0], 1.0, 2 / SHARE, 1),
        ([1.0, 1.0, 1.0], 5.0, 2 / SHARE, 0),
        ([0.1, 1.0, 0.1], 0.0, 1.15 / SHARE, 2),
    ],
)
def test_one_window_is_let_through(cost, busy, window, expected):
    assert admitted(np.array(cost), busy, window) == expected


def test_a_read_must_be_worth_its_start():
    chance, cost = np.array([0.5, 0.5, 0.1, 0.0]), np.array([1.0, 0.1, 1.0, 0.0])
    assert worthwhile(chance, cost, 0.2).tolist() == [True, False, False, True]  # a cost that nobody knows may start
    assert worthwhile(chance, cost, np.inf).tolist() == [True] * 4


class Told(VirtualTimeline):
    """A clock that adds up what the system says it streamed."""

    nbytes = 0

    def system_work(self, nbytes, syncs):
        self.nbytes += nbytes
        super().system_work(nbytes, syncs)


def told(config, start, trace):
    """Bytes of a replay's own work, the steps it took, and what the matcher itself streamed."""
    system, clock, streamed = MoeInfinity(config, context(config, start)), Told(costs()), []
    if system.matcher:
        observe = system.matcher.observe
        system.matcher.observe = lambda *args: streamed.append(observe(*args)) or streamed[-1]
    watch = Watch()
    replay(trace, make_experts([system, watch], timeline=clock), chunk=4)
    return clock.nbytes, len(watch.records), sum(streamed)


def test_the_clock_hears_of_every_matrix_that_is_streamed():
    trace, layers, experts = make_trace(40), GEOMETRY.layers, GEOMETRY.experts
    later = 4 * experts * sum(range(1, layers))  # priorities of the layers behind each but the last
    nbytes, steps, _ = told(MoeInfinityConfig(match="off"), None, trace)
    assert nbytes == steps * later
    # one entry is always the nearest: it is taken over once a request, all of it
    nbytes, steps, streamed = told(MoeInfinityConfig(update="off"), others()[:1], trace)
    assert streamed > 0
    assert nbytes == streamed + 2 * 4 * layers * experts + steps * later
