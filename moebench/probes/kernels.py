"""What the processor computes: dense products, and experts by moebench's own function, of several sizes and rows.

Weights are gone through one after another, as many as a model would have, so that large ones come from memory and
small ones from where a small model's lie. Knows kernels and byte layouts; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moebench.machine import cores
from moebench.probes.samples import Samples, rates, times
from moebench.store.extents import place_parts
from moebench.store.layout import QuantSpec, TensorSpec
from moebench.store.pages import aligned_buffer
from moebench.store.quant import to_bf16
from moebench.units import GB, MIB, align_up

AREA, MOST = 64 * MIB, 256  # bytes and number of weights that are gone through
GROUP = 64  # columns of an int4 scale


def _copies(nbytes: int) -> int:
    return max(2, min(MOST, AREA // nbytes))


class Squares:
    """bf16 matrices [width, width]."""

    def __init__(self, width: int) -> None:
        import torch

        one = torch.randn(width, width).bfloat16()
        self._weights = [one.clone() for _ in range(_copies(2 * width * width))]

    def times(self, rows: int, seconds: float) -> Samples:
        """Microseconds of a product [rows, width] x [width, width]."""
        import torch
        import torch.nn.functional as F

        x = torch.randn(rows, self._weights[0].shape[1]).bfloat16()
        with torch.inference_mode():
            return times(lambda: [F.linear(x, weight) for weight in self._weights], len(self._weights), seconds)


def products(seconds: float) -> Samples:
    """TFLOP/s of a bf16 product [512, 2048] x [2048, 2048]."""
    import torch

    left, right = torch.randn(512, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    return rates(lambda: left @ right, 2 * 512 * 2048 * 2048 / 1e12, seconds)


class Expert:
    """Experts of gate, up and down projection that ``moebench``'s experts function computes on; their values are
    random, and no less work for it. ``kind`` is a quantisation.
    """

    def __init__(self, kind: str, hidden: int, intermediate: int) -> None:
        self.hidden, self.flops_per_row = hidden, 6 * hidden * intermediate
        generator = np.random.default_rng(0)
        parts: dict[str, np.ndarray] = {}
        for name, rows, columns in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
            parts |= _matrix(generator, kind, name, rows, columns)
        self.specs: tuple[TensorSpec, ...] = place_parts(parts)
        self.nbytes = sum(spec.nbytes for spec in self.specs)
        slot = align_up(self.specs[-1].offset + self.specs[-1].nbytes)
        self.buffers = [*aligned_buffer(slot * (count := _copies(slot))).reshape(count, slot)]
        for buffer in self.buffers:
            for spec in self.specs:
                buffer[spec.offset : spec.offset + spec.nbytes] = parts[spec.name].reshape(-1).view(np.uint8)

    def work(self, rows: int) -> Callable[[], object]:
        """What runs every expert once on ``rows`` rows."""
        import torch

        from moebench.backends.torch_experts import ExpertLayer, Live, Views

        layer: Any = ExpertLayer(0, Gated(), Views(self.specs, "gate_up_proj"), torch.bfloat16, Live())  # type: ignore[arg-type]
        x = torch.randn(rows, self.hidden).bfloat16()

        def every() -> None:
            with torch.inference_mode():
                for buffer in self.buffers:
                    layer.expert(x, buffer)

        return every

    def times(self, rows: int, seconds: float) -> Samples:
        """Microseconds of one expert on ``rows`` rows."""
        return times(self.work(rows), len(self.buffers), seconds)

    def tflops(self, rows: int, seconds: float) -> Samples:
        """TFLOP/s on ``rows`` rows."""
        return rates(self.work(rows), len(self.buffers) * rows * self.flops_per_row / 1e12, seconds)

    def gb_s(self, seconds: float) -> Samples:
        """GB/s of stored weights that one row goes through."""
        return rates(self.work(1), len(self.buffers) * self.nbytes / GB, seconds)


class Gated:
    """The part of an experts module that computes: SiLU of the gate times up."""

    has_gate = True

    def _apply_gate(self, both: Any) -> Any:
        import torch.nn.functional as F

        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


def _matrix(generator: np.random.Generator, kind: str, name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
    """The parts of one matrix [rows, columns] in the layout ``torch_cpu``."""

    def floats(*shape: int) -> np.ndarray:
        return to_bf16(generator.standard_normal(shape, np.float32) / 64)

    if kind == "none":
        return {name: floats(rows, columns)}
    if kind == "int8":
        return {name: generator.integers(-127, 128, (rows, columns), np.int8), f"{name}.scales": floats(rows)}
    nibbles = generator.integers(0, 256, (rows, columns // 2), np.uint8)
    return {name: nibbles, f"{name}.scales": floats(columns // GROUP, rows, 2)}


def rans_decoding(seconds: float) -> Samples:
    """GB/s of decoded bytes with one thread on each core: int4 experts of 3 x 768 x 2048 Gaussian weights."""
    from concurrent.futures import ThreadPoolExecutor

    from moebench.store import coded
    from moebench.store.random_parts import RandomParts

    parts = RandomParts(2048, 768, QuantSpec()).draw(np.random.Generator(np.random.SFC64(0)))
    specs = place_parts(parts)
    decoded = np.zeros(specs[-1].offset + specs[-1].nbytes, np.uint8)
    for spec in specs:
        decoded[spec.offset : spec.offset + spec.nbytes] = parts[spec.name].reshape(-1).view(np.uint8)
    stored, count = coded.encode(specs, decoded), cores()
    outs = [np.empty_like(decoded) for _ in range(8 * count)]
    with ThreadPoolExecutor(count) as pool:

        def every() -> None:
            list(pool.map(lambda out: coded.decode(stored, out), outs))

        return rates(every, len(outs) * decoded.nbytes / GB, seconds)


def small_operation(seconds: float) -> Samples:
    """Microseconds to dispatch one small tensor operation."""
    import torch

    x = torch.ones(64)
    return times(lambda: [x + x for _ in range(1000)], 1000, seconds)
