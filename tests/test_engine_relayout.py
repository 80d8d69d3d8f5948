"""Experts change places while a run goes on: only resident ones, one swap at a time, within the budget, in time that
reads leave free; nothing that is computed changes, and whatever is read comes from where the map says.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from engine_fixtures import GEOMETRY, Watch, costs, make_experts, make_trace
from harness_fixtures import SHORT, make_host, mini, plugin  # noqa: F401 - fixtures
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live_identity import PROMPTS, TOKENS, Lab, check_same

import moebench
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop, replay
from moebench.engine.movement import Rules
from moebench.engine.relayout import ModeledMover, Relayout
from moebench.errors import PluginError, UsageError
from moebench.hookspecs import hookimpl
from moebench.residency.places import Places
from moebench.residency.tier import Tier
from moebench.store.engines import open_engine
from moebench.store.overlay import Overlay
from moebench.store.pages import aligned_buffer
from moebench.store.relocate import RelocatingEngine
from moebench.timeline.base import DEMAND, PREFETCH
from moebench.timeline.filled import FilledTimeline
from moebench.timeline.virtual import VirtualTimeline
from moebench.timeline.wall import WallTimeline

UNIT = 4096
WRITES = {"write_unit_bytes": UNIT, "write_unit_s": 1e-4}


class Mover:
    """Moves whatever two experts of a layer are in memory, at random, and reads neighbours together."""

    def __init__(self, seed=0):
        self.rng, self.asked, self.said = np.random.default_rng(seed), [], []

    @hookimpl
    def relayout(self, step, view):
        self.asked.append(step.index)
        each = view.geometry.experts
        layer = int(self.rng.integers(view.geometry.layers))
        keys = layer * each + np.arange(each)
        there = keys[np.any([view.resident(keys, tier) for tier in view.tiers], axis=0)]
        if len(there) < 2:
            return None
        self.said.append(tuple(self.rng.choice(there, 2, replace=False).tolist()))
        return self.said[-1]

    @hookimpl
    def plan_reads(self, keys, view):
        keys = sorted(keys, key=lambda key: view.position([key])[0])
        place = view.position(keys)
        cuts = np.flatnonzero(np.diff(place) != 1) + 1
        return [part.tolist() for part in np.split(np.array(keys), cuts)]


def modeled(plugins, budget, seed=0, host=0, slots=20, **changes):
    """A replay with swaps; returns its records, its relayout and its experts."""
    timeline, watch = VirtualTimeline(costs(**{**WRITES, **changes}), Places.in_order(GEOMETRY.keys)), Watch()
    mover = ModeledMover(timeline, GEOMETRY.expert_bytes)
    relayout = Relayout(mover, GEOMETRY.expert_bytes, budget, warmup_tokens=4)
    experts = make_experts([*plugins, watch, relayout], slots, host=host, timeline=timeline)
    experts.places, experts.relayout, watch.experts = timeline.places, relayout, experts
    replay(make_trace(40, 2, 4, seed), experts)
    return watch.records, relayout, experts


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), swaps=st.integers(0, 30), host=st.sampled_from([0, 7]), slots=st.integers(4, 48))
def test_swaps_stay_within_the_budget_and_end_in_the_map(seed, swaps, host, slots):
    plugin = Mover(seed)  # noqa: F811
    budget = swaps * 2 * GEOMETRY.expert_bytes + GEOMETRY.expert_bytes
    records, relayout, experts = modeled([plugin], budget, seed, host, slots)
    assert len(plugin.asked) == len(set(plugin.asked))  # once a step at most
    assert len(plugin.said) <= swaps
    expected = Places.in_order(GEOMETRY.keys)
    for pair in plugin.said[: relayout.swaps]:
        expected.swap(*pair)
    np.testing.assert_array_equal(experts.view.position(np.arange(GEOMETRY.keys)), expected.place)
    assert relayout.swaps in (len(plugin.said), len(plugin.said) - 1)
    written = relayout.mover.written_bytes
    assert sum(r.relocated_bytes for r in records) == written <= len(plugin.said) * 2 * GEOMETRY.expert_bytes
    assert written >= relayout.swaps * 2 * GEOMETRY.expert_bytes
    report = relayout.report()
    assert report["relocated_mib"] == written / 2**20
    assert report["relocation_s"] == pytest.approx(written / UNIT * 1e-4)
    after = [r for r in records if r.step.phase][4:]  # one token a step, four of warm-up
    assert report["relocated_mib_per_token"] == pytest.approx(
        sum(r.relocated_bytes for r in after) / 2**20 / len(after)
    )


def test_without_a_budget_nobody_is_asked_and_nothing_is_written():
    plugin = Mover()  # noqa: F811
    records, _, experts = modeled([plugin], 0)
    assert not plugin.asked
    assert not sum(r.relocated_bytes for r in records)
    np.testing.assert_array_equal(experts.places.place, np.arange(GEOMETRY.keys))
    moved = modeled([plugin], 10**9)
    assert plugin.asked
    assert moved[1].swaps > 3


def test_what_a_system_may_not_move_is_refused():
    class Says:
        def __init__(self, *pair):
            self.pair = pair

        @hookimpl
        def relayout(self, view):
            there = view.resident(np.arange(GEOMETRY.keys)).reshape(GEOMETRY.layers, -1)
            layer = int(np.flatnonzero(there.any(1) & ~there.all(1))[0])
            names = {"here": there[layer].argmax(), "away": there[layer].argmin()}
            return [layer * 12 + int(names[key]) if key in names else key for key in self.pair]

    for pair, words in (
        (("here", "here"), "only exchange two of one layer"),
        ((0, 12), "only exchange two of one layer"),
        ((47, 48), "expert 48; keys are .* 0 to 47"),
        (("here", "away"), "not in memory"),
    ):
        with pytest.raises(PluginError, match=words):
            modeled([Says(*pair)], 10**9, slots=12)


ACTION = st.tuples(st.sampled_from(["demand", "prefetch", "compute", "write", "promote"]), st.integers(1, 6))


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTION, max_size=40), st.floats(1e-5, 3e-3))
def test_a_demand_waits_for_one_unit_at_most_and_writes_take_only_time_that_is_free(actions, unit_s):
    """The same reads with and without writes: each later by the rest of one unit for each demand at most."""
    changes = {"write_unit_bytes": UNIT, "write_unit_s": unit_s}
    pair = VirtualTimeline(costs(**changes)), VirtualTimeline(costs(**changes))
    written, issued, demands, aheads = [], 0, 0, []
    for name, size in actions:
        reads, keys = [[], []], list(range(issued, issued + size))
        if name in ("demand", "prefetch"):
            priority = DEMAND if name == "demand" else PREFETCH
            reads = [timeline.read(keys, keys, "device", priority) for timeline in pair]
        if name == "demand":
            demands += 1
            stalls = [[t.wait(ticket) for ticket in mine] for t, mine in zip(pair, reads, strict=True)]
            backlog = any(ticket.done_s is None for ticket, _ in aheads)
            if not backlog and not any(t._queue for t in pair):
                assert sum(stalls[0]) <= sum(stalls[1]) + unit_s + 1e-9
        elif name == "prefetch":
            aheads += zip(*reads, strict=True)
        elif name == "promote" and aheads:
            demands += 1
            for timeline, ticket in zip(pair, aheads.pop(), strict=True):
                timeline.wait(ticket)
        elif name == "compute":
            for timeline in pair:
                timeline.compute_experts(size, size)
        elif name == "write":
            written.append(pair[0].write(size * UNIT - 100))
        issued += size
        assert pair[0].now() <= pair[1].now() + (demands + len(aheads)) * unit_s + 1e-9
    assert pair[0].writes.written_bytes <= sum(ticket.nbytes for ticket in written)
    for _ in range(3 * len(actions)):
        pair[0].compute_experts(100, 100)  # nobody reads
    assert all(pair[0].is_ready(ticket) for ticket in written)
    assert pair[0].writes.written_bytes == sum(ticket.nbytes for ticket in written)
    ends = [ticket.done_s for ticket in written]
    assert ends == sorted(ends)


def test_a_unit_under_way_is_ended_and_the_next_one_waits_for_the_read():
    timeline = VirtualTimeline(costs(write_unit_bytes=UNIT, write_unit_s=1e-3))
    write = timeline.write(3 * UNIT)
    timeline.compute_experts(15, 15)  # 1.5 ms: amid the second unit
    (read,) = timeline.read([0], [0], "device", DEMAND)
    assert timeline.wait(read) == pytest.approx(0.5e-3 + 1e-3)
    assert timeline.writes.written_bytes == 2 * UNIT
    assert not timeline.is_ready(write)
    timeline.compute_experts(9, 9)
    assert not timeline.is_ready(write)
    timeline.compute_experts(2, 2)
    assert timeline.is_ready(write)
    assert write.done_s == pytest.approx(read.done_s + 1e-3)


def test_writes_stand_behind_prefetches_but_a_unit_that_was_begun_is_not_broken_off():
    timeline = VirtualTimeline(costs(write_unit_bytes=UNIT, write_unit_s=1e-3))
    write = timeline.write(2 * UNIT)
    timeline.compute_experts(4, 4)  # 0.4 ms: amid the first unit
    ahead = timeline.read([0, 1], [0, 1], "device", PREFETCH)
    timeline.compute_experts(50, 50)
    assert timeline.is_ready(write)
    ends = [timeline.is_ready(ticket) and ticket.done_s for ticket in ahead]
    assert ends == pytest.approx([1.5e-3, 2e-3])
    assert write.done_s == pytest.approx(3e-3)


def test_reads_that_coalesce_where_swaps_brought_experts_together():
    """Experts 0 and 6 of every layer are always read together: next to each other they take one request."""

    class Gather(Mover):
        @hookimpl
        def relayout(self, view):
            for layer in range(view.geometry.layers):
                a, b = layer * 12 + 5, layer * 12
                if view.position([layer * 12 + 6])[0] - view.position([b])[0] != 1 and view.resident([a, b]).all():
                    return a, b
            return None

        @hookimpl
        def evict(self, need, candidates):
            return self.rng.permutation(candidates)[:need]

    rows = np.zeros((200, 4, 3), np.int16)
    rows[:] = np.where(np.arange(200)[:, None, None] % 2, [0, 6, 11], [5, 3, 9])
    trace = make_trace(200, 1, 4)
    trace = type(trace)(rows, trace.phase, trace.sequence, trace.position, metadata=trace.metadata)
    requests = {}
    for budget in (0, 10**9):
        timeline = VirtualTimeline(costs(**WRITES), Places.in_order(GEOMETRY.keys))
        relayout = Relayout(ModeledMover(timeline, GEOMETRY.expert_bytes), GEOMETRY.expert_bytes, budget)
        experts = make_experts([Gather(), relayout], 16, "per_layer", timeline=timeline)
        experts.places, experts.relayout = timeline.places, relayout
        replay(trace, experts)
        requests[budget] = timeline.storage_requests
    assert requests[10**9] < requests[0]


# --- real bytes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), "int4")


@pytest.mark.parametrize("layout", ["packed", "ordered"])
@pytest.mark.parametrize("engine", ["pread", "direct", "modeled"])
def test_a_live_run_whose_experts_keep_changing_places_computes_the_same(lab, tmp_path, engine, layout):
    pack, geometry, slots = lab.packs[layout], lab.geometry, 6
    arena = aligned_buffer(slots * pack.slot_bytes).reshape(slots, pack.slot_bytes)
    tier = Tier("device", slots, pack.slot_bytes, geometry.layers, geometry.experts, arena=arena)
    places = Places(pack.position(np.arange(pack.keys)))

    def buffer(name, slot):
        return arena[slot]

    if engine == "modeled":
        timeline = FilledTimeline(costs(**WRITES), open_engine("pread", pack), buffer, places)
        mover = ModeledMover(timeline, pack.expert_bytes)
    else:
        overlay = Overlay.create(pack, tmp_path)
        mover = RelocatingEngine(open_engine(engine, overlay), overlay)
        timeline = WallTimeline(mover, buffer)
    relayout = Relayout(mover, pack.expert_bytes, 10**9)
    try:
        experts = Experts(geometry, [tier], timeline, Hooks([Mover(3), relayout]), Rules(), places)
        experts.relayout = relayout
        loop = Loop(lab.backend, experts, 4)
        for _ in range(3):
            out = loop.generate(PROMPTS, TOKENS, keep_logits=True)
            check_same((out.tokens, np.stack(out.logits)), lab.run(full=True))
            if engine != "modeled":
                np.testing.assert_array_equal(places.place, overlay.place)
        experts.drain()
        assert relayout.swaps > 0
        assert relayout.report()["relocated_mib"] * 2**20 >= relayout.swaps * 2 * pack.expert_bytes
        if engine != "modeled":
            mover.check_integrity()
    finally:
        timeline.close()
    assert not list(tmp_path.glob("*/*"))


SYSTEM = """
from dataclasses import dataclass
import numpy as np
from moebench.hookspecs import hookimpl
from moebench.systemspec import Handling, SystemSpec

@dataclass(frozen=True)
class Config:
    budget: int = 10**9

class Restless:
    def __init__(self, run):
        self.rng = np.random.default_rng(run.seed)

    @hookimpl
    def relayout(self, view):
        keys = np.arange(view.geometry.keys)
        here = keys[np.any([view.resident(keys, tier) for tier in view.tiers], axis=0)]
        layer = here // view.geometry.experts
        mine = here[layer == self.rng.choice(layer)]
        return self.rng.choice(mine, 2, replace=False) if len(mine) > 1 else None

@hookimpl
def register_systems(register):
    register(SystemSpec(id="restless", title="Restless", summary="moves experts about", config=Config,
        make=lambda config, run: Restless(run), handling=lambda config: Handling(relocation_bytes=config.budget)))
"""


def test_a_system_that_moves_experts_runs_modeled_and_measured(mini, plugin, tmp_path):  # noqa: F811
    plugin("restless", SYSTEM)
    make_host(tmp_path / "home")
    for hw in ("m4pro", "rtx5090_32gb", "host"):
        (row,) = moebench.run(system="restless", hw=hw, model="mini", budget="0.5", quality="none", **SHORT)
        assert row.status == "ok", row.error
        counters = row.protocol["counters"]
        assert counters["swaps"] > 0, hw
        assert 0 < counters["relocated_mib_per_token"] < counters["relocated_mib"]
        assert counters["relocation_s"] > 0
        options = {**SHORT, "system.budget": 0}
        (still,) = moebench.run(system="restless", hw=hw, model="mini", budget="0.5", quality="none", **options)
        assert "swaps" not in still.protocol["counters"]
        assert still.protocol["slots"]["device"] - row.protocol["slots"]["device"] == 2  # the experts of a swap
    left = tmp_path / "home" / "overlays"
    assert [path for path in left.iterdir() if path.is_dir()] == []
    json.dumps(counters)


def test_layouts_without_one_place_per_expert_are_refused(mini, plugin):  # noqa: F811
    plugin("restless", SYSTEM)
    for options in ({"layout": "checkpoint"}, {"codec": "rans"}):
        with pytest.raises(UsageError, match=r"restless re-organises storage, which needs layout=packed or layout=ord"):
            moebench.run(system="restless", hw="m4pro", model="mini", quality="none", **options, **SHORT)
