"""What a calibration takes of a model's passes, on a clock that only planted costs move: each shows where it was
planted, and nowhere else.
"""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from moebench.probes import live
from moebench.probes.live import Passes, Resident
from moebench.probes.record import Record
from moebench.probes.samples import Alternating, Samples
from moebench.step import Routing

LAYERS, TOP_K, HEAD_S, DENSE_S, EXPERT_S = 3, 2, 5e-3, 2e-3, 1e-3


class Model:
    """A backend and a read engine whose costs are planted: ``cold_s`` of a layer that waited, ``again_s`` of each
    further wait.
    """

    def __init__(self, cold_s: float = 0.0, again_s: float = 0.0) -> None:
        self.cold_s, self.again_s, self.now, self.waits, self.begun, self.landing_s = cold_s, again_s, 0.0, 0, 0, 0.0
        self.pack = SimpleNamespace(keys=8, slot_bytes=4096)
        self.opening_s = self.adapters_s = 0.0
        self.adapted = False

    def reset(self, batch):
        pass

    def install(self):
        self.adapted = True
        return self

    def remove(self):
        self.adapted = False

    def forward(self, step, tokens, server):
        self.now += self.landing_s * self.begun
        self.now += self.adapters_s * self.adapted
        experts = np.tile(np.arange(TOP_K), (step.rows, 1))
        for layer in range(LAYERS):
            self.now += DENSE_S + self.opening_s * (step.position[0] == 0)
            self.waits = 0
            _, coming = server.serve(layer, None, Routing(experts, np.ones(experts.shape, np.float32)))
            for _ in coming:
                self.now += EXPERT_S * step.rows
            self.now += self.cold_s * (self.waits > 0) + self.again_s * max(0, self.waits - 1)
        self.now += HEAD_S
        return np.zeros((1, 4))

    def submit_all(self, keys, buffers, priority):
        self.begun = len(keys)
        return [Waited(self) for _ in keys]


class Waited(Future):
    """A read that takes a second of whoever waits for it."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def result(self, timeout=None):
        self.model.now += 1.0
        self.model.waits += 1


def passes(model, monkeypatch, expert_s=lambda rows: 0.0) -> Passes:
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: model.now))
    found = object.__new__(Passes)
    found.backend, found.vocabulary, found.expert_s = model, 4, expert_s
    found._generator, found.server = np.random.default_rng(0), object.__new__(Resident)
    found.server.pack, found.server.buffers = SimpleNamespace(experts=TOP_K), [b""] * LAYERS * TOP_K
    found.server.hold = None
    found.server.clear(np.ones(1, bool))
    return found


@pytest.mark.parametrize("rows", [1, 4])
def test_a_pass_is_the_sum_of_layers_experts_and_the_rest(rows, monkeypatch):
    for known in (0.0, EXPERT_S):
        found = passes(Model(), monkeypatch, lambda rows, known=known: known * rows)
        for parts in found.sample(1, rows, 0.0):
            assert parts == pytest.approx((DENSE_S * 1e6, HEAD_S * 1e6, rows * (EXPERT_S - known) * 1e6), abs=1e-3)


@pytest.mark.parametrize(("cold_s", "again_s"), [(0.0, 0.0), (3e-3, 0.0), (0.0, 2e-3), (3e-3, 2e-3)])
def test_what_the_first_wait_of_a_layer_adds_is_told_from_what_the_next_adds(cold_s, again_s, monkeypatch):
    model = Model(cold_s, again_s)
    first, more = passes(model, monkeypatch).waits(model, 4, 0.0)
    assert first.median == pytest.approx(cold_s * 1e6, abs=1e-3)
    assert more.median == pytest.approx(again_s * 1e6, abs=1e-3)


def test_what_reads_take_of_a_pass_is_counted_for_each(monkeypatch):
    model = Model()
    model.landing_s = 4e-3
    assert passes(model, monkeypatch).beside(model, 2, 4, 0.0).median == pytest.approx(4000)


def test_a_pass_that_begins_a_sequence_is_told_from_later_ones(monkeypatch):
    model = Model()
    model.opening_s = 7e-3
    found = passes(model, monkeypatch, lambda rows: EXPERT_S * rows)
    assert [parts.layer for parts in found.first(4, 0.0)] == [pytest.approx((DENSE_S + 7e-3) * 1e6)]
    assert {round(parts.layer) for parts in found.sample(2, 4, 0.0)} == {round(DENSE_S * 1e6)}


def test_what_adapters_add_is_counted_for_each_and_none_stay(monkeypatch):
    model = Model()
    model.adapters_s = 1.5e-4
    found = passes(model, monkeypatch).adapted(model.install, 3, 4, 0.0)
    assert found.median == pytest.approx(50)
    assert not model.adapted


def test_of_what_alternates_a_profile_has_the_mean_and_of_the_rest_the_median():
    record = Record("2026-01-01", 1.0, lambda share, what: None)
    assert record.number(Samples((1.0, 1.0, 7.0)), "us", "x")["value"] == 1
    turns = Alternating((1.0,)) + Alternating((1.0, 7.0))
    assert record.number(turns, "us", "x")["value"] == 3
    assert record.table({(1, 1): turns}, "x", ("context", "row_counts"), "us")["rows"] == [[3]]
