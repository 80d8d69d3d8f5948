"""The part of a profile that a model's passes have: its layers, what waits and reads do to them, its adapters.

Knows the form of a profile; how a pass is measured stands in ``live``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from moebench.curves import TimeCurve
from moebench.probes import beside, kernels
from moebench.probes.file import ProbeFile
from moebench.probes.processor import computing
from moebench.probes.record import Record
from moebench.probes.samples import Alternating, Samples
from moebench.sourced import curves
from moebench.store.engines import open_engine
from moebench.units import KIB

CONTEXTS, ROWS, FIRST_ROWS = (32, 512), (1, 4, 32), (1, 4, 16, 32)
ROUNDS = 2  # over all of these in a turn
CONTEXT, SMALL_READ, SMALL_DEPTH = 32, 16 * KIB, 4  # of a small model that decodes beside reads
LANDING = 8  # reads in a pass
RANK = 16  # of adapters
SIZE = f"{SMALL_READ // KIB} KiB"
WHAT = "layers"  # as the part is called
CURVES = {  # of a model, on so many threads
    "layers": "layers of {}, row-invariant, without their experts, threads: {}",
    "first_layers": "the same in passes that begin a sequence of {}, threads: {}",
}
TERMS = {  # of a model, with so many tokens cached
    "layer_floor_us": "a layer of {} on one row without its experts: the library's own time, {} tokens cached",
    "pass_us": "a pass of {} on one row beside its layers: masks, embedding, head, choice of the token",
    "expert_us": "what an expert takes beyond its kernels in a pass of {} on one row: dispatch",
    "gather_us": "what an expert takes beyond its kernels in a pass of {} on several rows: dispatch, moving the rows",
    "cold_us": f"what a layer of {{}} takes longer that waits for a read of {SIZE}, the wait left out",
    "again_us": "the same for each further read of a layer of {}, begun with the first and waited for after it",
    "beside_us": f"what a pass of {{}} takes longer for each of {LANDING} direct reads of {SIZE} begun before it",
    "adapter_us": f"what an adapter of rank {RANK} beside a projection of {{}} adds to a pass of one row",
}


class Model:
    """The model that ``load`` gives, measured in ``turn`` after turn, between the other parts of a calibration: what a
    machine that is shared does for some minutes is in its terms as it is in theirs.
    """

    def __init__(self, load: Callable[[], Any], file: ProbeFile, record: Record) -> None:
        self._load, self._file, self._record = load, file, record
        self._passes: Any = None
        self._name, self._contexts = "", list(CONTEXTS)
        self._backend: Any = None
        self._points: dict[tuple[str, int, int], Alternating] = {}
        self._terms: dict[str, Samples] = {}

    def turn(self, share: float) -> None:
        """Some samples of everything, in a ``share`` of the time; nothing where the model could not be run before."""
        if WHAT in self._record.unmeasured:
            return
        with self._record.part(WHAT, share) as seconds:
            if self._passes is None:
                self._open()
            points = [("layers", context, rows) for context in self._contexts for rows in ROWS]
            points += [("first_layers", 1, rows) for rows in FIRST_ROWS]
            for point in ROUNDS * points:
                self._sample(point, seconds / 2 / ROUNDS / len(points))
            with open_engine("direct", self._file.pack(SMALL_READ)) as engine:
                first, more = self._passes.waits(engine, CONTEXT, seconds / 8)
                self._keep("cold_us", first)
                self._keep("again_us", more)
                self._keep("beside_us", self._passes.beside(engine, LANDING, CONTEXT, seconds / 8))
            install, count = _adapters(self._backend.model)
            self._keep("adapter_us", self._passes.adapted(install, count, CONTEXT, seconds / 8))
            background = beside.reading(self._file, SMALL_READ, SMALL_DEPTH)
            both = beside.shares(lambda time: self._passes.speed(CONTEXT, time), background, seconds / 8, pairs=1)
            self._keep("read_beside_layers", both.second)

    def _open(self) -> None:
        from moebench.harness.backend import open_backend
        from moebench.probes.live import Passes

        model = self._load()
        geometry = model.geometry
        self._name = geometry.name
        self._contexts = [context for context in CONTEXTS if context + 8 * max(ROWS) <= model.positions] or [1]
        self._backend = open_backend("torch", model, threads=computing())
        self._passes = Passes(self._backend, model.pack, geometry.vocabulary, _expert_s(self._record, geometry))

    def _sample(self, point: tuple[str, int, int], seconds: float) -> None:
        curve, context, rows = point
        found = self._passes.sample(context, rows, seconds) if curve == "layers" else self._passes.first(rows, seconds)
        layer, beyond, each = (statistics.fmean(values) for values in zip(*found, strict=True))
        self._points[point] = self._points.get(point, Alternating(())) + Alternating((layer,))
        self._keep("expert_us" if rows == 1 else "gather_us", Alternating((each,)))
        if rows == 1:
            self._keep("pass_us", Alternating((beyond,)))

    def _keep(self, term: str, samples: Samples) -> None:
        self._terms[term] = self._terms.get(term, type(samples)(())) + samples

    def write(self, stack: dict[str, Any], storage: dict[str, Any]) -> None:
        """Enter what was found; of layers an estimate where there is nothing."""
        if WHAT in self._record.unmeasured:
            dispatch = kernels.small_operation(0.1)
            text = f"60 tensor operations at {dispatch.median:.2f} us, as no model's layer could be measured"
            sixty = Samples(tuple(60 * us for us in dispatch.values))
            stack["layer_floor_us"] = self._record.number(sixty, "us", text, "estimate")
            return
        for name, text in CURVES.items():
            points = {(x, y): samples for (curve, x, y), samples in self._points.items() if curve == name}
            self._record.curve(name, points, text.format(self._name, computing()))
        few = self._contexts[0]
        self._terms["layer_floor_us"] = self._points["layers", few, 1]
        for term, text in TERMS.items():
            stack[term] = self._record.number(self._terms[term], "us", text.format(self._name, few))
        what = f"direct reads of {SIZE}, {SMALL_DEPTH} queued, rate over their rate alone"
        text = f"{what}, beside decode passes of {self._name} without reads of their own"
        storage["read_beside_layers"] = self._record.number(self._terms["read_beside_layers"], "share", text)


def _adapters(model: Any) -> tuple[Callable[[], Any], int]:
    """What puts an adapter that changes nothing beside each dense projection, and how many those are."""
    from moebench.backends.base import Adapters
    from moebench.backends.torch_lora import Installed, dense_projections

    found = dense_projections(model).items()
    shapes = {name: ((RANK, linear.in_features), (linear.out_features, RANK)) for name, linear in found}
    pairs = {name: (np.zeros(a, np.float16), np.zeros(b, np.float16)) for name, (a, b) in shapes.items()}
    return lambda: Installed(model, Adapters(1.0, pairs)), len(pairs)


def _expert_s(record: Record, geometry: Any) -> Callable[[int], float]:
    """What an expert of the model takes by its rows, from the curve that was just measured; nothing without one."""
    name = f"experts.{geometry.quant}"
    if name not in record.curves:
        return lambda rows: 0.0
    curve = curves({name: record.curves[name]}, "calibrate")[name]
    assert isinstance(curve, TimeCurve)
    return lambda rows: curve.seconds(geometry.expert_bytes / KIB, rows)
