"""What only a card can show: the streams, events and page-locked memory of CUDA, and a model on them.

Skipped where there is no CUDA device; scripts/gpu_check.sh runs it where there is one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_programs import SLOTS, in_order
from torch_models import DictServer, make_backend, make_pack, native_model, run

from moebench.backends import cuda_state, torch_cuda
from moebench.backends.device import DeviceSlots
from moebench.backends.torch_device_model import DeviceBackend, DeviceLayout
from moebench.backends.torch_source import TransformersSource
from moebench.store import coded
from moebench.store.extents import place_parts
from moebench.store.layout import QuantSpec
from moebench.store.pages import aligned_buffer, open_direct
from moebench.store.random_parts import RandomParts
from moebench.store.writer import write_pack
from moebench.units import MIB

pytestmark = pytest.mark.skipif(cuda_state.refusal() is not None, reason=f"no card: {cuda_state.refusal()}")
TOKENS = np.random.default_rng(0).integers(0, 96, (1, 9))


@pytest.fixture
def slots():
    made = DeviceSlots(torch_cuda.CudaDevice(), aligned_buffer)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(20))
def test_any_program_gives_what_order_gives(slots, seed):
    """The programs of the simulated device, with copies long enough to overlap."""
    nbytes, rng = 8 * MIB, np.random.default_rng(seed)
    card, host = slots.tier("device", SLOTS, nbytes), slots.tier("host", SLOTS, nbytes)
    host[:] = 0
    for slot in card:
        slot.data.fill_(255)
    slots.device.compute.record().synchronize()
    kinds = ("read", "up", "down", "compute")
    program = [(kinds[rng.integers(4)], *(int(i) for i in rng.integers(0, SLOTS, 2))) for _ in range(60)]
    seen = []
    for what, a, b in program:
        if what == "read":
            slots.host_writes([("host", a)])
            host[a] = b + 1
        elif what == "up":
            slots.upload(("host", a), ("device", b), nbytes)
        elif what == "down":
            slots.download(("device", a), ("host", b), nbytes)
        else:
            seen.append(torch.zeros(2, dtype=torch.uint8, device=slots.device.at))

            def look(out=seen[-1], data=card[a].data):
                out.copy_(torch.stack([data.amin(), data.amax()]))

            card[a].compute(look)
    slots.device.compute.record().synchronize()
    wanted = in_order([(w, a, b + 1 if w == "read" else b) for w, a, b in program])
    assert [pair.tolist() for pair in seen] == [[value, value] for value in wanted]


def test_files_are_read_past_the_page_cache_into_page_locked_slots(slots, tmp_path):
    import os

    data = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    card, host = slots.tier("device", 1, MIB), slots.tier("host", 1, MIB)
    assert torch.from_numpy(host).is_pinned()
    handle = open_direct(tmp_path / "file")
    os.preadv(handle, [host[0]], 0)
    os.close(handle)
    slots.upload(("host", 0), ("device", 0), MIB)
    slots.host_writes([("host", 0)])
    assert np.array_equal(card[0].data.cpu().numpy(), data)


def test_rans_is_decoded_on_the_card(slots):
    parts = RandomParts(128, 64, QuantSpec()).draw(np.random.Generator(np.random.SFC64(0)))
    specs = place_parts(parts)
    plain = np.zeros(specs[-1].offset + specs[-1].nbytes, np.uint8)
    for spec in specs:
        plain[spec.offset : spec.offset + spec.nbytes] = parts[spec.name].reshape(-1).view(np.uint8)
    stored = coded.encode(specs, plain)
    card, host = slots.tier("device", 1, 2 * plain.size), slots.tier("host", 1, 2 * plain.size)
    host[0, : stored.size] = stored
    out = np.empty_like(plain)
    slots.decode(("host", 0), ("device", 0), stored.size, out)
    assert np.array_equal(out, plain)
    assert np.array_equal(card[0].data[: plain.size].cpu().numpy(), plain)


class Passing(DictServer):
    """Serves every expert through two device slots in turn."""

    def __init__(self, pack, slots, shuffle=None):
        super().__init__(pack, shuffle)
        self.slots, self.nbytes, self.turn = slots, pack.expert_bytes, 0
        if "device" not in slots.tiers:
            for name in ("device", "host"):
                slots.tier(name, 2, pack.slot_bytes)

    def items(self, layer, demand):
        for expert in demand if self.shuffle is None else self.shuffle.permutation(demand).tolist():
            self.turn = 1 - self.turn
            self.slots.host_writes([("host", self.turn)])
            self.slots.tiers["host"][self.turn] = self.buffers[layer * self.experts + expert]
            self.slots.upload(("host", self.turn), ("device", self.turn), self.nbytes)
            yield expert, self.slots.tiers["device"][self.turn]


def logits_of(backend, server):
    backend.reset(1)
    return [run(backend, server, TOKENS[:, :8], all_rows=True), run(backend, server, TOKENS[:, 8:], past=[8])]


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_model_answers_as_on_the_processor_in_any_order_of_arrival(slots, tmp_path, family, kind):
    model, quant = native_model(family), QuantSpec(kind, 32)
    source = TransformersSource(model, "bfloat16")
    pack = write_pack(tmp_path / "card", source, quant, DeviceLayout())
    config, options = pack.manifest.model["config"], {"dtype": "bfloat16", "numerics": "fast"}
    backend = DeviceBackend(slots.device, pack, pack.dense_path, config, **options)
    got = logits_of(backend, Passing(pack, slots))
    for seed in range(3):
        again = logits_of(backend, Passing(pack, slots, np.random.default_rng(seed)))
        assert all(map(np.array_equal, got, again))
    own = make_pack(tmp_path, model, quant, "bfloat16")
    wanted = logits_of(make_backend(own, dtype="bfloat16"), DictServer(own))
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(a - b).max() <= 0.05 * np.abs(b).max()
