"""A model on a device of its own memory gives the processor's numbers, whenever its streams do their work: no tensor of
the host meets one of the device, no expert is computed on before it has arrived, none is overwritten while it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated_device import CARD, LATE, NOW, RACE, OnCard, SimDevice
from torch_models import DictServer, make_backend, make_pack, native_model, run

from moebench.backends import probe
from moebench.backends.base import BackendError
from moebench.backends.device import DeviceSlots
from moebench.backends.torch_device import plain_kernel, transient_bytes
from moebench.backends.torch_device_model import DeviceBackend, DeviceLayout
from moebench.backends.torch_source import TransformersSource
from moebench.store.layout import LayoutError, LogicalTensor, QuantSpec, TensorSpec
from moebench.store.pages import aligned_buffer
from moebench.store.quant import dequantize, quantize
from moebench.store.writer import write_pack

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 9))
QUANTS = {"none": QuantSpec("none"), "int8": QuantSpec("int8"), "int4": QuantSpec("int4", 32)}


def plain_pack(folder, model, quant="none", dtype="bfloat16"):
    return write_pack(folder / "plain", TransformersSource(model, dtype), QUANTS[quant], DeviceLayout())


def on_card(pack, device, dtype="bfloat16", **options):
    config = pack.manifest.model["config"]
    return DeviceBackend(device, pack, pack.dense_path, config, **{"dtype": dtype, "numerics": "fast", **options})


class SlotServer(DictServer):
    """Serves every expert through two device slots in turn, each filled anew while the last one may still compute."""

    def __init__(self, pack, device, shuffle=None):
        super().__init__(pack, shuffle)
        self.nbytes, self.slots = pack.expert_bytes, DeviceSlots(device, aligned_buffer)
        self.card = self.slots.tier("device", 2, pack.slot_bytes)
        self.host = self.slots.tier("host", 2, pack.slot_bytes)
        self.turn = 0

    def items(self, layer, demand):
        for expert in demand if self.shuffle is None else self.shuffle.permutation(demand).tolist():
            self.turn += 1
            at = self.turn % 2
            self.slots.host_writes([("host", at)])
            self.host[at] = self.buffers[layer * self.experts + expert]
            self.slots.upload(("host", at), ("device", at), self.nbytes)
            yield expert, self.card[at]


@pytest.fixture
def device():
    """Makes devices whose streams work as told."""
    made = []

    def make(when=lambda stream, index: NOW):
        made.append(SimDevice(when))
        return made[-1]

    with OnCard():
        yield make
    for each in made:
        each.close()


def logits_of(backend, server, tokens=TOKENS):
    """Prefill of 6 tokens with padding, a window of 2, one step: all rows of all passes."""
    backend.reset(len(tokens))
    valid = np.ones((len(tokens), 6), bool)
    valid[-1, :2] = False
    out = [run(backend, server, tokens[:, :6], valid=valid, all_rows=True)]
    for first, last in ((6, 8), (8, 9)):
        past = [first - 2 * (b == len(tokens) - 1) for b in range(len(tokens))]
        out.append(run(backend, server, tokens[:, first:last], past=past, all_rows=True))
    return out


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3_moe", "float32"), *((family, "bfloat16") for family in ("deepseek_v3", "gpt_oss", "granitemoe"))],
)
def test_unquantised_numbers_are_the_processors_bit_for_bit(tmp_path, device, family, dtype):
    model = native_model(family)
    card = device()
    pack = plain_pack(tmp_path, model, dtype=dtype)
    tokens = TOKENS[:1] if family == "gpt_oss" else TOKENS  # its sliding window takes no padding between tokens
    got = logits_of(on_card(pack, card, dtype), SlotServer(pack, card), tokens)
    own = make_pack(tmp_path, model, dtype=dtype)
    wanted = logits_of(make_backend(own, dtype=dtype), DictServer(own), tokens)
    assert all(map(np.array_equal, got, wanted))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_are_those_that_they_stand_for(kind):
    rng = np.random.default_rng(0)
    tensor = quantize("w", rng.normal(size=(32, 64)).astype(np.float32), QUANTS[kind])
    parts = {name: torch.from_numpy(part) for name, part in DeviceLayout().encode(tensor).items()}
    scales = [parts[name].view(torch.bfloat16) for name in ("w.scales", "w.biases") if name in parts]
    specs = [
        TensorSpec(name, tuple(part.shape), {torch.uint8: "U8", torch.int8: "I8"}.get(part.dtype, "BF16"), 0, 0)
        for name, part in parts.items()
    ]
    s, spec = (tuple(scales), tuple(specs[1:])) if kind == "int4" else (scales[0], specs[1])
    full = torch.from_numpy(dequantize(tensor))
    x = torch.from_numpy(rng.normal(size=(3, 64)).astype(np.float32))
    got = plain_kernel(specs[0], spec, torch.float32)(x, parts["w"], s)
    torch.testing.assert_close(got, x @ full.T, rtol=1e-5, atol=1e-4)
    half = x.bfloat16()
    got = plain_kernel(specs[0], spec, torch.bfloat16)(half, parts["w"], s).float()
    terms = half.float().abs() @ full.abs().T  # of which each is off by 2**-9 of itself at most, and the sum once more
    assert ((got - half.float() @ full.T).abs() <= 2**-8 * terms + 2**-8 * got.abs()).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_answers_are_near_the_processors(tmp_path, device, kind):
    model, card = native_model("qwen3_moe"), device()
    pack, own = plain_pack(tmp_path, model, kind), make_pack(tmp_path, model, QUANTS[kind], "bfloat16")
    assert pack.manifest.logical_hash == own.manifest.logical_hash
    got = logits_of(on_card(pack, card), SlotServer(pack, card))
    wanted = logits_of(make_backend(own, dtype="bfloat16"), DictServer(own))
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(a - b).max() <= 0.05 * np.abs(b).max()


@pytest.mark.parametrize("seed", range(2))
def test_neither_order_of_arrival_nor_of_streams_shows(tmp_path, device, seed):
    model = native_model("qwen3_moe")
    pack = plain_pack(tmp_path, model)
    plain = device()
    wanted = logits_of(on_card(pack, plain), SlotServer(pack, plain))
    rng = np.random.default_rng(seed)
    odd = device(lambda stream, index: (NOW, LATE, RACE)[rng.integers(3)])
    got = logits_of(on_card(pack, odd), SlotServer(pack, odd, rng))
    assert all(map(np.array_equal, got, wanted))


@pytest.mark.parametrize(("slow", "forgets"), [("up", "_written"), ("compute", "_read")])
def test_a_wait_that_is_left_out_shows_in_the_logits(tmp_path, device, slow, forgets):
    """Copies that are late need who computes to wait, computes that are late need who fills the slot anew to."""
    pack = plain_pack(tmp_path, native_model("qwen3_moe"))
    card = device(lambda stream, index: LATE if stream == slow else NOW)
    server, backend = SlotServer(pack, card), on_card(pack, card)
    wanted = logits_of(backend, server)
    setattr(server.slots, forgets, Forgetful())
    assert not all(map(np.array_equal, logits_of(backend, server), wanted))


class Forgetful(dict):
    """Remembers nothing that it is told."""

    def __setitem__(self, key, value):
        pass

    def setdefault(self, key, default=None):
        return default


def test_experts_placed_on_the_host_are_computed_there(tmp_path, device):
    model, card = native_model("qwen3_moe"), device()
    pack = plain_pack(tmp_path, model)
    server, backend = SlotServer(pack, card), on_card(pack, card)
    wanted = logits_of(backend, server)
    items = server.items
    server.items = lambda layer, demand: (
        (e, server.buffers[layer * server.experts + e] if e % 2 else data) for e, data in items(layer, demand)
    )
    assert all(map(np.array_equal, logits_of(backend, server), wanted))


def test_dense_weights_lie_on_the_device_and_experts_nowhere(tmp_path, device):
    pack = plain_pack(tmp_path, native_model("qwen3_moe"))
    backend = on_card(pack, device())
    held = [*backend.model.parameters(), *backend.model.buffers()]
    assert {t.device for t in held} == {CARD, torch.device("meta")}
    assert backend.model.get_input_embeddings().weight.device == CARD


def test_what_systems_see_of_a_model_is_the_hosts(tmp_path, device):
    backend = on_card(plain_pack(tmp_path, native_model("deepseek_v3")), device())
    assert all(isinstance(bias, np.ndarray) for bias in backend.selection_bias().values())
    assert len(backend.selection_bias()) == 2
    hidden = torch.randn(3, 4).to(CARD)
    assert backend.ops.rows(hidden, np.array([2, 0])).device.type == "cpu"
    assert np.array_equal(backend.ops.numpy(hidden), hidden.cpu().numpy())


def test_row_invariance_is_probed_on_the_device(tmp_path, device, monkeypatch):
    monkeypatch.setattr(probe, "OUTPUTS", 1000)
    monkeypatch.setattr(probe, "ROWS", (1, 2, 20))
    report = on_card(plain_pack(tmp_path, native_model("qwen3_moe"), "int4"), device()).probe_row_invariance()
    assert any(name.startswith("expert gate_up_proj") for name in report)
    assert any("attention" in name for name in report)


def test_what_a_device_cannot_compute_is_refused(tmp_path, device):
    own = make_pack(tmp_path, native_model("qwen3_moe"), QUANTS["int4"], "bfloat16")
    with pytest.raises(BackendError, match="byte layout is torch_cpu; a device of its own reads plain"):
        on_card(own, device())
    codes = LogicalTensor("w", "mxfp4", np.zeros((32, 32), np.uint8), np.zeros((32, 1), np.uint8))
    with pytest.raises(LayoutError, match="w: torch has no CPU kernel for mxfp4"):
        DeviceLayout().encode(codes)
    with pytest.raises(BackendError, match="of a kind that device=cuda has no kernel for"):
        plain_kernel(TensorSpec("w", (4, 4), "U8", 0, 16), None, torch.bfloat16)


def test_transients_are_those_of_the_largest_matrix():
    specs = [TensorSpec("up_proj", (64, 16), "U8", 0, 1024), TensorSpec("up_proj.scales", (64, 1), "BF16", 0, 128)]
    assert transient_bytes(specs, torch.bfloat16) == 64 * 32 * (1 + 1 + 4 + 4 + 2)
    assert transient_bytes([TensorSpec("up_proj", (64, 16), "BF16", 0, 2048)], torch.bfloat16) == 0


def test_a_card_tensor_never_meets_the_hosts(device):
    card = device()
    with pytest.raises(RuntimeError, match="card and host meet"):
        torch.ones(2, device=card.at) + torch.ones(2)
