"""What a row says of its time: parts that add up, steps, a timeline that has no holes, and what the hooks took."""

from __future__ import annotations

import dataclasses
import math
import sys
from itertools import count, pairwise

import pytest
from harness_fixtures import MINI, SHORT, make_host, mini, plugin  # noqa: F401 - fixtures

import moebench
from moebench.engine import hooks
from moebench.harness import details
from moebench.plugins import load_plugins
from moebench.result import to_json
from moebench.timeline.base import PARTS
from moebench.timeline.virtual import VirtualTimeline

REPLAY = {"model": "mini", "hw": "m4pro", "budget": "0.4", "quality": "none", **SHORT}
WAITS = ("stall", "copy", "decode")
SYSTEMS = sorted(load_plugins().systems)


@pytest.fixture
def inline(monkeypatch):
    """Measured cells run in this process."""
    monkeypatch.setattr(sys.modules["moebench.harness.run"], "isolated", lambda work, *given: work(*given))


def replayed(**options):
    (row, *_) = moebench.run(**{"system": "lru", **REPLAY, **options})
    assert row.status == "ok", row.error
    return row


def check_parts(row) -> None:
    """The split is of the window that ``steps`` shows, and its waits are the metric's."""
    steps, split = row.details["steps"], row.details["split_ms_per_token"]
    assert tuple(split) == PARTS
    assert len(set(map(len, steps.values()))) == 1
    tokens = sum(steps["tokens"])
    assert sum(split.values()) == pytest.approx(sum(steps["ms"]) / tokens, rel=2e-5)
    assert min(split.values()) >= 0
    stall = row.metrics["stall_ms_per_token"].value
    assert sum(split[part] for part in WAITS) == pytest.approx(stall, rel=1e-5, abs=1e-9)
    assert sum(steps["stall_ms"]) / tokens == pytest.approx(stall, rel=1e-5, abs=1e-9)
    requests = row.metrics["hit_rate"].n
    hits, late = (row.metrics[name].value for name in ("hit_rate", "late_rate"))
    assert sum(steps["misses"]) == pytest.approx(requests * (1 - hits - late))


def microseconds(row, *lanes: str, until: float = math.inf) -> float:
    """Of all events in these lanes."""
    timeline = row.details["timeline"]
    events = [event for event in timeline["events"] if timeline["lanes"][event[0]] in lanes]
    return sum(max(0.0, min(took, until - start)) for _, _, start, took in events)


@pytest.mark.parametrize("hw", ["m4pro", "rtx5090_32gb", "snapdragon_8_elite_gen5"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_parts_of_a_modeled_token_add_up(mini, system, hw):  # noqa: F811
    unfitted = {"system.net": "none"} if system == "flashmoe" else {}
    row = replayed(system=system, hw=hw, budget="0.7", **unfitted)
    check_parts(row)
    speed = row.metrics["decode_tok_s"].value
    assert sum(row.details["split_ms_per_token"].values()) == pytest.approx(1e3 / speed, rel=2e-5)


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({"system": "resident"}, set()),
        ({"system": "ondemand"}, {"stall"}),
        ({"system": "ondemand", "device_budget": "0.6", "budget": "0.9"}, {"stall", "copy"}),
        ({"system": "ondemand", "codec": "rans", "hw": "m2_16gb"}, {"stall", "decode"}),
    ],
)
def test_what_is_waited_for_has_a_name(mini, options, waits):  # noqa: F811
    split = replayed(**options).details["split_ms_per_token"]
    assert {part for part in WAITS if split[part]} == waits


@pytest.mark.parametrize("options", [{}, {"device_budget": "0.6", "budget": "0.8"}], ids=["one", "two"])
def test_the_parts_of_a_measured_replay_are_waits_and_the_loop(mini, tmp_path, inline, options):  # noqa: F811
    make_host(tmp_path / "home")
    row = replayed(hw="host", **options)
    assert row.protocol["clock"] == "wall"
    check_parts(row)
    split = row.details["split_ms_per_token"]
    assert split["compute"] == 0
    assert split["overhead"] > 0
    assert bool(split["copy"]) == bool(options)


def test_the_parts_of_a_measured_live_run_have_compute(mini, tmp_path, inline):  # noqa: F811
    make_host(tmp_path / "home")
    short = {"workload.requests": 1, "workload.new_tokens": 8, "warmup_tokens": 2, "numerics": "fast"}
    row = replayed(hw="host", model="tinymoe", **short)
    check_parts(row)
    assert row.details["split_ms_per_token"]["compute"] > 0
    (ends, *_) = [start + took for start, took in row.details["timeline"]["steps"][-1:]]
    assert 0 < microseconds(row, "compute") < ends
    labels = [label for _, label, _, _ in row.details["timeline"]["events"]]
    assert {f"dense L{layer}" for layer in range(8)} <= set(labels)
    assert any(label.startswith("expert L7 E") for label in labels)


@pytest.mark.parametrize("hw", ["m4pro", "rtx5090_32gb"])
@pytest.mark.parametrize("system", ["lru", "edge0", "moe_infinity"])
def test_on_a_modeled_timeline_the_loop_is_never_without_work(mini, system, hw):  # noqa: F811
    row = replayed(system=system, hw=hw)
    timeline = row.details["timeline"]
    assert len(timeline["steps"]) == details.STEPS
    end = sum(timeline["steps"][-1])
    assert microseconds(row, "compute", "host", "wait") == pytest.approx(end, abs=0.1 * len(timeline["events"]))
    for lane in range(len(timeline["lanes"])):
        bars = sorted((start, took) for at, _, start, took in timeline["events"] if at == lane)
        for (start, took), (following, _) in pairwise(bars):
            assert start + took <= following + 0.2
        assert all(start >= 0 and start + took <= end + 0.2 for start, took in bars)
    stall = sum(row.details["steps"]["stall_ms"][: details.STEPS])
    assert microseconds(row, "wait") / 1e3 == pytest.approx(stall, abs=1e-4 * len(timeline["events"]))


def test_a_timeline_names_layers_and_experts(mini):  # noqa: F811
    row = replayed(system="ondemand", hw="rtx5090_32gb")
    labels = {label for _, label, _, _ in row.details["timeline"]["events"]}
    assert {"floor L0", "floor L3"} <= labels
    for what in ("read", "up", "link"):
        assert any(label.startswith(f"{what} L2 E") for label in labels)


def test_recording_changes_no_number(mini, monkeypatch):  # noqa: F811
    def numbers():
        row = replayed(system="edge0", hw="rtx5090_32gb")
        return row.metrics, row.details["steps"], row.details["split_ms_per_token"], row.details["timeline"]

    recorded = numbers()
    monkeypatch.setattr(VirtualTimeline, "log", property(lambda self: None, lambda self, log: None))
    unrecorded = numbers()
    assert recorded[3]["events"]
    assert not unrecorded[3].get("events")
    assert recorded[:3] == unrecorded[:3]


def test_a_crowded_timeline_keeps_its_times_and_its_bounds(mini, monkeypatch):  # noqa: F811
    full = replayed(system="ondemand")
    monkeypatch.setattr(details, "MOST_EVENTS", 60)
    few = replayed(system="ondemand")
    events, steps = (few.details["timeline"][name] for name in ("events", "steps"))
    assert len(events) <= 60 < len(full.details["timeline"]["events"])
    assert 1 <= len(steps) <= details.STEPS
    for lane in ("host", "wait", "storage"):
        assert microseconds(few, lane) == pytest.approx(microseconds(full, lane, until=sum(steps[-1])), rel=0.01)


def test_a_file_stays_small(mini):  # noqa: F811
    options = {"workload.requests": 4, "workload.new_tokens": 128, "warmup_tokens": 16}
    row = replayed(**options)
    assert len(row.details["steps"]["ms"]) == 4 * 127 - 16
    filler = [[1, "read L10 E100", 100000.1, 1000.1]] * details.MOST_EVENTS
    full = {**row.details, "timeline": {**row.details["timeline"], "events": filler}}
    assert len(to_json(dataclasses.replace(row, details=full))) < 100_000


# --- hooks ---------------------------------------------------------------------------------------------------------

COUNTING = """
from moebench.hookspecs import hookimpl
from moebench.systemspec import SystemSpec

class Counting:
    @hookimpl
    def acquired(self, keys): pass

    @hookimpl
    def begin_step(self, step): pass

    @hookimpl
    def prefetch(self, step, point): pass

@hookimpl
def register_systems(register):
    register(SystemSpec("counting", "Counting", "does nothing", lambda config, run: Counting()))
"""


def test_the_systems_own_hooks_are_counted_and_timed(mini, plugin, monkeypatch):  # noqa: F811
    ticks = count()
    monkeypatch.setattr(hooks, "perf_counter", lambda: float(next(ticks)))  # each hook takes a second
    plugin("counting", COUNTING)
    row = replayed(system="counting", budget="1.0")
    layers = MINI["layers"]
    calls = 1 + layers + (layers + 2)  # begin_step, acquired, prefetch at begin, layers and end
    assert row.volatile["hook_calls_per_token"] == calls
    assert row.volatile["hook_us_per_token"] == calls * 1e6
    assert "hook_us_per_token" not in row.details
