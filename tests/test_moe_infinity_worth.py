"""MoE-Infinity's mechanisms one by one: each moves the observable it is there for."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Watch, costs, make_experts, make_trace
from moe_infinity_fixtures import Logged, context, options, others, run, total

from moebench.engine.loop import replay
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.step import DECODE
from moebench.systems.moe_infinity import MoeInfinity, MoeInfinityConfig
from moebench.systems.moe_infinity.counting import count
from moebench.systemspec import RunContext
from moebench.timeline.virtual import VirtualTimeline
from moebench.trace.format import Trace, load

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
        own = options(prefetch=False, replace="incache")
        assert found.where(own, SimpleNamespace(quant="none"))
        assert not found.where(own, SimpleNamespace(quant="int4"))
        assert not found.where(MoeInfinityConfig(), SimpleNamespace(quant="none"))
        (value, source) = found.figures()["decode_tok_s"]
        assert 1 / value == pytest.approx(float(source.rpartition(": ")[2]))
    assert isinstance(spec.make(options(prefetch=False), replace_run()), MoeInfinity)


def replace_run():
    return replace(RunContext(GEOMETRY, 20, "shared"), equipment=context(options(prefetch=False)).equipment)
