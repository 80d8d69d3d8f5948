"""Rounds over a trace: every token is emitted once and in order, luck is as often as stated, wrong guesses route like
their neighbours, and what was recorded is replayed as it was.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, make_experts, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_fixtures import Drafting, ancestors_closed, tree

from moebench.draft import UNKNOWN, Acceptance
from moebench.engine.loop import replay
from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.metrics import Metrics
from moebench.step import DECODE, PREFILL, VERIFY, Routing, Step
from moebench.trace.drafts import NEAR, Recorded, Surrogate
from moebench.trace.format import TraceError, load
from moebench.trace.record import Recorder

TRACE = make_trace(tokens=90, sequences=3, prefill=5)
META = {"model": "small", "experts": GEOMETRY.experts, "source": "test"}
SHARES = Acceptance((0.8, 0.5, 0.2), 2, "test")


class Routed(Drafting):
    """Writes down what each step routed."""

    def __init__(self, cut=None) -> None:
        super().__init__(None, cut)
        self.routed, self.requests = [], []

    @hookimpl
    def begin_request(self, sequences):
        self.requests.append(sequences.tolist())

    @hookimpl
    def begin_step(self, step):
        assert step.accepted is None
        self.routed.append([])

    @hookimpl
    def route(self, native):
        self.routed[-1].append(native.experts)


def run(trace, acceptance=SHARES, seed=0, batch=1, cut=None, slots=20):
    plugin, metrics = Routed(cut), Metrics(0, lambda: (0, 0))
    experts = make_experts([plugin, metrics], slots)
    replay(trace, experts, batch, 4, acceptance, seed)
    experts.check_integrity()
    routed = [np.stack(layers, 1) for layers in plugin.routed]
    return plugin, routed, {name: value for name, (value, _, _) in metrics.numbers().items()}


def emitted(plugin, routed):
    """By sequence: positions and routing of the rows that stand, in the order of emission."""
    found = {}
    for step, ids in zip(plugin.steps, routed, strict=True):
        stand = step.valid if step.accepted is None else step.accepted
        for sequence, position, row in zip(step.sequence[stand], step.position[stand], ids[stand], strict=True):
            found.setdefault(int(sequence), []).append((int(position), row))
    return found


@settings(max_examples=20)
@given(
    st.integers(0, 10**6), st.integers(1, 3), st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(1, 3),
    st.booleans(),
)  # fmt: skip
def test_every_token_is_emitted_once_in_order_with_its_own_routing(seed, batch, shares, branching, pruned):
    acceptance = Acceptance(tuple(sorted(shares, reverse=True)), branching, "test")
    cut = ancestors_closed(np.random.default_rng(seed)) if pruned else None
    plugin, routed, _ = run(TRACE, acceptance, seed, batch, cut)
    rows = emitted(plugin, routed)
    for sequence in range(3):
        of = TRACE.sequence == sequence
        assert [position for position, _ in rows[sequence]] == TRACE.position[of].tolist()
        assert np.array_equal(np.stack([ids for _, ids in rows[sequence]]), TRACE.experts[of])
    assert sum(step.emits for step in plugin.steps if step.phase != PREFILL) == (TRACE.phase == DECODE).sum()


def test_a_replay_is_the_same_for_the_same_seed_and_any_batch():
    one, two, other = (run(TRACE, seed=seed, batch=batch) for seed, batch in ((1, 1), (1, 3), (2, 1)))
    again = run(TRACE, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(one[1], again[1], strict=True))
    assert one[2] == again[2]
    rounds = [
        sorted((int(s.sequence[0]), int(s.position[0]), s.emits) for s in r[0].steps if s.phase) for r in (one, other)
    ]
    assert rounds[0] != rounds[1]
    assert one[2]["verified_per_token"] == two[2]["verified_per_token"]
    assert one[2]["accepted_per_round"] == two[2]["accepted_per_round"]
    assert [len(requests) for requests in two[0].requests] == [3]


def test_luck_is_as_often_as_stated_and_falls_on_ranks_as_stated():
    trace = make_trace(tokens=3000, sequences=1, prefill=2)
    acceptance = Acceptance((0.8, 0.5, 0.2), 2, "test", (0.75, 0.25))
    source = Surrogate(trace, acceptance, 3)
    found = [source.at(row) for row in range(2, 2900)]
    right = np.stack([drafted.right for drafted in found])
    tree_ = found[0].draft
    levels = right.sum(1)
    assert (levels[:, None] >= np.arange(1, 4)).mean(0) == pytest.approx(acceptance.by_depth, abs=0.03)
    assert len(tree_) == 2 + 4 + 8
    first = right[:, tree_.depth == 1]
    assert first.mean(0) == pytest.approx([0.6, 0.2], abs=0.03)
    for node in range(len(tree_)):
        parent = tree_.parents[node]
        reached = right[:, parent] if parent >= 0 else np.ones(len(right), bool)
        if reached.sum() > 300:
            assert right[reached, node].mean() == pytest.approx(tree_.probability[node], abs=0.1)


def test_right_nodes_carry_the_next_tokens_and_wrong_ones_a_neighbour():
    source = Surrogate(TRACE, Acceptance((0.6, 0.3), 2, "test"), 0)
    for row in range(TRACE.tokens):
        found = source.at(row)
        last = np.flatnonzero(TRACE.sequence == TRACE.sequence[row])[-1]
        place = row + found.draft.depth
        within = place <= last
        assert np.array_equal(found.rows[found.right & within], place[found.right & within])
        wrong = ~found.right & within
        assert (found.rows[wrong] != place[wrong]).all()
        assert (np.abs(found.rows[wrong] - place[wrong]) <= NEAR).all()
        assert (TRACE.sequence[found.rows] == TRACE.sequence[row]).all()


def test_better_drafts_take_fewer_passes_and_wider_ones_more_rows():
    narrow = [run(TRACE, Acceptance((p, p * p), 1, "test"))[2] for p in (0.0, 0.4, 0.8, 1.0)]
    per_round = [numbers["accepted_per_round"] for numbers in narrow]
    assert per_round == sorted(per_round)
    assert per_round[0] == 1.0
    assert per_round[-1] > 2.6
    rows = [numbers["verified_per_token"] for numbers in narrow]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] == pytest.approx(1.0)
    assert run(TRACE, Acceptance((0.4, 0.16), 2, "test"))[2]["verified_per_token"] > rows[1]


def test_loads_per_token_have_an_optimum_in_the_window():
    """Per verified token loads fall with the window; per emitted one only as long as drafts hold (bigmomo, B2)."""
    trace = make_trace(tokens=500, sequences=1, prefill=4)
    verified, accepted = [], []
    for depth in (1, 2, 4, 8):
        plugin, routed, numbers = run(trace, Acceptance(tuple(0.6**d for d in range(1, depth + 1)), 1, "t"), slots=40)
        loads = sum(
            len(np.unique(ids[:, layer])) for step, ids in zip(plugin.steps, routed, strict=True) if step.phase
            for layer in range(GEOMETRY.layers)
        )  # fmt: skip
        tokens = sum(step.emits for step in plugin.steps if step.phase)
        verified.append(loads / tokens / numbers["verified_per_token"])
        accepted.append(loads / tokens)
    assert verified == sorted(verified, reverse=True)
    assert accepted[-1] > min(accepted)
    assert min(accepted) < GEOMETRY.layers * GEOMETRY.top_k


def test_prune_is_asked_with_the_stated_probabilities():
    seen = []

    def cut(draft):
        seen.append(draft)
        return draft.depth <= 1

    plugin, _, numbers = run(TRACE, cut=cut)
    assert {draft.levels for draft in seen} == {1, 2, 3}
    assert all((draft.tokens == UNKNOWN).all() for draft in seen)
    whole = max(seen, key=len)
    assert whole.probability[:2].tolist() == pytest.approx([0.8 * 2 / 3, 0.8 / 3])
    assert max(step.emits for step in plugin.steps if step.phase) == 2
    assert numbers["verified_per_token"] < run(TRACE)[2]["verified_per_token"]


def test_without_acceptance_or_recorded_drafts_a_replay_is_refused():
    with pytest.raises(UsageError, match="a replay needs its acceptance, or a trace recorded with drafts"):
        run(TRACE, acceptance=None)


def test_nothing_drafted_has_no_metrics_of_drafts():
    metrics = Metrics(0, lambda: (0, 0))
    replay(TRACE, make_experts([metrics]), 1, 4)
    assert metrics.numbers()["accepted_per_round"] == (None, "nothing was drafted", (TRACE.phase == DECODE).sum())
    assert metrics.numbers()["verified_per_token"][0] is None


# --- recorded drafts ------------------------------------------------------------------------------------------------


def recorded(seed=0, weights=True):
    """A trace as a recorder makes it of rounds over ``TRACE``: (trace, the steps with the routing of every row)."""
    rng, recorder, made = np.random.default_rng(seed), Recorder(), []

    def add(phase, sequence, position, ids, drafts=(), stand=None):
        step = Step(
            len(made), phase, sequence.astype(np.int32), position.astype(np.int32), np.ones(len(ids), bool), 0, drafts
        )
        if stand is not None:
            step.settle(stand)
        share = np.full(ids.shape[::2], 0.25, np.float32) if weights else None
        recorder.add_step(step, [Routing(ids[:, layer], share) for layer in range(GEOMETRY.layers)])
        made.append((step, ids))

    for sequence in range(3):
        rows = np.flatnonzero(TRACE.sequence == sequence)
        add(PREFILL, TRACE.sequence[rows[:5]], TRACE.position[rows[:5]], TRACE.experts[rows[:5]])
        at = 5
        while at < len(rows):
            draft = tree(rng, int(rng.integers(0, 6)))
            draft = draft.keep(draft.depth < len(rows) - at)
            if not len(draft):
                add(
                    DECODE,
                    TRACE.sequence[rows[at : at + 1]],
                    TRACE.position[rows[at : at + 1]],
                    TRACE.experts[rows[at : at + 1]],
                )
                at += 1
                continue
            end = int(rng.integers(-1, len(draft)))
            path = np.flatnonzero(draft.ancestors()[end]) if end >= 0 else np.zeros(0, int)
            ids = np.stack([rng.permutation(GEOMETRY.experts)[:3] for _ in range(4 * (1 + len(draft)))])
            ids = ids.reshape(1 + len(draft), 4, 3).astype(np.int16)
            ids[0], ids[1 + path] = TRACE.experts[rows[at]], TRACE.experts[rows[at + 1 : at + 1 + len(path)]]
            stand = np.zeros(1 + len(draft), bool)
            stand[np.append(0, 1 + path)] = True
            position = TRACE.position[rows[at]] + np.append(0, draft.depth)
            add(VERIFY, np.full(1 + len(draft), sequence), position, ids, (draft,), stand)
            at += 1 + len(path)
    return recorder.trace(META), made


@pytest.mark.parametrize("seed", range(3))
def test_a_recorded_trace_is_that_of_plain_decoding_and_replays_its_rounds(tmp_path, seed):
    trace, made = recorded(seed)
    trace = load(trace.save(tmp_path / "t.safetensors"))
    for name in ("experts", "phase", "sequence", "position"):
        assert np.array_equal(getattr(trace, name), getattr(TRACE, name))
    plugin, routed, _ = run(trace, acceptance=None)
    again = [(step, ids) for step, ids in zip(plugin.steps, routed, strict=True) if step.phase]
    before = [(step, ids) for step, ids in made if step.phase]
    assert len(again) == len(before)
    for (step, ids), (first, expected) in zip(again, before, strict=True):
        assert (step.phase, step.emits or 1) == (first.phase, first.emits or 1)
        assert np.array_equal(ids, expected)
        assert np.array_equal(step.position, first.position)
        for one, two in zip(step.drafts, first.drafts, strict=True):
            assert np.array_equal(one.parents, two.parents)
            assert np.array_equal(one.probability, two.probability)


def test_pruned_rounds_go_on_below_the_node_they_reached():
    trace, _ = recorded(1)
    plugin, routed, _ = run(trace, acceptance=None, cut=lambda draft: draft.depth <= 1)
    rows = emitted(plugin, routed)
    for sequence in range(3):
        assert np.array_equal(np.stack([ids for _, ids in rows[sequence]]), TRACE.experts[TRACE.sequence == sequence])
    source = Recorded(trace)
    inside = 0
    for row in range(trace.tokens):
        found = source.at(row)
        start = int(source.began[row])
        if start < row and len(found.rows):
            inside += 1
            whole = source.at(start)
            assert found.draft.levels <= whole.draft.levels - (row - start)
            assert set(found.rows.tolist()) < set(whole.rows.tolist())
    assert inside


def test_a_trace_with_half_of_its_drafts_is_refused():
    trace, _ = recorded()
    del trace.channels["drafts.weights"]
    with pytest.raises(TraceError, match=r"drafts\.weights: missing"):
        run(trace, acceptance=None)
    one = np.zeros(1, np.int32)
    step = Step(0, VERIFY, one, one, one == 0)
    with pytest.raises(TraceError, match="recorded once it is known which rows stand"):
        Recorder().add_step(step, [Routing(np.zeros((1, 1), np.int16), None)])
