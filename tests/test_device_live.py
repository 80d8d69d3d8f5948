"""The loop on a device of its own memory: right answers whatever moves, whenever its streams do their work."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from engine_fixtures import Adversary
from simulated_device import LATE, NOW, RACE, OnCard, SimDevice
from torch_models import native_model

from moebench.backends.device import DeviceSlots
from moebench.backends.torch_device_model import DeviceBackend, DeviceLayout
from moebench.backends.torch_geometry import geometry_of
from moebench.backends.torch_source import TransformersSource
from moebench.engine.acquire import Experts
from moebench.engine.hooks import Hooks
from moebench.engine.loop import Loop
from moebench.engine.movement import Rules
from moebench.hookspecs import hookimpl
from moebench.residency.tier import Tier
from moebench.step import Routing
from moebench.store.engines import StoreError, open_engine
from moebench.store.layout import QuantSpec
from moebench.store.pack import Pack
from moebench.store.pages import aligned_buffer
from moebench.store.writer import write_pack
from moebench.timeline.moves import DeviceMoves
from moebench.timeline.wall import WallTimeline

PROMPTS, TOKENS = [[3, 14, 15, 92, 6, 5], [35, 8]], 5


class Lab:
    """A tiny model and its packs by codec; runs prompts on simulated devices."""

    def __init__(self, folder) -> None:
        source = TransformersSource(native_model("qwen3_moe"), "bfloat16")
        self.packs = {
            codec: write_pack(folder / codec, source, QuantSpec("none"), DeviceLayout(), codec=codec)
            for codec in ("none", "rans")
        }
        self.geometry = geometry_of(source.model["config"], source.model["name"], "none")

    def run(self, when, plugins=(), slots=None, host=4, codec="none", scratch=0, slots_class=DeviceSlots, keep=True):
        pack, geometry, device = self.packs[codec], self.geometry, SimDevice(when)
        options = {"dtype": "bfloat16", "numerics": "fast"}
        coded = {"coded": True} if pack.coded else {}
        try:
            with OnCard(), open_engine("pread", pack, threads=2, **coded) as reader:
                backend = DeviceBackend(device, pack, pack.dense_path, pack.manifest.model["config"], **options)
                apart, size = slots_class(device, aligned_buffer), max(pack.slot_bytes, reader.buffer_bytes)

                def tier(name, count):
                    arena = apart.tier(name, count, size)
                    return Tier(name, count, size, geometry.layers, geometry.experts, "shared", arena)

                tiers = [tier("device", slots or geometry.keys), tier("host", host)]
                beside = tier("scratch", scratch) if scratch else None
                timeline = WallTimeline(reader, lambda name, at: apart.tiers[name][at], DeviceMoves(reader, apart))
                try:
                    experts = Experts(
                        geometry, tiers, timeline, Hooks(list(plugins)), Rules(keep, keep), scratch=beside
                    )
                    out = Loop(backend, experts, 4).generate(PROMPTS, TOKENS, keep_logits=True)
                    experts.drain()
                    experts.check_integrity()
                finally:
                    timeline.close()
                assert not device.pinned
        finally:
            device.close()
        return out.tokens, np.stack(out.logits)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def resident(lab):
    return lab.run(lambda stream, index: NOW)


def check_same(one, two):
    assert one[0] == two[0]
    assert np.array_equal(one[1], two[1])


@pytest.mark.parametrize(
    ("seed", "changes"),
    enumerate([{}, {"codec": "rans"}, {"scratch": 2}, {"keep": False}, {"host": 9, "slots": 3}]),
)
def test_any_policy_any_order_of_streams(lab, resident, seed, changes):
    rng = np.random.default_rng(seed)
    options = {"slots": 5, **changes}
    check_same(
        lab.run(lambda stream, index: (NOW, LATE, RACE)[rng.integers(3)], [Adversary(seed)], **options), resident
    )


class Unordered(DeviceSlots):
    """Starts work on a slot whatever else is under way there."""

    def _order(self, stream, other, event):
        pass


class Careless(DeviceSlots):
    """Lets storage be read into a host slot that is still being copied up."""

    def host_writes(self, places):
        pass


@pytest.mark.parametrize(("slots_class", "slow"), [(Unordered, "up"), (Unordered, "compute"), (Careless, "up")])
def test_a_wait_that_is_left_out_shows_in_the_answers(lab, resident, slots_class, slow):
    def when(stream, index):
        return LATE if stream == slow else NOW

    few = {"slots": 4, "host": 2, "keep": False}
    check_same(lab.run(when, [Adversary(0)], **few), resident)
    assert not np.array_equal(lab.run(when, [Adversary(0)], slots_class=slots_class, **few)[1], resident[1])


class First:
    """Sends the first layer to one expert."""

    @hookimpl
    def route(self, layer, native):
        return Routing(np.zeros_like(native.experts[:, :1]), native.weights[:, :1]) if layer == 0 else None


def test_a_damaged_coded_expert_is_an_error_and_never_a_wrong_token(lab, tmp_path):
    whole = lab.packs["rans"]
    shutil.copytree(whole.path, tmp_path / "damaged")
    with open(tmp_path / "damaged" / "experts.bin", "r+b") as file:
        file.seek(whole.manifest.offsets[0] + whole.manifest.lengths[0] - 9)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    lab.packs["damaged"] = Pack.open(tmp_path / "damaged")
    lab.run(lambda stream, index: NOW, [First()], codec="rans")
    with pytest.raises(StoreError, match="layer 0, expert 0"):
        lab.run(lambda stream, index: NOW, [First()], codec="damaged")
