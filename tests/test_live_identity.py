"""Exact systems give the very bits of everything resident: for any cache size, engine, layout, order, tier and
policy.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_fixtures import Adversary, Watch, costs
from torch_models import make_backend, native_model

from moebench.backends.torch_bytes import TorchCpuLayout
from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_source import TransformersSource
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop, seeded_sampler
from moebench.engine.movement import Rules
from moebench.plugins import load_plugins
from moebench.residency.tier import Tier
from moebench.store.engines import StoreError, open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_pack
from moebench.systemspec import RunContext
from moebench.timeline.filled import FilledTimeline
from moebench.timeline.wall import WallTimeline

LAYOUTS = ("packed", "checkpoint", "ordered")
PROMPTS = [[3, 14, 15, 92, 6, 5], [35, 8], [9, 79, 32, 38]]
TOKENS = 10


class Lab:
    """One tiny model, its packs in all layouts, and a backend; runs prompts under any plugin, engine and size."""

    def __init__(self, folder, quant) -> None:
        model = native_model("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
        source = TransformersSource(model, "bfloat16")
        self.packs = {}
        for layout in LAYOUTS:
            order = np.random.default_rng(1).permutation(16) if layout == "ordered" else None
            self.packs[layout] = write_pack(
                folder / layout, source, QuantSpec(quant), TorchCpuLayout(), layout=layout, order=order
            )
        self.geometry = geometry_of(source.model["config"], source.model["name"], quant)
        self.backend = make_backend(self.packs["packed"], dtype="bfloat16")

    def run(
        self, plugins=(), slots=None, scope="shared", layout="packed", engine="pread", host=0, clock="wall",
        sampler=None, prompts=PROMPTS, chunk=4, full=False, late=False, pool=0, keep_landed=True, scratch=0, **options,
    ):  # fmt: skip
        """Tokens and the logits behind each, for one batch of prompts."""
        pack, geometry = self.packs[layout], self.geometry
        slots = slots or geometry.keys

        def tier(name, count, by):
            arena = aligned_buffer(count * pack.slot_bytes).reshape(count, pack.slot_bytes)
            arena[:] = 0xFF  # poison: bytes nobody loaded are NaN
            return Tier(name, count, pack.slot_bytes, geometry.layers, geometry.experts, by, arena)

        tiers = [tier("device", slots, scope)] + ([tier("host", host, "shared")] if host else [])
        beside = tier("scratch", scratch, "shared") if scratch else None
        arenas = {t.name: t for t in [*tiers, *([beside] if beside else [])]}
        reader = open_engine(engine, pack, **options)
        make = WallTimeline if clock == "wall" else lambda r, b: FilledTimeline(costs(), r, b)
        timeline = make(reader, lambda name, slot: arenas[name].arena[slot])
        try:
            rules = Rules(bool(host) and keep_landed, keep_landed, late, pool)
            experts = Experts(geometry, tiers, timeline, Hooks(list(plugins)), rules, scratch=beside)
            if full:
                experts.preload()
            loop = Loop(self.backend, experts, chunk)
            keep = {"sampler": sampler} if sampler else {}
            out = loop.generate(prompts, TOKENS, keep_logits=True, **keep)
            experts.drain()
            experts.check_integrity()
        finally:
            timeline.close()
        return out.tokens, np.stack(out.logits)


@pytest.fixture(scope="module", params=["int4", "none"])
def lab(request, tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"), request.param)


@pytest.fixture(scope="module")
def resident(lab):
    return lab.run(full=True)


def check_same(one, two):
    assert one[0] == two[0]
    assert np.array_equal(one[1], two[1])


@pytest.mark.parametrize("scope", ["shared", "per_layer"])
@pytest.mark.parametrize("slots", [4, 7, 11, 16])
def test_any_cache_size_and_scope(lab, resident, slots, scope):
    spec = load_plugins().system("random")
    plugin = spec.make(spec.config(), RunContext(lab.geometry, slots, scope))
    check_same(lab.run([plugin], slots, scope), resident)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine", ["mmap", "pread", "direct"])
def test_any_engine_and_layout(lab, resident, engine, layout):
    try:
        check_same(lab.run(slots=5, layout=layout, engine=engine, threads=3), resident)
    except StoreError as error:
        pytest.skip(f"no direct reads here: {error}")


@pytest.mark.parametrize("seed", range(6))
def test_an_adversarial_policy_and_shuffled_late_completions(lab, resident, seed):
    options = {"engine": "faulty", "delay_s": 0.0005, "reorder": 3, "seed": seed, "threads": 3, "short_read": 0.2}
    check_same(lab.run([Adversary(seed)], 3 + seed, **options), resident)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("host", [3, 9])
def test_two_tiers_with_real_copies(lab, resident, host, clock):
    check_same(lab.run([Adversary(host)], 6, host=host, clock=clock), resident)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize(("pool", "keep_landed"), [(1, True), (2, False), (0, False)])
def test_few_buffers_and_a_host_tier_that_keeps_nothing(lab, resident, pool, keep_landed, clock):
    options = {"engine": "faulty", "delay_s": 0.0005, "reorder": 2} if clock == "wall" else {}
    run = lab.run([Adversary(pool)], 6, host=4, clock=clock, pool=pool, keep_landed=keep_landed, **options)
    check_same(run, resident)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("seed", range(3))
def test_experts_computed_on_the_host(lab, resident, seed, clock):
    check_same(lab.run([Adversary(seed)], 5 + seed, host=4, clock=clock, scratch=2), resident)


def test_modeled_time_moves_the_same_bytes(lab, resident):
    check_same(lab.run([Adversary(3)], 5, clock="virtual"), resident)


def test_a_seeded_sampler_gives_the_same_text_under_every_system(lab):
    one = lab.run(full=True, sampler=seeded_sampler(7))
    two = lab.run([Adversary(1)], 4, sampler=seeded_sampler(7))
    other = lab.run(full=True, sampler=seeded_sampler(8))
    check_same(one, two)
    assert one[0] != other[0]


def test_a_left_padded_batch_equals_each_prompt_alone(lab, resident):
    for index, prompt in enumerate(PROMPTS):
        tokens, logits = lab.run(slots=6, prompts=[prompt])
        assert tokens[0] == resident[0][index]
        assert np.array_equal(logits[:, 0], resident[1][:, index])


def test_padding_demands_nothing(lab):
    alone, padded = Watch(), Watch()
    lab.run([alone], prompts=[PROMPTS[0]], chunk=64)
    lab.run([padded], prompts=[PROMPTS[0], PROMPTS[0][-1:]], chunk=64)
    long, both = alone.records[0], padded.records[0]
    single = Watch()
    lab.run([single], prompts=[PROMPTS[0][-1:]], chunk=64)
    for layer in range(lab.geometry.layers):
        assert both.requests[layer] <= long.requests[layer] + single.records[0].requests[layer]


def test_a_bit_flip_on_storage_is_an_error_and_never_a_wrong_token(lab):
    with pytest.raises(StoreError, match="expert"):
        lab.run(slots=4, engine="faulty", bit_flip=0.3, seed=1)


def test_switching_an_expert_would_show(lab, resident):
    class Swap:
        """Executes a wrong expert: proves that the comparison above can fail."""

        from moebench.hookspecs import hookimpl

        @hookimpl
        def route(self, layer, native):
            from moebench.step import Routing

            return Routing((native.experts + 1) % 8, native.weights) if layer == 0 else None

    _, logits = lab.run([Swap()])
    assert not np.array_equal(logits, resident[1])
