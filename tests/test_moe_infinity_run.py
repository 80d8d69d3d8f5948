"""MoE-Infinity in replay: what is read ahead and what leaves keep their rules, no byte is lost, and each mechanism
moves the observable it is there for.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Watch, costs, make_experts, make_trace
from moe_infinity_fixtures import Logged, context, options, others, run, total

from moebench.engine.loop import replay
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.residency.policies import make_policy
from moebench.step import DECODE, PREFILL
from moebench.systems.moe_infinity import MoeInfinity, MoeInfinityConfig
from moebench.systems.moe_infinity.artefact import count
from moebench.systems.moe_infinity.matrices import Activity
from moebench.systems.moe_infinity.replacement import FEW, Replacement
from moebench.systemspec import RunContext
from moebench.timeline.virtual import VirtualTimeline
from moebench.trace.format import Trace, load

LAWS = ("activation", "incache", "incache_decayed", "lru")
HELD_OUT = load(Path(str(resources.files("moebench.models.tinymoe"))) / "traces" / "held_out.safetensors")
TINY = Geometry("tinymoe", layers=8, experts=32, top_k=4, hidden=128, intermediate=64, other_parameters=1000)


@functools.cache
def held_out(config, slots=64):
    """The committed trace: its first seven requests are the collection, the last three are served."""
    cut = int(HELD_OUT.sequence_starts[7])
    columns = (HELD_OUT.experts, HELD_OUT.phase, HELD_OUT.sequence, HELD_OUT.position)
    first, second = (
        Trace(*(column[part] for column in columns), metadata=HELD_OUT.metadata)
        for part in (slice(cut), slice(cut, None))
    )
    watch = Watch()
    system = MoeInfinity(config, context(config, count(first).astype(np.float64), slots, geometry=TINY))
    timeline = VirtualTimeline(costs(dense_layer_s=3e-3))
    experts = make_experts([system, watch], slots=slots, timeline=timeline, geometry=TINY)
    experts.read_estimate_s = timeline.costs.read_s[1]
    replay(second, experts)
    return system, watch


def stalls(watch):
    return total(watch, "stall_s")


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "host"), [("shared", 0), ("per_layer", 0), ("shared", 8)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("match", ["observed", "masked", "off"])
def test_only_later_layers_are_read_ahead_and_nothing_twice(scope, host, batch, match):
    slots = 24 if scope == "shared" else 28
    system, watch, _ = run(options(match=match), scope=scope, slots=slots, host=host, batch=batch)
    assert len(system.reads) > 50
    for _, point, keys, at_hand in system.reads:
        assert not at_hand
        assert len(set(keys)) == len(keys)
        assert all(key // GEOMETRY.experts > point for key in keys)
    counted = system.report()
    assert counted["prefetched"] == total(watch, "prefetch_reads") - total(watch, "cancelled") > 0
    assert counted["hits"] + counted["late"] + counted["left_unused"] <= counted["prefetched"]


def test_reads_ahead_follow_the_priorities():
    seen = []

    class Checked(Logged):
        @hookimpl
        def prefetch(self, step, point, view):
            keys = super().prefetch(step, point, view)
            if keys is not None and len(keys):
                layer = keys // GEOMETRY.experts
                score = (self.expected.ravel()[keys] + 1e-8) * (1 - (layer - point) / GEOMETRY.layers)
                seen.append((np.diff(score) <= 1e-15).all())
            return keys

    run(options(ahead=6), slots=30, cls=Checked)
    assert len(seen) > 50
    assert all(seen)


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_are_on_their_way_than_asked_for(ahead):
    flying = []

    class Checked(Logged):
        @hookimpl
        def begin_step(self):
            super().begin_step()

        @hookimpl
        def evict(self, tier, need, candidates, view):
            flying.append(int(view.in_flight(np.flatnonzero(self.fresh)).sum()))
            return super().evict(tier, need, candidates, view)

    system, *_ = run(options(ahead=ahead), slots=20, cls=Checked)
    assert max(len(keys) for *_, keys, _ in system.reads) == ahead
    assert max(flying) <= ahead


def test_a_longer_window_lets_more_through():
    """Reads do not get faster; the time between layers grows."""
    most = {}
    for dense in (1e-4, 3e-3, 3e-2):
        system, *_ = run(MoeInfinityConfig(), make_trace(80, 2), dense_layer_s=dense)
        most[dense] = max(len(keys) for step, _, keys, _ in system.reads if step.phase == DECODE)
    assert most[1e-4] < most[3e-3] < most[3e-2]


def test_a_read_that_costs_more_to_start_than_it_may_save_is_left():
    """The host's time per load rises: fewer reads ahead, then none; a fixed number goes on at any cost."""
    reads = {}
    for host_s in (0.0, 4e-4, 3e-3):
        _, watch, _ = run(MoeInfinityConfig(), make_trace(80, 2), dense_layer_s=3e-3, load_host_s=host_s)
        reads[host_s] = total(watch, "prefetch_reads")
    assert reads[0.0] > reads[4e-4] > reads[3e-3] == 0
    _, watch, _ = run(options(ahead=2), make_trace(80, 2), dense_layer_s=3e-3, load_host_s=3e-3)
    assert total(watch, "prefetch_reads") > 0


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("host", [0, 8])
def test_what_was_read_ahead_leaves_for_a_demand_only_and_then_last(law, host):
    system, *_ = run(options(replace=law, ahead=4), slots=14, host=host)
    ahead = [v for v in system.victims if v[0] == "device" and v[2]]
    demand = [v for v in system.victims if v[0] == "device" and not v[2]]
    assert ahead
    assert demand
    for _, victims, _, fresh, _ in ahead:
        assert not any(fresh[key] for key in victims)
    for _, victims, _, fresh, candidates in demand:
        lost = [key for key in victims if fresh[key]]
        if lost:
            plain = [key for key in candidates if not fresh[key]]
            assert set(plain) <= set(victims)


def test_victims_of_the_papers_law_are_known():
    """Equal ratios: the deeper layer leaves; within a layer the lower ratio; what was never used before all."""
    activity = Activity(2, 4)
    activity.ratio = np.array([[0.5, 0.25, 0.25, 0.0], [0.5, 0.25, 0.25, 0.0]])
    law = Replacement("activation", activity)
    nobody = np.zeros(8, bool)
    order = law.worst(np.arange(8), 8, nobody).tolist()
    assert order[:2] == [7, 3]  # epsilon, deep before shallow
    assert order[2:4] == [5, 6]  # 0.125, the lower key first
    assert order[4:] == [4, 1, 2, 0]  # 0.25 thrice, epsilon telling the deeper one apart, then 0.5
    protected = np.isin(np.arange(8), [7, 3])
    assert law.worst(np.arange(8), 3, protected).tolist() == [5, 6, 4]
    assert law.worst(np.arange(8), 8, protected).tolist()[-2:] == [7, 3]


@pytest.mark.parametrize("law", LAWS)
def test_a_few_victims_are_those_of_the_whole_order(law):
    rng = np.random.default_rng(3)
    activity = Activity(6, 8)
    activity.ratio = rng.integers(0, 3, (6, 8)) / 3
    replacement = Replacement(law, activity)
    for _ in range(30):
        replacement.begin_step()
        replacement.access(rng.choice(48, 3, replace=False))
    keys, protected = rng.permutation(48)[:30], rng.random(30) < 0.2
    whole = replacement.worst(keys, 30, protected).tolist()
    for need in range(1, FEW + 4):
        assert replacement.worst(keys, need, protected).tolist() == whole[:need]


@pytest.mark.parametrize(("law", "policy"), [("lru", "lru"), ("incache", "lfu")])
def test_without_prefetch_two_laws_are_classic_caches(law, policy):
    """Dispatches that are never forgotten are plain frequency, whatever the name says."""

    class Classic:
        def __init__(self):
            self.policy = make_policy(policy, GEOMETRY.keys, 20, GEOMETRY.layers)

        @hookimpl
        def acquired(self, keys, ready):
            self.policy.access(keys, ready)

        @hookimpl
        def evict(self, need, candidates):
            return self.policy.victims(candidates, need)

    watch = Watch()
    trace = make_trace(160, 2)
    replay(trace, make_experts([Classic(), watch], slots=20), chunk=4)
    _, own, _ = run(options(prefetch=False, replace=law), trace)
    assert total(own, "demand_reads") == total(watch, "demand_reads") > 100


@pytest.mark.parametrize("law", LAWS)
def test_no_law_misses_less_than_belady(law):
    trace = make_trace(160, 2)
    events = []

    class Recorded:
        @hookimpl
        def acquired(self, keys):
            events.append(np.array(keys))

    replay(trace, make_experts([Recorded()], slots=48), chunk=4)
    best = make_policy("belady", GEOMETRY.keys, 20, GEOMETRY.layers, future=list(events))

    class Oracle:
        @hookimpl
        def acquired(self, keys, ready):
            best.access(keys, ready)

        @hookimpl
        def evict(self, need, candidates):
            return best.victims(candidates, need)

    bound, watch = Watch(), None
    replay(trace, make_experts([Oracle(), bound], slots=20), chunk=4)
    _, watch, _ = run(options(prefetch=False, replace=law), trace)
    misses = [sum(total(w, "demand_reads", phase) for phase in (PREFILL, DECODE)) for w in (bound, watch)]
    assert misses[0] <= misses[1]


@pytest.mark.parametrize("config", [options(), options(ahead=4), options(prefetch=False)])
def test_bytes_are_those_of_demand_and_prefetch_and_slots_never_change(config):
    """Hits cost no budget: the tier counts what it holds, and is as large at the end as at the start."""
    _, watch, experts = run(config, slots=18)
    reads = sum(r.demand_reads + r.prefetch_reads - r.cancelled for r in watch.records)
    assert sum(r.read_bytes for r in watch.records) == reads * GEOMETRY.slot_bytes
    assert experts.device.slots == 18
    assert experts.device.resident(np.arange(GEOMETRY.keys)).sum() <= 18


# --- what each mechanism moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["activation", "lru"])
def test_prefetch_turns_misses_into_hits_for_more_bytes(law):
    """On the committed trace: fewer demand reads and less stall, more bytes read."""
    off, on = (held_out(options(prefetch=p, replace=law)) for p in (False, True))
    assert total(on[1], "demand_reads") < total(off[1], "demand_reads")
    assert stalls(on[1]) < stalls(off[1])
    assert total(on[1], "read_bytes") > total(off[1], "read_bytes")
    assert off[0].report()["prefetched"] == 0
    assert 0 < on[0].report()["precision"] <= 1
    assert on[0].report()["coverage"] > 0


def test_earlier_requests_say_more_than_the_requests_own_counts():
    """On the committed trace matching covers more misses than extrapolating the request itself."""
    covered = {
        match: held_out(options(match=match, ahead=4))[0].report()["coverage"]
        for match in ("observed", "masked", "off")
    }
    assert covered["observed"] > covered["off"]
    assert covered["observed"] != covered["masked"]


def test_replacement_by_ratio_and_depth_keeps_shallow_layers():
    """Hits of the first half of the layers against those of the second, with and without the paper's law."""
    shares = {}
    for law in ("activation", "lru"):
        _, watch = held_out(options(prefetch=False, replace=law))
        hits = np.array([r.hits for r in watch.records if r.step.phase == DECODE]).sum(0)
        shares[law] = hits[:4].sum() / hits.sum()
    assert shares["activation"] > shares["lru"] + 0.1


def test_decay_forgets_what_was_hot_before():
    """Two requests that use different experts: frequency that decays follows, frequency that does not keeps reading."""
    first, second = make_trace(80, 1, seed=1), make_trace(80, 1, seed=2)
    moved = (second.experts + 6) % GEOMETRY.experts
    both = Trace(
        np.concatenate([first.experts, moved]).astype(np.int16), np.concatenate([first.phase, second.phase]),
        np.repeat(np.arange(2, dtype=np.int32), 80), np.concatenate([first.position, second.position]),
        metadata=first.metadata,
    )  # fmt: skip
    reads = {
        law: total(run(options(prefetch=False, replace=law), both, slots=16)[1], "demand_reads")
        for law in ("incache", "incache_decayed")
    }
    assert reads["incache_decayed"] < reads["incache"]


@pytest.mark.parametrize("update", ["nearest", "least_matched"])
def test_a_collection_kept_up_to_date_covers_what_it_did_not_know(update):
    """The collection knows other experts than the requests take; those that finish teach it."""
    trace = make_trace(240, 8)
    foreign = others()[:4, :, ::-1].copy()
    covered = {}
    for how in (update, "off"):
        config = options(update=how, ahead=3)
        system, *_ = run(config, trace, start=foreign, slots=20, dense_layer_s=2e-3)
        covered[how] = system.report()["precision"]
        assert system.report()["updated"] == (7 if how != "off" else 0)
        assert system.matcher.collection.size == 4
    assert covered[update] > covered["off"]


def test_a_collection_that_starts_empty_reads_nothing_ahead_until_a_request_ended():
    config = options(collection="empty", capacity=4, ahead=3)
    system, *_ = run(config, make_trace(120, 4), start=np.zeros((0, 4, 12)))
    firsts = [step.index for step, *_ in system.reads]
    assert firsts
    assert min(firsts) > 20  # the first request's two chunks and 24 tokens
    assert system.matcher.collection.size == 3


def test_persistent_entries_stay():
    start = others()[:3]
    config = options(update="least_matched", persistent=2)
    system, *_ = run(config, start=start)
    held = system.matcher.collection
    for at in range(2):
        assert held.ratio(at) == pytest.approx(start[at] / start[at].sum(1, keepdims=True), abs=1e-6)
    assert held.ratio(2) != pytest.approx(start[2] / start[2].sum(1, keepdims=True), abs=1e-6)


def test_matching_costs_time_and_costs_more_with_more_entries():
    def seconds(entries, byte_s, **changes):
        start = np.resize(others(), (entries, 4, 12))
        _, watch, _ = run(
            options(ahead=1, update="off", **changes), make_trace(40), start=start, byte_s=byte_s, slots=48
        )
        return total(watch, "duration_s") - total(watch, "stall_s")

    few, many = (seconds(n, 1e-7) - seconds(n, 0.0) for n in (10, 400))
    assert many > few + 1e-3 > 1e-3
    free = run(options(prefetch=False), byte_s=0.0), run(options(prefetch=False), byte_s=1e-7)
    assert total(free[0][1], "duration_s") == total(free[1][1], "duration_s")


def test_only_what_is_worth_more_than_what_the_host_alone_holds_is_copied_down():
    """The paper's law leaves copies out; the others copy every victim."""

    class All(Logged):
        @hookimpl
        def demote(self, keys, view):
            return None

    trace, sizes = make_trace(200, 4), {"slots": 28, "host": 6}
    selective, watch, _ = run(options(prefetch=False), trace, **sizes)
    asked = [stay for stay in selective.demoted if stay is not None]
    assert asked
    assert not np.concatenate(asked).all()
    _, every, _ = run(options(prefetch=False), trace, cls=All, **sizes)
    assert total(watch, "copies") < total(every, "copies")
    everything, *_ = run(options(prefetch=False, replace="lru"), trace, **sizes)
    assert everything.demoted
    assert all(stay is None for stay in everything.demoted)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ahead": -1}, "system.ahead must be 0 or more"),
        ({"prefetch": False, "match": "masked"}, "system.match and system.ahead have an effect"),
        ({"prefetch": False, "ahead": 2}, "system.match and system.ahead have an effect"),
        ({"match": "off", "update": "off"}, "system.update, capacity and collection have an effect"),
        ({"prefetch": False, "capacity": 9}, "system.update, capacity and collection have an effect"),
        ({"persistent": 2}, "system.persistent has an effect"),
        ({"collection": "empty", "update": "off"}, "stays empty"),
    ],
)
def test_an_option_without_effect_is_refused(changes, word):
    with pytest.raises(UsageError, match=word):
        options(**changes)


def test_it_says_what_it_is():
    spec = load_plugins().system("moe_infinity")
    assert spec.fidelity(MoeInfinityConfig()) == "advisory"
    assert spec.fidelity(options(prefetch=False)) == "exact"
    for found in spec.published:
        assert found.hw == "a5000_24gb"
        assert found.where(options(prefetch=False, replace="incache"))
        assert not found.where(MoeInfinityConfig())
        (value, source) = found.metrics["decode_tok_s"]
        assert 1 / value == pytest.approx(float(source.rpartition(": ")[2]))
    assert isinstance(spec.make(options(prefetch=False), replace_run()), MoeInfinity)


def replace_run():
    return replace(RunContext(GEOMETRY, 20, "shared"), equipment=context(options(prefetch=False)).equipment)
