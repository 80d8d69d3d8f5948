"""The part of a profile that a model's passes have: its layers, what waits and reads do to them, its adapters.

Knows the form of a profile; how a pass is measured stands in ``live``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moebench.curves import TimeCurve
from moebench.probes import beside, kernels
from moebench.probes.file import ProbeFile
from moebench.probes.processor import computing
from moebench.probes.reads import grid
from moebench.probes.record import Record
from moebench.probes.samples import Samples
from moebench.sourced import curves
from moebench.store.engines import open_engine
from moebench.units import KIB

CONTEXTS, ROWS, FIRST_ROWS = (32, 128, 512), (1, 4, 32), (1, 4, 16, 32)
CONTEXT, SMALL_READ, SMALL_DEPTH = 32, 16 * KIB, 4  # of a small model that decodes beside reads
LANDING = 8  # reads in a pass
RANK = 16  # of adapters


@dataclass
class Found:
    """What was measured, by its names in a profile."""

    stack: dict[str, Any] = field(default_factory=dict)
    storage: dict[str, Any] = field(default_factory=dict)


def measure(load: Callable[[], Any], file: ProbeFile, record: Record) -> Found:
    """The terms of the model that ``load`` gives; of its layers an estimate where it cannot run."""
    found = Found()
    with record.part("layers", 0.06) as seconds:
        from moebench.harness.backend import open_backend
        from moebench.probes.live import Passes

        model = load()
        backend = open_backend("torch", model, threads=computing())
        geometry = model.geometry
        passes = Passes(backend, model.pack, geometry.vocabulary, _expert_s(record, geometry))
        _layers(passes, geometry.name, model.positions, record, found.stack, seconds / 2)
        _reads(passes, geometry.name, file, record, found, seconds / 6)
        adapters = passes.adapted(_adapters(backend), CONTEXT, seconds / 6)
        text = f"what an adapter of rank {RANK} beside a projection of {geometry.name} adds to a pass of one row"
        found.stack["adapter_us"] = record.number(adapters, "us", text)
    if "layer_floor_us" not in found.stack:
        dispatch = kernels.small_operation(0.1)
        text = f"60 tensor operations at {dispatch.median:.2f} us, as no model's layer could be measured"
        sixty = Samples(tuple(60 * us for us in dispatch.values))
        found.stack["layer_floor_us"] = record.number(sixty, "us", text, "estimate")
    return found


def _layers(passes: Any, name: str, positions: int, record: Record, stack: dict[str, Any], seconds: float) -> None:
    contexts = [context for context in CONTEXTS if context + 8 * max(ROWS) <= positions] or [1]
    one: list[Any] = []
    several: list[Any] = []

    def kept(found: list[Any], rows: int) -> float:
        (one if rows == 1 else several).extend(found)
        return statistics.median(parts.layer for parts in found)

    def later(context: int, rows: int, seconds: float) -> float:
        return kept(passes.sample(context, rows, seconds), rows)

    def first(sequences: int, rows: int, seconds: float) -> float:
        return kept(passes.first(rows, seconds), rows)

    layers = grid([(context, rows) for context in contexts for rows in ROWS], later, seconds * 0.7)
    begun = grid([(1, rows) for rows in FIRST_ROWS], first, seconds * 0.3)
    text = f"layers of {name}, row-invariant, without their experts, threads: {computing()}"
    record.curve("layers", layers, text)
    record.curve("first_layers", begun, f"{text}, in passes that begin a sequence")
    middle = contexts[len(contexts) // 2]
    text = f"a layer of {name} on one row without its experts: the library's own time, {middle} tokens cached"
    stack["layer_floor_us"] = record.number(layers[middle, 1], "us", text)
    text = f"a pass of {name} on one row beside its layers: masks, embedding, head, choice of the token"
    stack["pass_us"] = record.number(Samples(tuple(parts.beside for parts in one)), "us", text)
    text = f"what each expert takes in a pass of {name} on {{}} beyond its kernels: dispatch"
    for key, found, rows in (("expert_us", one, "one row"), ("gather_us", several, "several rows, and moving rows")):
        stack[key] = record.number(Samples(tuple(parts.each for parts in found)), "us", text.format(rows))


def _reads(passes: Any, name: str, file: ProbeFile, record: Record, found: Found, seconds: float) -> None:
    """What a pass and the reads beside it do to each other; ``seconds`` for each of three parts."""
    size = f"{SMALL_READ // KIB} KiB"
    with open_engine("direct", file.pack(SMALL_READ)) as engine:
        first, more = passes.waits(engine, CONTEXT, seconds)
        longer = passes.beside(engine, LANDING, CONTEXT, seconds)
    text = f"what a layer of {name} takes longer that waits for a read of {size}, the wait left out"
    found.stack["cold_us"] = record.number(first, "us", text)
    text = "the same for each further read of a layer, begun with the first and waited for after it"
    found.stack["again_us"] = record.number(more, "us", text)
    text = f"what a pass of {name} takes longer for each of {LANDING} direct reads of {size} that were begun before it"
    found.stack["beside_us"] = record.number(longer, "us", text)
    background = beside.reading(file, SMALL_READ, SMALL_DEPTH)
    both = beside.shares(lambda time: passes.speed(CONTEXT, time), background, seconds)
    what = f"decode passes of {name} without reads of their own"
    text = f"direct reads of {size}, {SMALL_DEPTH} queued, rate over their rate alone, beside {what}"
    found.storage["read_beside_layers"] = record.number(both.second, "share", text)


def _adapters(backend: Any) -> Any:
    """One beside each dense projection, that changes nothing."""
    from moebench.backends.base import Adapters
    from moebench.backends.torch_lora import dense_projections

    found = dense_projections(backend.model).items()
    shapes = {name: ((RANK, linear.in_features), (linear.out_features, RANK)) for name, linear in found}
    return Adapters(1.0, {name: (np.zeros(a, np.float16), np.zeros(b, np.float16)) for name, (a, b) in shapes.items()})


def _expert_s(record: Record, geometry: Any) -> Callable[[int], float]:
    """What an expert of the model takes by its rows, from the curve that was just measured; nothing without one."""
    name = f"experts.{geometry.quant}"
    if name not in record.curves:
        return lambda rows: 0.0
    curve = curves({name: record.curves[name]}, "calibrate")[name]
    assert isinstance(curve, TimeCurve)
    return lambda rows: curve.seconds(geometry.expert_bytes / KIB, rows)
