"""SpecPrefetch on a model that computes: no mode, budget or fault changes a bit, adapters see what routers see, and a
recorded trace replays what was predicted live.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from engine_fixtures import Watch, costs
from numpy_ops import NumpyOps
from specprefetch_fixtures import MODES, artefact
from specprefetch_fixtures import TINY as GEOMETRY
from torch_models import make_backend, native_model

import moebench
from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_ops import TorchOps
from moebench.backends.torch_source import TransformersSource
from moebench.cli import main
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop, replay
from moebench.engine.movement import Rules
from moebench.errors import UsageError
from moebench.harness.passes import DemandLog
from moebench.hookspecs import hookimpl
from moebench.residency.tier import Tier
from moebench.routing import softmax
from moebench.step import DECODE
from moebench.store.block_queue import DEMAND
from moebench.store.engine_threads import PreadEngine
from moebench.store.engines import ReadEngine, StoreError, open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_pack
from moebench.systems.specprefetch import SpecPrefetch, SpecPrefetchConfig
from moebench.systems.specprefetch.adapters import Shape
from moebench.systems.specprefetch.artefact import check, find, load, save
from moebench.systems.specprefetch.equipment import equip
from moebench.systems.specprefetch.predictor import Computed
from moebench.systemspec import RunContext, Target
from moebench.timeline.filled import FilledTimeline
from moebench.timeline.virtual import VirtualTimeline
from moebench.timeline.wall import WallTimeline
from moebench.trace.format import load as load_trace

PROMPTS = [[3, 14, 15, 92, 6, 5], [35, 8]]
TOKENS = 8


class Lab:
    """A tiny random model with its pack, and random adapters for it."""

    def __init__(self, folder):
        model = native_model("qwen3_moe", hidden_size=64, num_hidden_layers=4, num_experts=8, moe_intermediate_size=64)
        source = TransformersSource(model, "bfloat16")
        self.pack = write_pack(folder / "pack", source, QuantSpec("int4"), TorchCpuLayout())
        self.geometry = geometry_of(source.model["config"], source.model["name"], "int4")
        self.backend = make_backend(self.pack, dtype="bfloat16")
        self.target = Target("small", self.geometry, "abc")
        self.folder = save(artefact(), folder / "art")

    def run(
        self,
        slots=None,
        clock="wall",
        host=0,
        batch=1,
        observers=(),
        cls=SpecPrefetch,
        full=False,
        **options,
    ):
        """Tokens, logits and the plugin of one batch of prompts; without options nothing is read ahead."""
        pack, geometry, slots = self.pack, self.geometry, slots or self.geometry.keys
        if options.get("mode", "adapter") in ("pred0", "gate_replay", "adapter", "adversarial"):
            options["artefact"] = str(self.folder)
        config, future = SpecPrefetchConfig(**options), None
        if config.mode == "oracle":
            self.run(slots, clock, host, batch, [log := DemandLog()], mode="off")
            future = log.demands
        equipment = equip(config, self.target)
        system = cls(config, RunContext(geometry, slots, "shared", 0, future, batch, TorchOps(), equipment))

        def tier(name, count):
            arena = aligned_buffer(count * pack.slot_bytes).reshape(count, pack.slot_bytes)
            arena[:] = 0xFF  # poison: bytes nobody loaded are NaN
            return Tier(name, count, pack.slot_bytes, geometry.layers, geometry.experts, "shared", arena)

        tiers = [tier("device", slots)] + ([tier("host", host)] if host else [])
        arenas = {t.name: t for t in tiers}
        make = WallTimeline if clock == "wall" else lambda r, b: FilledTimeline(costs(), r, b)
        timeline = make(open_engine("pread", pack, threads=1), lambda name, slot: arenas[name].arena[slot])
        try:
            experts = Experts(geometry, tiers, timeline, Hooks([system, *observers]), Rules(bool(host)))
            if clock == "virtual":
                experts.read_estimate_s = timeline.costs.read_s[1]
            if full:
                experts.preload()
            out = Loop(self.backend, experts, 4).generate(PROMPTS[:batch], TOKENS, keep_logits=True)
            experts.drain()
            experts.check_integrity()
        finally:
            timeline.close()
        return out.tokens, np.stack(out.logits), system


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("specprefetch"))


@pytest.fixture(scope="module")
def reference(lab):
    return {batch: lab.run(mode="off", batch=batch, full=True) for batch in (1, 2)}


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("mode", MODES)
def test_no_mode_and_no_budget_changes_a_bit(lab, reference, mode, clock):
    """S1: logits and tokens, for any M, horizon, tier and batch."""
    arms = [{}] if mode in ("off", "pred0") else [{}, {"m": 1}, {"m": 8, "window": False}]
    arms += [] if mode == "off" else [{"horizon": 2}]
    for more in arms:
        for slots, host, batch in ((5, 0, 1), (12, 4, 2)):
            tokens, logits, system = lab.run(slots, clock, host, batch, mode=mode, **more)
            assert tokens == reference[batch][0]
            assert np.array_equal(logits, reference[batch][1])
            if not more.get("window", True):
                assert system.report()["issued"] > 0


def test_predictions_are_the_formula_over_what_the_router_saw(lab):
    seen = []

    class Seen(SpecPrefetch):
        @hookimpl
        def route(self, step, layer, hidden, native, view):
            super().route(step, layer, hidden, native, view)
            if step.phase == DECODE:
                rows = {lag: self.rows[layer + lag, lag] for lag in (1, 2) if (layer + lag, lag) in self.rows}
                seen.append((layer, hidden.float().numpy()[step.valid], rows))

    lab.run(batch=2, cls=Seen, horizon=2)
    made = load(lab.folder)
    assert len(seen) == 4 * (TOKENS - 1)
    for layer, x, rows in seen:
        assert set(rows) == {lag for lag in (1, 2) if layer + lag < 4}
        for lag, said in rows.items():
            a, b = (m.astype(np.float64) for m in made.adapters[f"layers.{layer}.h{lag}"])
            z = x @ made.gates[layer + lag].astype(np.float64).T + x @ a.T @ b.T
            assert np.allclose(said, softmax(z), atol=1e-5)


@pytest.mark.parametrize("ops", [TorchOps(), NumpyOps()])
@pytest.mark.parametrize("kind", ["pairs", "shared"])
def test_an_untrained_adapter_is_the_replayed_router_bit_for_bit(ops, kind):
    """S4, and rows do not touch each other."""
    made = artefact(Shape(4, 8, 64, 4, 2, kind), zero_b=True)
    x = ops.tensor(np.random.default_rng(1).standard_normal((3, 64)))
    for layer in range(3):
        said, replayed = (
            Computed(made, ops, 2, adapter, True).logits(layer, x, np.arange(3)) for adapter in (True, False)
        )
        assert np.array_equal(said, replayed)
        alone = Computed(made, ops, 2, True, True).logits(layer, x, np.array([2]))
        assert np.array_equal(said[:, 2:], alone)


def test_a_prefetch_that_always_fails_changes_nothing(lab, reference, monkeypatch):
    """S10."""
    submit, watch = PreadEngine.submit, Watch()

    def broken(self, key, buffer, priority):
        if priority == DEMAND:
            return submit(self, key, buffer, priority)
        failed: Future[int] = Future()
        failed.set_exception(StoreError("unreadable"))
        return failed

    monkeypatch.setattr(PreadEngine, "submit", broken)
    monkeypatch.setattr(PreadEngine, "submit_all", ReadEngine.submit_all)
    for clock in ("wall", "virtual"):
        tokens, logits, _ = lab.run(6, clock, observers=[watch], window=False)
        assert tokens == reference[1][0]
        assert np.array_equal(logits, reference[1][1])
    assert sum(r.lost for r in watch.records) > 20


def test_files_come_back_as_they_were_and_foreign_ones_are_refused(lab, tmp_path, monkeypatch):
    made = load(lab.folder)
    again = load(save(made, tmp_path / "again"))
    assert again.shape == made.shape
    assert again.provenance == made.provenance
    assert all(
        np.array_equal(x, y) for n in made.adapters for x, y in zip(made.adapters[n], again.adapters[n], strict=True)
    )
    for change, word in (
        ({"weights_hash": "other"}, "weights abc"), ({"geometry": replace(lab.geometry, top_k=1)}, "K 2"),
        ({"geometry": replace(lab.geometry, layers=5)}, "layers 4"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=rf"{word}.*moebench prepare"):
            check(made, replace(lab.target, **change), 1)
    one = save(artefact(Shape(4, 8, 64, 4)), tmp_path / "one")
    with pytest.raises(UsageError, match="looks 1 layer ahead"):
        check(load(one), lab.target, 2)
    with pytest.raises(UsageError, match="base=next_gate, not none"):
        equip(SpecPrefetchConfig(base="none", artefact=str(one)), lab.target)
    (one / "adapters.safetensors").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"adapters\.safetensors: no readable header.*prepare or import"):
        load(one)
    monkeypatch.setenv("MOEBENCH_HOME", str(tmp_path))
    save(made, tmp_path / "artefacts" / "specprefetch" / "a")
    assert find(lab.target, "pairs", "next_gate", 0, 2).name == find(lab.target, None, None, 0, 1).name == "a"
    with pytest.raises(UsageError, match=r"rank=5; there are pairs next_gate of rank 4, horizon 2; make it: moebench"):
        find(lab.target, "pairs", "next_gate", 5, 1)


TINY = {"hw": "m4pro", "model": "tinymoe", "quality": "none", "workload": {"requests": 2, "new_tokens": 24}}


@pytest.fixture(scope="module")
def tiny():
    arms = {"gate_replay": {}, "adapter": {}, "naive_prev_token": {}, "shared": {"adapters": "shared"}, "oracle": {}}
    rows = {}
    for name, more in arms.items():
        options = {"mode": "adapter" if name == "shared" else name, **more}
        (rows[name],) = moebench.run(system="specprefetch", **{f"system.{k}": v for k, v in options.items()}, **TINY)
    return rows


def test_the_shipped_adapters_predict_held_out_prompts_best(tiny):
    """S5."""
    recall = {name: row.protocol["counters"]["recall_at_4"] for name, row in tiny.items()}
    assert recall["adapter"] > recall["gate_replay"] > recall["naive_prev_token"] > 4 / 32
    assert recall["oracle"] == 1.0
    assert recall["adapter"] > max(recall["gate_replay"], recall["shared"]) + 0.03
    assert tiny["oracle"].protocol["counters"]["wasted"] == 0
    assert "(system.mode=oracle)" in " ".join(tiny["oracle"].assumptions)
    assert {row.fidelity for row in tiny.values()} == {"advisory"}


def test_a_recording_replays_what_was_predicted_live(tiny, tmp_path, capsys):
    out = tmp_path / "t.safetensors"
    words = [f"out={out}", "system=specprefetch", "system.horizon=2", "requests=2", "new_tokens=24"]
    assert main(["trace", "record", *words]) == 0
    capsys.readouterr()
    trace = load_trace(out)
    channel = trace.channels["predicted.specprefetch"]
    decoded = trace.phase == DECODE
    assert set(trace.channels) == {"predicted.specprefetch", "predicted.specprefetch_lag2"}
    assert (channel[~decoded] == -1).all()
    assert (channel[:, 0] == -1).all()
    assert (np.sort(channel[decoded][:, 1:], axis=2) == np.arange(32)).all()
    assert (trace.channels["predicted.specprefetch_lag2"][:, :2] == -1).all()
    geometry = GEOMETRY
    equipment = equip(SpecPrefetchConfig(), Target("x", geometry, trace=trace))
    assert not any("surrogate" in note for note in equipment.assumptions)
    system = SpecPrefetch(SpecPrefetchConfig(), RunContext(geometry, 256, "shared", equipment=equipment))
    tier = Tier("device", 256, geometry.slot_bytes, 8, 32)
    replay(trace, Experts(geometry, [tier], VirtualTimeline(costs()), Hooks([system])), 1, 32)
    live = tiny["adapter"].protocol["counters"]
    for name in ("predictions", "recall_at_2", "recall_at_4", "recall_at_6", "exact_set"):
        assert system.report()[name] == live[name]
