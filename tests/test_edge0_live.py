"""Edge0 on a model that computes: heads see the right features, the prediction is the routing one token later, staging
never changes an output bit, and requests do not touch each other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from edge0_fixtures import LAW, live, random_heads, untrained
from engine_fixtures import Watch, costs, make_experts
from numpy_ops import NumpyOps
from torch_models import make_backend, native_model

from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_ops import TorchOps
from moebench.backends.torch_source import TransformersSource
from moebench.commands.record import RecordedSystem, RecordingExperts
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop, replay
from moebench.hookspecs import hookimpl
from moebench.residency.tier import Tier
from moebench.routing import law_of_config
from moebench.step import DECODE, Routing, Step
from moebench.store.engines import open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_pack
from moebench.systems.edge0 import Edge0, Edge0Config
from moebench.systems.edge0.equipment import equip
from moebench.systems.edge0.heads import Plan, consumers_from, head_parameters
from moebench.systems.edge0.predictor import Heads
from moebench.systemspec import RunContext, Target
from moebench.timeline.filled import FilledTimeline
from moebench.timeline.wall import WallTimeline

LAYERS, EXPERTS, TOP_K = 4, 8, 4
PROMPTS = [[3, 14, 15, 92, 6, 5], [35, 8], [9]]
TOKENS = 12


class Lab:
    """A tiny random model with its pack, and random heads."""

    def __init__(self, folder) -> None:
        model = native_model(
            "qwen3_moe", hidden_size=128, moe_intermediate_size=64, num_hidden_layers=LAYERS, num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
        )  # fmt: skip
        source = TransformersSource(model, "bfloat16")
        self.pack = write_pack(folder / "pack", source, QuantSpec("int4"), TorchCpuLayout())
        self.geometry = geometry_of(source.model["config"], source.model["name"], "int4")
        self.backend = make_backend(self.pack, dtype="bfloat16")

    def plan(self, top_k=2, first_token="gate") -> Plan:
        return Plan(LAYERS, top_k, consumers_from(1, LAYERS), first_token)

    def system(self, plan, slots=None, batch=1, scope="shared", seed=0, **options):
        heads = random_heads(plan, 128, EXPERTS, seed)
        return live(Edge0Config(**options), self.geometry, plan, heads, TorchOps(), slots or 32, scope, batch)

    def run(self, plugins, requests, slots=None, scope="shared", clock="wall"):
        """Tokens and logits of several requests, one batch each, in one session."""
        pack, geometry, slots = self.pack, self.geometry, slots or self.geometry.keys
        arena = aligned_buffer(slots * pack.slot_bytes).reshape(slots, pack.slot_bytes)
        arena[:] = 0xFF  # poison: bytes nobody loaded are NaN
        tier = Tier("device", slots, pack.slot_bytes, geometry.layers, geometry.experts, scope, arena)
        make = WallTimeline if clock == "wall" else lambda r, b: FilledTimeline(costs(), r, b)
        timeline = make(open_engine("pread", pack), lambda name, slot: tier.arena[slot])
        outs = []
        try:
            experts = Experts(geometry, [tier], timeline, Hooks(list(plugins)))
            loop = Loop(self.backend, experts, 4)
            for prompts in requests:
                out = loop.generate(prompts, TOKENS, keep_logits=True)
                outs.append((out.tokens, np.stack(out.logits)))
            experts.drain()
            experts.check_integrity()
        finally:
            timeline.close()
        return outs


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("edge0"))


def same(one, two):
    return one[0] == two[0] and np.array_equal(one[1], two[1])


@pytest.mark.parametrize("fill", ["staged_sync", "overlap", "eager"])
@pytest.mark.parametrize(("slots", "scope"), [(10, "shared"), (16, "per_layer"), (32, "shared")])
@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_staging_never_changes_a_bit(lab, fill, slots, scope, clock):
    plan = lab.plan()
    (reference,) = lab.run([lab.system(plan)], [PROMPTS[:1]])
    system = lab.system(plan, slots, scope=scope, fill=fill)
    (out,) = lab.run([system], [PROMPTS[:1]], slots, scope, clock)
    assert same(out, reference)
    assert np.isfinite(out[1]).all()
    counted = system.report()
    assert counted["dropped"] == 0
    assert counted["predicted_layers"] == 2 * (
        TOKENS - 2
    )  # the first token comes out of the prefill, the gate routes one


@pytest.mark.parametrize("first_token", ["gate", "heads"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[2:], PROMPTS])
def test_the_routing_is_what_heads_said_a_token_earlier(lab, first_token, prompts):
    """Against a reference that recomputes each prediction in double precision from what the owner saw."""
    plan = lab.plan(first_token=first_token)
    heads = {n: {p: a.astype(np.float64) for p, a in h.items()} for n, h in random_heads(plan, 128, EXPERTS).items()}
    system = lab.system(plan, batch=len(prompts))
    lab.run([system], [prompts])
    batch, past, checked = len(prompts), {}, 0
    predictions = {}
    erf = np.vectorize(__import__("math").erf)
    for step, layer, hidden, executed, native in system.seen:
        ids = executed.reshape(batch, -1, executed.shape[-1])
        if step.phase == DECODE and (step.index - 1, layer) in predictions:
            logits = predictions[step.index - 1, layer]
            order = np.sort(logits, axis=1)
            clear = step.valid & (order[:, -2] - order[:, -3] > 1e-3)  # no tie between chosen and not
            want = LAW.apply(logits.astype(np.float32), 2)
            assert np.array_equal(np.sort(ids[clear, 0]), np.sort(want.experts[clear]))
            checked += int(clear.sum())
        elif step.phase == DECODE:
            assert np.array_equal(ids[step.valid, 0], native[step.valid, :2])
        if layer not in plan.owners:
            continue
        many = np.zeros((batch, ids.shape[1], EXPERTS))
        for b in range(batch):
            for w in range(ids.shape[1]):
                many[b, w, [e for e in ids[b, w] if e >= 0]] = 1
        if step.phase == DECODE or first_token == "heads":
            before = many[:, -2] if ids.shape[1] > 1 else past.get(layer, np.zeros((batch, EXPERTS)))
            past[layer] = many[:, -1]
            if step.phase == DECODE or step.emits:
                h = hidden.reshape(batch, -1, 128)[:, -1].astype(np.float64)
                f = np.concatenate([h, many[:, -1], before], axis=1)
                inner = f @ heads[layer]["fc1"].T
                inner = inner * (1 + erf(inner / 2**0.5)) / 2
                predictions[step.index, layer + 1] = f @ heads[layer]["linear_init"].T + inner @ heads[layer]["fc2"].T
    assert checked > 15 * batch


def test_off_at_the_models_own_top_k_is_the_exact_path(lab):
    plan = lab.plan(top_k=TOP_K)
    (exact,) = lab.run([], [PROMPTS[:1]])
    for slots in (6, 32):
        (off,) = lab.run([lab.system(plan, slots, prerouter=False, lora=False)], [PROMPTS[:1]], slots)
        assert same(off, exact)


def test_off_at_a_smaller_top_k_is_the_routers_best(lab):
    class Best:
        @hookimpl
        def route(self, native):
            weights = native.weights.float().numpy()
            kept = weights[:, :2] * (weights.sum(1, keepdims=True) / weights[:, :2].sum(1, keepdims=True))
            return Routing(native.experts[:, :2], kept)

    (best,) = lab.run([Best()], [PROMPTS[:1]])
    (off,) = lab.run([lab.system(lab.plan(), prerouter=False, lora=False)], [PROMPTS[:1]])
    (exact,) = lab.run([], [PROMPTS[:1]])
    assert same(off, best)
    assert not same(off, exact)


def test_heads_decide_what_is_computed(lab):
    plan = lab.plan()
    (one,), (two,) = (lab.run([lab.system(plan, seed=seed)], [PROMPTS[:1]]) for seed in (0, 1))
    assert not same(one, two)


@pytest.mark.parametrize(("hidden", "experts", "parameters"), [(2048, 256, 2_097_152), (1536, 128, 1_212_416)])
def test_heads_of_the_published_models_have_the_published_size(hidden, experts, parameters):
    assert head_parameters(hidden, experts) == parameters


def test_an_untrained_head_is_the_next_layers_router():
    rng = np.random.default_rng(0)
    router, hidden = rng.standard_normal((8, 32)).astype(np.float32), rng.standard_normal((1, 32)).astype(np.float32)
    heads = Heads(Plan(3, 2, (1,)), {0: untrained(router)}, 8, LAW, NumpyOps(), "gate")
    step = Step(0, DECODE, np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, bool), 1)
    heads.begin(step)
    heads.observe(0, step, hidden, np.array([[5, 2]]))
    assert np.allclose(heads.logits([0])[0], hidden @ router.T, atol=1e-4)
    assert heads.evaluate([0], step)[1].tolist() == LAW.apply(hidden @ router.T, 2).experts.tolist()


def test_a_selection_bias_chooses_and_does_not_weigh():
    """Sigmoid families choose by score plus bias and weigh by score, predicted as native."""
    model = native_model("deepseek_v3")
    backend_bias = {0: np.zeros(8, np.float32), 1: np.linspace(-9, 9, 8, dtype=np.float32)}
    law = law_of_config(model.config.to_dict())
    rng = np.random.default_rng(0)
    router, hidden = rng.standard_normal((8, 32)).astype(np.float32), rng.standard_normal((1, 32)).astype(np.float32)
    step = Step(0, DECODE, np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, bool), 1)
    chosen = {}
    for name, bias in (("with", backend_bias), ("without", {})):
        heads = Heads(Plan(3, 2, (1,)), {0: untrained(router)}, 8, law, NumpyOps(), "gate", bias)
        heads.begin(step)
        heads.observe(0, step, hidden, np.array([[5, 2]]))
        chosen[name] = heads.evaluate([0], step)[1].tolist()
        heads.begin(step)
        want = law.apply(hidden @ router.T, 2, bias.get(1))
        assert chosen[name] == want.experts.tolist()
        assert np.allclose(heads.routing(1, step).weights, want.weights, atol=1e-5)
    assert set(chosen["with"][0]) == {6, 7} != set(chosen["without"][0])


def test_the_backend_tells_the_selection_bias(tmp_path):
    model = native_model("deepseek_v3")
    routers = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    for i, router in enumerate(routers):
        router.e_score_correction_bias.copy_(torch.arange(8.0) + i)
    pack = write_pack(tmp_path / "pack", TransformersSource(model, "bfloat16"), QuantSpec("none"), TorchCpuLayout())
    told = make_backend(pack, dtype="bfloat16").selection_bias()
    assert {layer: bias.tolist() for layer, bias in told.items()} == {i: [e + i for e in range(8)] for i in range(2)}


@pytest.mark.parametrize("fill", ["staged_sync", "overlap", "eager"])
@pytest.mark.parametrize("first_token", ["gate", "heads"])
def test_a_recorded_run_replays_as_it_ran(lab, fill, first_token):
    """The channel takes the heads' place: the same demands at the same layers, and the same hits and late joins."""
    plan = lab.plan(first_token=first_token)
    prompts = PROMPTS[:2]
    recorded = RecordedSystem("edge0", Hooks([lab.system(plan)]), replace(lab.geometry, top_k=2))
    recording = RecordingExperts(lab.pack, aligned_buffer(lab.pack.slot_bytes), recorded)
    loop = Loop(lab.backend, recording, 4)
    for recording.request, prompt in enumerate(prompts):
        loop.generate([prompt], TOKENS)
    trace = recording.recorder.trace({"model": "lab", "experts": EXPERTS, "source": "test"})
    ran, replayed = Watch(), Watch()
    lab.run([lab.system(plan, 12, fill=fill), ran], [[prompt] for prompt in prompts], 12, clock="virtual")
    config = Edge0Config(fill=fill)
    equipment = equip(config, Target("lab", lab.geometry, trace=trace))
    system = Edge0(config, RunContext(replace(lab.geometry, top_k=2), 12, "shared", equipment=equipment))
    experts = make_experts([system, replayed], slots=12, geometry=lab.geometry)
    replay(trace, experts, chunk=4)
    assert [event[:2] for event in ran.events] == [event[:2] for event in replayed.events]
    # after a request's last token heads stage for one that never comes, which no trace knows of
    first = LAYERS * (2 + TOKENS - 1)
    assert ran.events[:first] == replayed.events[:first]
    assert system.report()["predicted_layers"] == 2 * 2 * (TOKENS - (2 if first_token == "gate" else 1))
