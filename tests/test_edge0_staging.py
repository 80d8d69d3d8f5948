"""Edge0 in replay: what is staged is what is routed, no expert is dropped, reads go out when they may and not later,
and each mechanism moves the observable it is there for.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from edge0_fixtures import Logged, replayed
from engine_fixtures import GEOMETRY, Watch, costs, make_experts, make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moebench.engine.loop import replay
from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.residency.policies import make_policy
from moebench.step import DECODE
from moebench.systems.edge0 import Edge0Config
from moebench.systems.edge0.heads import Plan
from moebench.systems.edge0.staging import Staging, StagingError, capacity
from moebench.timeline.virtual import VirtualTimeline

FILLS = ("staged_sync", "overlap", "eager")
PLAN = Plan(layers=4, top_k=2, consumers=(2,))
WIDE = Plan(layers=4, top_k=2, consumers=(1, 2))


def run(config, trace=None, plan=WIDE, slots=12, scope="shared", batch=1, host=0, cls=Logged, **changes):
    """Replay a trace under edge0; returns the plugin, the watch, the loop and the channel."""
    trace = trace or make_trace(60)
    system, channel = replayed(config, trace, plan, slots, scope, batch, cls=cls)
    watch = Watch()
    timeline = VirtualTimeline(costs(**changes))
    experts = make_experts([system, watch], slots=slots, scope=scope, host=host, timeline=timeline)
    watch.experts = experts
    replay(trace, experts, batch=batch, chunk=4)
    return system, watch, experts, channel


def seconds(watch, name="duration_s"):
    """Sum over decode steps."""
    return sum(getattr(r, name) for r in watch.records if r.step.phase == DECODE)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("scope", "slots", "host"), [("shared", 18, 0), ("per_layer", 36, 0), ("shared", 18, 8)])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_is_executed_is_the_channel_and_nothing_is_dropped(fill, scope, slots, host, batch):
    trace = make_trace(60)
    system, _, _, channel = run(Edge0Config(fill=fill), trace, scope=scope, slots=slots, host=host, batch=batch)
    counted = system.report()
    assert counted["dropped"] == 0
    assert system.staging.routed > 0
    decoded = [e for e in system.executed if e[1] == DECODE]
    for _, _, layer, ids, ahead in decoded:
        assert ids.shape[1] == 2
        assert not ahead or layer in WIDE.consumers
    if batch == 1:
        rows = np.flatnonzero(trace.phase == DECODE)
        first = {np.flatnonzero((trace.sequence == s) & (trace.phase == DECODE))[0] for s in (0, 1)}
        steps = [list(group) for _, group in itertools.groupby(decoded, key=lambda e: e[0])]
        for row, layers in zip(rows, steps, strict=True):
            for _, _, layer, ids, ahead in layers:
                predicted = layer in WIDE.consumers and row not in first  # the gate routes each first token
                assert ahead == predicted
                want = channel[row, layer] if predicted else trace.experts[row, layer, :2]
                assert ids[0].tolist() == want.tolist()


@pytest.mark.parametrize("fill", FILLS)
def test_layers_before_the_first_consumer_and_the_last_are_never_staged(fill):
    system, *_ = run(Edge0Config(fill=fill), plan=PLAN)
    booked = {entry[1] for entry in system.log if entry[0] == "book"}
    assert booked == {2}
    assert all(key // GEOMETRY.experts == 2 for entry in system.log if entry[0] == "book" for key in entry[2])


@pytest.mark.parametrize("fill", FILLS)
def test_a_lost_slot_fails_loudly(fill):
    class Lossy(Logged):
        @hookimpl
        def begin_step(self, step):
            super().begin_step(step)
            if step.index == 20:
                layer, keys = next(iter(self.staging.using.items()))
                self.staging.using[layer] = keys[1:]

    with pytest.raises(StagingError, match=r"layer \d+ routes to expert \d+, not staged"):
        run(Edge0Config(fill=fill), cls=Lossy)


@pytest.mark.parametrize("fill", FILLS)
def test_reads_of_the_next_token_go_out_after_their_features_and_before_their_use(fill):
    events = []

    class Recording(VirtualTimeline):
        def read(self, keys, slots, tier, priority, together=()):
            events.extend(("read", key, priority) for key in keys)
            return super().read(keys, slots, tier, priority, together)

    trace = make_trace(60, sequences=1)
    system, _ = replayed(Edge0Config(fill=fill), trace, WIDE, 12)
    system.log = events
    experts = make_experts([system], slots=12, timeline=Recording(costs()))
    replay(trace, experts, chunk=4)
    checked = 0
    for at, event in enumerate(events):
        if event[0] != "book":
            continue
        layer, keys = event[1], set(event[2])
        before = [e for e in events[:at] if e[0] == "route"]
        step, owner = before[-1][2], before[-1][1]
        used = next(
            (i for i in range(at, len(events)) if events[i][:2] == ("route", layer) and events[i][2] > step), None
        )
        if used is None:
            continue
        assert ("route", layer - 1, step) in before  # the owner's features exist
        if fill == "eager":
            assert owner == layer - 1  # nothing was routed in between
        else:
            assert owner == GEOMETRY.layers - 1  # the step's last layer: the boundary
        reads = [i for i in range(at, len(events)) if events[i][0] == "read" and events[i][1] in keys]
        late = [i for i in reads if i > used]
        assert not [i for i in late if events[i][2] == 0 and i < next(
            (j for j in range(used + 1, len(events)) if events[j][0] == "route"), len(events))]  # fmt: skip
        if fill == "staged_sync":
            boundary = next(i for i in range(at, len(events)) if events[i][0] in ("step", "request"))
            assert all(i < boundary or i > used for i in reads)
        checked += 1
    assert checked > 20


def test_serial_fill_has_everything_at_hand_when_a_step_begins():
    system, watch, *_ = run(Edge0Config(fill="staged_sync"))
    staged = [ready for (*_, ahead), (_, _, ready) in zip(system.executed, watch.events, strict=True) if ahead]
    assert len(staged) > 50
    assert all(map(all, staged))


def test_survivors_are_not_read_again():
    """Sets that stay the same are read once; where one of two experts changes at every token, one is read."""
    trace = make_trace(60, sequences=1)
    decoded = trace.phase == DECODE
    for changing in (False, True):
        fixed = np.tile(np.array([3, 7], np.int16), (trace.tokens, 4, 1))
        if changing:
            fixed[:, :, 1] = 4 + np.arange(trace.tokens)[:, None] % 8

        class Fixed(Logged):
            channel = np.where(decoded[:, None, None], fixed, -1)

            def __init__(self, config, run):
                super().__init__(config, run)
                self.predictor.channel = self.channel

        system, watch, *_ = run(Edge0Config(), trace, slots=6, cls=Fixed)
        reads = [r.prefetch_reads for r in watch.records if r.step.phase == DECODE][1:-1]
        assert system.report()["newcomers"] == 2 * (2 + (system.staging.sets_staged // 2 - 1) * changing)
        assert set(reads) <= ({2} if changing else {0})


def test_each_fill_mode_hides_more_than_the_one_before():
    """Reads issued together beat reads one by one; a head start of a whole forward beats the step's boundary."""
    stalls, times = {}, {}
    for fill in FILLS:
        _, watch, *_ = run(Edge0Config(fill=fill), make_trace(200, sequences=1), slots=12)
        stalls[fill], times[fill] = seconds(watch, "stall_s"), seconds(watch)
    assert stalls["eager"] < stalls["overlap"] < stalls["staged_sync"]
    assert times["overlap"] < times["staged_sync"]


def test_eager_pays_a_read_back_for_every_head():
    quick = {fill: seconds(run(Edge0Config(fill=fill))[1]) for fill in ("overlap", "eager")}
    slow = {fill: seconds(run(Edge0Config(fill=fill), host_sync_s=5e-3)[1]) for fill in ("overlap", "eager")}
    assert slow["eager"] - quick["eager"] > slow["overlap"] - quick["overlap"] > 0


def test_predicted_layers_are_not_read_back():
    """Off, every layer's choice is read back from the device; on, consumers' are not."""
    sync = {"host_sync_s": 1.0}
    steps = sum(1 for r in run(Edge0Config())[1].records if r.step.phase == DECODE)
    off = seconds(run(Edge0Config(prerouter=False), **sync)[1])
    on = seconds(run(Edge0Config(), **sync)[1])
    # two of four layers need none, the boundary needs one; each request's first token is routed by the gate
    assert off == pytest.approx(4 * steps, rel=0.05)
    assert on == pytest.approx(3 * steps, rel=0.08)


def test_heads_may_choose_the_first_token_too():
    for first, expected in (("gate", 0), ("heads", 2)):
        system, *_ = run(Edge0Config(first_token=first))
        firsts = [next(e for e in group if e[1] == DECODE)[0] for group in _requests(system.executed)]
        ahead = sum(e[4] for e in system.executed if e[0] in firsts)
        assert ahead == expected * len(firsts)


def _requests(executed):
    """Executed layers, split where a prefill follows a decode."""
    groups, before = [[]], None
    for entry in executed:
        if before == DECODE and entry[1] != DECODE:
            groups.append([])
        groups[-1].append(entry)
        before = entry[1]
    return groups


def test_a_second_request_is_as_a_first():
    """The same request twice: the same routing and the same sets, whatever stood in the cache."""
    one = make_trace(30, sequences=1, seed=4)
    twice = type(one)(
        np.concatenate([one.experts] * 2), np.concatenate([one.phase] * 2),
        np.repeat(np.arange(2, dtype=np.int32), one.tokens), np.concatenate([one.position] * 2), metadata=one.metadata,
    )  # fmt: skip
    channel = replayed(Edge0Config(), one, WIDE, 12)[1]

    class Same(Logged):
        def __init__(self, config, run):
            super().__init__(config, run)
            self.predictor.channel = np.concatenate([channel] * 2)

    system, *_ = run(Edge0Config(), twice, cls=Same)
    parts = [[]]
    for entry in system.log:
        if entry[0] == "request":
            parts.append([])
        elif entry[0] == "book":
            parts[-1].append(entry[1:])
    first, second = parts[1:]
    assert first == second
    assert len(first) > 10
    halves = [e[2:] for e in system.executed]
    middle = len(halves) // 2
    assert all(
        a[0] == b[0] and a[2] == b[2] and np.array_equal(a[1], b[1])
        for a, b in zip(halves[:middle], halves[middle:], strict=True)
    )


def test_a_batch_whose_choice_is_too_wide_is_not_staged_but_still_served():
    system, *_ = run(Edge0Config(), make_trace(120, sequences=4), slots=24, batch=4, plan=Plan(4, 3, (1, 2)))
    counted = system.report()
    assert counted["sets_refused"] > 0
    assert counted["dropped"] == 0
    assert counted["sets_staged"] > 0
    ahead = [e[4] for e in system.executed if e[1] == DECODE and e[2] == 1]
    assert ahead.count(False) == 1  # staged or not, all but the first token are predicted


def test_a_batch_that_the_slots_cannot_stage_runs_in_waves():
    system, watch, *_ = run(Edge0Config(), make_trace(120, sequences=4), slots=6, batch=4)
    assert system.report()["sets_staged"] == 0
    assert system.report()["sets_refused"] > 0
    assert any(r.waves > GEOMETRY.layers for r in watch.records if r.step.phase == DECODE)


def test_too_small_a_budget_says_what_is_needed():
    with pytest.raises(
        UsageError, match=r"books 2 experts for each of 2 layers, and 2 slots for demand: 6 slots, the budget gives 5"
    ):
        run(Edge0Config(), slots=5)
    with pytest.raises(UsageError, match="one set more"):
        run(Edge0Config(fill="eager"), slots=7)
    run(Edge0Config(fill="eager"), slots=8)
    run(Edge0Config(), slots=6)


@given(
    st.integers(1, 400), st.sampled_from(["shared", "per_layer"]), st.integers(2, 12), st.integers(1, 8),
    st.integers(1, 40), st.integers(0, 1),
)  # fmt: skip
def test_capacity_never_books_more_than_the_slots(slots, scope, layers, top_k, batch, ahead):
    consumers, experts = max(1, layers - 2), 32
    demand = min(experts, batch * top_k)
    try:
        room = capacity(slots, scope, layers, experts, consumers, top_k, batch, ahead, 4096)
    except UsageError:
        return
    assert 0 <= room <= demand
    assert room >= top_k or batch > 1
    if room and scope == "shared":
        assert room * (consumers + ahead) + demand <= slots
    elif room:
        assert room + demand * ahead <= slots // layers


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 7), min_size=1, max_size=4)), max_size=20))
def test_bookings_follow_the_sets(events):
    """Book, advance and use in any order: bookings stay those of the sets, and victims never hold one."""
    policy = make_policy("lru", 32, 8, layers=4, seed=0, pools=1)
    staging = Staging(4, 8, (1, 2, 3), 3, policy)
    for layer, experts in events:
        keys = sorted(layer * 8 + e for e in experts)
        if layer not in staging.coming:
            assert staging.book(layer, keys) == (len(keys) <= 3)
        staging.check_integrity()
        victims = staging.victims(np.arange(32), 32)
        held = [k for sets in (staging.using, staging.coming) for s in sets.values() for k in s.tolist()]
        assert not set(victims.tolist()) & set(held)
        if len(experts) % 2:
            staging.advance()
            staging.check_integrity()
            for used in list(staging.using):
                staging.use(used, staging.using[used].tolist())
            staging.check_integrity()


def uneven(lengths, prompts, seed=0):
    """A trace of sequences of these lengths, of which so many tokens are prompts."""
    parts = [
        make_trace(length, sequences=1, prefill=p, seed=seed + i)
        for i, (length, p) in enumerate(zip(lengths, prompts, strict=True))
    ]
    number = np.concatenate([np.full(part.tokens, i, np.int32) for i, part in enumerate(parts)])
    joined = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ("experts", "phase", "position")}
    return type(parts[0])(**joined, sequence=number, metadata=parts[0].metadata)


def fits(slots, scope, ahead):
    """Whether one sequence can be staged under ``WIDE``: two sets of two, two slots for demand."""
    return slots // 4 >= 2 + 2 * ahead if scope == "per_layer" else slots >= 2 * (2 + ahead) + 2


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 9)), min_size=1, max_size=5), st.sampled_from(FILLS),
    st.sampled_from(["gate", "heads"]), st.integers(1, 3), st.sampled_from([0, 6, 9]), st.integers(6, 24),
    st.sampled_from(["shared", "per_layer"]),
)  # fmt: skip
def test_no_trace_batch_or_tier_drops_an_expert(shape, fill, first_token, batch, host, slots, scope):
    """Prompts of any length, none at all, one decoded token, small tiers: everything routed is staged or demanded."""
    trace = uneven([p + d for p, d in shape], [p for p, _ in shape])
    slots = slots * 2 if scope == "per_layer" else slots
    options = {"slots": slots, "batch": batch, "host": host, "scope": scope}
    config = Edge0Config(fill=fill, first_token=first_token)
    if not fits(slots, scope, ahead=fill == "eager"):
        with pytest.raises(UsageError, match="it takes budget="):
            run(config, trace, **options)
        return
    system, watch, experts, _ = run(config, trace, **options)
    assert system.report()["dropped"] == 0
    read = sum(r.read_bytes for r in watch.records)
    loads = sum(r.demand_reads + r.prefetch_reads for r in watch.records)
    assert host or read == loads * GEOMETRY.slot_bytes
    experts.check_integrity()
