"""Recording a system that replaces the routing: its choice is executed, the router's is kept beside it, hooks are
called in the loop's order, and without a system nothing is added.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from moebench.cli import main
from moebench.commands import trace as trace_command
from moebench.commands.record import RecordedSystem, RecordingExperts
from moebench.engine.hooks import Hooks
from moebench.errors import PluginError
from moebench.geometry import Geometry
from moebench.hookspecs import hookimpl
from moebench.plugins import load_plugins
from moebench.step import ABSENT, DECODE, PREFILL, Routing, Step
from moebench.systemspec import Equipment, SystemSpec
from moebench.trace.format import load

PLAIN = "fdde288f68fb44611eea27d7424cf1a5"  # as recorded before there were systems to record
GEOMETRY = Geometry("toy", layers=3, experts=8, top_k=3, hidden=4, intermediate=4, other_parameters=1)


@dataclass(frozen=True)
class EchoConfig:
    first: int = 1
    k: int = 2


class Echo:
    """From layer ``first`` on, decoded tokens execute the router's first k of the token before, decided ahead."""

    def __init__(self, config, top_k):
        self.config, self.top_k, self.calls, self.seen = config, top_k, [], {}

    @hookimpl
    def begin_request(self, sequences, view):
        self.calls.append("request")
        self.seen.clear()

    @hookimpl
    def begin_step(self, step, view):
        self.calls.append("begin_step")

    @hookimpl
    def prefetch(self, step, point, view):
        view.account(nbytes=1, syncs=1)
        self.calls.append(f"prefetch {point}")
        return [0]

    @hookimpl
    def route(self, step, layer, native, view):
        self.calls.append(f"route {layer}")
        last, self.seen[layer] = self.seen.get(layer), native.experts[-1:, : self.top_k]
        if step.phase == DECODE and layer >= self.config.first and last is not None:
            return Routing(last, np.full(last.shape, 1 / last.shape[1], np.float32), ahead=True)
        return Routing(native.experts[:, :1], None if native.weights is None else native.weights[:, :1])

    @hookimpl
    def acquired(self, layer, keys, ready, view):
        assert all(ready)
        assert view.resident(keys).all()
        assert not view.in_flight(keys).any()
        self.calls.append(f"acquired {layer}")

    @hookimpl
    def stage(self, step, view):
        self.calls.append("stage")
        return [0]

    @hookimpl
    def end_step(self, step, view):
        self.calls.append("end_step")


SPEC = SystemSpec(
    id="echo",
    title="Echo",
    summary="the token before",
    config=EchoConfig,
    make=lambda config, run: Echo(config, run.geometry.top_k),
    equip=lambda config, target: Equipment(top_k=config.k),
)


class FakePack:
    """Expert bytes are one: the key's."""

    experts = GEOMETRY.experts

    def read(self, key, buffer):
        buffer[0] = key


def run_steps(experts, ids):
    """Two prompt tokens in one pass, then one token each, for ids [T, L, k]; returns what was executed, by step."""
    executed = []
    experts.begin_request(np.arange(1))
    for index, rows in enumerate([slice(0, 2), *(slice(i, i + 1) for i in range(2, len(ids)))]):
        count = len(ids[rows])
        position = np.arange(len(ids), dtype=np.int32)[rows]
        phase = PREFILL if index == 0 else DECODE
        experts.begin(Step(index, phase, np.zeros(count, np.int32), position, np.ones(count, bool)))
        for layer in range(ids.shape[1]):
            native = Routing(ids[rows, layer], np.full((count, ids.shape[2]), 0.5, np.float32))
            routing, served = experts.serve(layer, None, native)
            expected = sorted(set(routing.experts.ravel().tolist()))
            assert [(e, int(b[0])) for e, b in served] == [(e, layer * GEOMETRY.experts + e) for e in expected]
            executed.append((rows, layer, routing))
        experts.end()
    return executed


def routed(tokens=6, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((tokens, GEOMETRY.layers, GEOMETRY.experts)).argsort(-1)[..., : GEOMETRY.top_k]


def recording(plugin=None, top_k=2):
    geometry = Geometry("toy", layers=3, experts=8, top_k=top_k, hidden=4, intermediate=4, other_parameters=1)
    system = plugin and RecordedSystem("echo", Hooks([plugin]), geometry)
    return RecordingExperts(FakePack(), np.zeros(1, np.uint8), system)


def test_the_channel_holds_what_was_executed_ahead_and_the_trace_what_the_router_said(tmp_path):
    ids, experts = routed(), recording(Echo(EchoConfig(), 2))
    executed = run_steps(experts, ids)
    trace = load(
        experts.recorder.trace({"model": "toy", "experts": 8, "source": "test"}).save(tmp_path / "t.safetensors")
    )
    assert np.array_equal(trace.experts, ids)
    assert (trace.weights == 0.5).all()
    channel = trace.channels["predicted.echo"]
    assert channel.dtype == np.int16
    expected = np.full((6, 3, 2), ABSENT)
    expected[2:, 1:] = ids[1:-1, 1:, :2]
    assert np.array_equal(channel, expected)
    for rows, layer, routing in executed:
        if routing.ahead:
            assert np.array_equal(routing.experts, channel[rows, layer])


def test_hooks_are_called_in_the_loops_order():
    plugin = Echo(EchoConfig(), 2)
    run_steps(recording(plugin), routed(3))
    layers = [f"{name} {layer}" for layer in range(3) for name in ("route", "acquired", "prefetch")]
    step = ["begin_step", "prefetch begin", *layers, "prefetch end", "stage", "end_step"]
    assert plugin.calls == ["request", *step, *step]


def test_without_a_system_only_the_routing_is_recorded():
    ids = routed()
    plain, echoed = recording(), recording(Echo(EchoConfig(first=3), 2))
    assert all(routing.experts.shape[1] == 3 for _, _, routing in run_steps(plain, ids))
    run_steps(echoed, ids)
    one, other = (e.recorder.trace({"model": "toy", "experts": 8, "source": "test"}) for e in (plain, echoed))
    assert not one.channels
    assert one.hash == PLAIN
    assert np.array_equal(one.experts, other.experts)
    assert (other.channels["predicted.echo"] == ABSENT).all()


def test_a_routing_of_another_width_is_named():
    with pytest.raises(PluginError, match=r"echo routed \(1, 3\) ahead, expected \(1, 2\)"):
        run_steps(recording(Echo(EchoConfig(), 3)), routed())


@pytest.fixture
def registry(monkeypatch):
    """A registry that knows echo, for the command line too."""
    known = load_plugins()
    known.add("systems", "echo", SPEC, "test")
    monkeypatch.setattr(trace_command, "load_plugins", lambda: known)


def test_a_system_is_recorded_from_the_command_line(registry, tmp_path, capsys):
    words = ["trace", "record", "requests=2", "new_tokens=4"]
    assert main([*words, f"out={tmp_path / 'plain'}"]) == 0
    assert main([*words, f"out={tmp_path / 'echo'}", "system=echo", "system.k=3", "system.first=5"]) == 0
    plain, echo = load(tmp_path / "plain"), load(tmp_path / "echo")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["hash"] == echo.hash
    assert not plain.channels
    assert "system" not in plain.metadata
    assert echo.metadata["system"] == {"id": "echo", "first": 5, "k": 3}
    assert echo.experts.shape[1:] == plain.experts.shape[1:]
    channel = echo.channels["predicted.echo"]
    assert channel.shape == (*echo.experts.shape[:2], 3)
    before = np.flatnonzero(echo.phase == DECODE) - 1
    assert len(before)
    assert np.array_equal(channel[before + 1, 5:], echo.experts[before, 5:, :3])
    assert (channel[echo.phase == PREFILL] == ABSENT).all()
    assert (channel[:, :5] == ABSENT).all()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["system=nobody"], "unknown system 'nobody'"),
        (["system=echo", "system.x=1"], "valid: first, k"),
        (["system.k=1"], "needs system=NAME"),
        (["system=lru"], "the model's own routing"),
    ],
)
def test_wrong_use_is_one_line(registry, words, hint, tmp_path, capsys):
    assert main(["trace", "record", f"out={tmp_path / 'x'}", "requests=1", "new_tokens=2", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
