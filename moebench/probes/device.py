"""The part of a profile that a device of its own memory has: its memory, the link to it, and its kernels.

Copies go through the very slots and streams of a run, experts through its kernels. Knows a device by its interface
alone: no CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from moebench.backends.device import DeviceSlots
from moebench.backends.torch_device import SlotViews, TorchDevice, plain_kernel
from moebench.backends.torch_experts import ExpertLayer, Live
from moebench.probes.kernels import Gated
from moebench.probes.record import Record
from moebench.probes.samples import Samples, rates, times
from moebench.store import coded
from moebench.store.extents import place_parts
from moebench.store.layout import QuantSpec, TensorSpec
from moebench.store.pages import aligned_buffer
from moebench.store.random_parts import RandomParts
from moebench.units import GB, GIB, MIB, PAGE, align_up

COPY, COPIES, EXPERTS = 4 * MIB, 16, 32
HIDDEN, INTERMEDIATE = 2048, 768  # of qwen3-30b-a3b's experts
HOST_ONLY = ("experts.", "dense", "layers")  # curves of what the processor computes
BESIDE = ("compute.beside_reads", "compute.beside_copies", "compute.sustained",
          "storage.read_beside_compute", "storage.read_beside_layers")  # fmt: skip


class Link:
    """Slots on both sides of the link to a device."""

    def __init__(self, device: TorchDevice, nbytes: int, count: int) -> None:
        self.slots, self.nbytes, self.count = DeviceSlots(device, aligned_buffer), nbytes, count
        self.slots.tier("device", count, nbytes)
        self.slots.tier("host", count, nbytes)[:] = 1

    def up(self) -> None:
        """Copy every slot up and wait for the last."""
        for index in range(self.count):
            self.slots.upload(("host", index), ("device", index), self.nbytes)
        self.slots.host_writes(("host", index) for index in range(self.count))

    def down(self) -> None:
        """Copy every slot down, all issued before the first is waited for."""
        device, (host, card) = self.slots.device, (self.slots.tiers[name] for name in ("host", "device"))
        events = [
            self.slots.issue(
                device.down, partial(device.download, card[i].data, host[i]), (("device", i),), (("host", i),)
            )
            for i in range(self.count)
        ]
        events[-1].synchronize()

    def close(self) -> None:
        """Free the slots."""
        self.slots.close()


class Experts:
    """int4 experts of random bytes in slots of the device."""

    def __init__(self, device: TorchDevice, count: int = EXPERTS) -> None:
        drawn = RandomParts(HIDDEN, INTERMEDIATE, QuantSpec()).draw(np.random.Generator(np.random.SFC64(0)))
        parts = {}
        for name in ("up_proj", "down_proj"):
            for part in (name, f"{name}.scales", f"{name}.biases"):
                both = name == "up_proj"  # gate and up are one matrix, gate first
                value = np.concatenate([drawn[part.replace("up", "gate")], drawn[part]]) if both else drawn[part]
                parts[f"gate_{part}" if both else part] = value
        self.specs: list[TensorSpec] = [*place_parts(parts)]
        self.nbytes = self.specs[-1].offset + self.specs[-1].nbytes
        self.packed = np.zeros(self.nbytes, np.uint8)
        for spec in self.specs:
            self.packed[spec.offset : spec.offset + spec.nbytes] = parts[spec.name].reshape(-1).view(np.uint8)
        self.link = Link(device, align_up(self.nbytes), count)
        self.link.slots.tiers["host"][:, : self.nbytes] = self.packed
        self.link.up()
        views, gated = SlotViews(self.specs, "gate_up_proj"), cast(Any, Gated())
        self._layer: Any = ExpertLayer(0, gated, views, torch.bfloat16, Live(), plain_kernel)
        self._device = device

    def work(self, rows: int) -> Callable[[], None]:
        """What runs every expert once on ``rows`` rows, and waits."""
        x = torch.randn(rows, HIDDEN).to(self._device.at, torch.bfloat16)

        def every() -> None:
            with torch.inference_mode():
                for slot in self.link.slots.tiers["device"]:
                    slot.compute(partial(self._layer.expert, x, slot))
                self._device.compute.record().synchronize()

        return every

    def gb_s(self, seconds: float) -> Samples:
        """GB/s of stored weights that one row goes through."""
        return rates(self.work(1), self.link.count * self.nbytes / GB, seconds)

    def tflops(self, rows: int, seconds: float) -> Samples:
        """TFLOP/s on ``rows`` rows."""
        return rates(self.work(rows), self.link.count * rows * 6 * HIDDEN * INTERMEDIATE / 1e12, seconds)

    def decoded_gb_s(self, seconds: float) -> Samples:
        """GB/s of bytes that are decoded on the device, one expert at a time, each brought back to be checked."""
        stored, out = coded.encode(self.specs, self.packed), np.empty(self.nbytes, np.uint8)
        slots = self.link.slots
        slots.tiers["host"][0, : stored.size] = stored
        return rates(lambda: slots.decode(("host", 0), ("device", 0), stored.size, out), self.nbytes / GB, seconds)


def products(device: TorchDevice, seconds: float) -> Samples:
    """TFLOP/s of a bf16 product [512, 2048] x [2048, 2048]."""
    left, right = (torch.randn(rows, 2048).to(device.at, torch.bfloat16) for rows in (512, 2048))

    def every() -> None:
        for _ in range(16):
            left @ right
        device.compute.record().synchronize()

    return rates(every, 16 * 2 * 512 * 2048 * 2048 / 1e12, seconds)


def read_back(device: TorchDevice, seconds: float) -> Samples:
    """Microseconds until the host has a small result of the device."""
    one = torch.ones(8).to(device.at)

    def back() -> None:
        (one + one).cpu()

    return times(back, 1, seconds)


def issued(device: TorchDevice, seconds: float) -> Samples:
    """Microseconds of one small operation among many."""
    one = torch.ones(64).to(device.at)

    def every() -> None:
        for _ in range(200):
            one + one
        device.compute.record().synchronize()

    return times(every, 200, seconds)


def latency(device: TorchDevice, seconds: float) -> Samples:
    """Microseconds of a copy of one page up, until the host knows that it is there."""
    link = Link(device, PAGE, 1)
    try:
        return times(link.up, 1, seconds)
    finally:
        link.close()


def extend(data: dict[str, Any], device: TorchDevice, name: str, record: Record) -> dict[str, Any]:
    """The profile of a machine whose processor was measured, with ``device`` as what computes."""
    data = {**data, "unified": False, "title": f"{data['title']}, {name}", "match": {**data["match"], "gpu": name}}
    memory, bandwidth, compute = (dict(data[section]) for section in ("memory", "bandwidth", "compute"))
    memory["device_gib"] = record.fact(device.free_bytes() / GIB, "GiB", "memory of the device that was free")
    with record.part("bandwidth.h2d_gb_s", 0.02, needed=True) as seconds:
        link = Link(device, COPY, COPIES)
        for key, turn in (("h2d_gb_s", link.up), ("d2h_gb_s", link.down)):
            found = rates(turn, COPY * COPIES / GB, seconds / 2)
            bandwidth[key] = record.number(found, "GB/s", "copies of 4 MiB between page-locked and device memory")
        link.close()
        text = "a copy of 4 KiB up, until the host knows that it is there"
        bandwidth["link_latency_us"] = record.number(latency(device, seconds / 4), "us", text)
    with record.part("compute.bf16_tflops of the device", 0.02, needed=True) as seconds:
        text = "products of 512 rows with 2048 x 2048 on the device"
        compute["bf16_tflops"] = record.number(products(device, seconds), "TFLOP/s", text)
    with record.part("compute.int4_tflops of the device", 0.03, needed=True) as seconds:
        experts = Experts(device)
        text = f"int4 experts of {HIDDEN} x {INTERMEDIATE} on {{}}, made floats on each use"
        bandwidth["device_gb_s"] = record.number(
            experts.gb_s(seconds / 2), "GB/s", f"stored bytes of {text.format('one row')}"
        )
        compute["int4_tflops"] = record.number(experts.tflops(32, seconds / 2), "TFLOP/s", text.format("32 rows"))
        compute.pop("rans_gb_s", None)
        with record.part("compute.rans_gb_s of the device", 0.01) as spent:
            text = "decoded bytes of int4 experts on the device, one at a time, each brought back to be checked"
            compute["rans_gb_s"] = record.number(experts.decoded_gb_s(spent), "GB/s", text)
        experts.link.close()
    stack = dict(data["stacks"]["moebench"])
    with record.part("stack of the device", 0.01, needed=True) as seconds:
        text = "a small result of the device read back"
        stack["host_sync_us"] = record.number(read_back(device, seconds), "us", text)
        one = issued(device, seconds)
        sixty = Samples(tuple(60 * us for us in one.values))
        text = f"60 small operations at {one.median:.2f} us; no model's layer was measured on the device"
        stack["layer_floor_us"] = record.number(sixty, "us", text, "estimate")
        for key in ("pass_us", "cold_us", "again_us", "beside_us"):
            stack.pop(key, None)
    for dotted in BESIDE:
        section, key = dotted.split(".")
        (compute if section == "compute" else data["storage"]).pop(key, None)
    curves = {key: curve for key, curve in data["curves"].items() if not key.startswith(HOST_ONLY)}
    unmeasured = {**data["unmeasured"], **record.unmeasured}
    unmeasured.pop("device memory, its link and its compute", None)
    unmeasured["layers on the device"] = "calibrate times single operations there, and no model's passes"
    parts = {"memory": memory, "bandwidth": bandwidth, "compute": compute, "stacks": {"moebench": stack}}
    return {**data, **parts, "curves": curves, "unmeasured": unmeasured}
