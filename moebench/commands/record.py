"""``moebench trace record``: run prompts through a model that computes and keep what its router chose.

Experts are read from a pack one by one: no cache, no clock. The model's own routing runs, or that of a system which
replaces it; then the trace holds both, what the router said at that point and what was executed ahead of it. Of a
system that drafts it holds the accepted tokens, as of plain decoding, and the drafts beside them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moebench.checkpoint.hub import find_model, model_name
from moebench.config import option
from moebench.engine.answers import routing_of
from moebench.engine.hooks import Hooks
from moebench.engine.record import StepRecord
from moebench.engine.view import RecordingView
from moebench.errors import PluginError, UsageError
from moebench.geometry import Geometry
from moebench.step import ABSENT, Routing, Step
from moebench.systemspec import RunContext, SystemSpec, Target
from moebench.trace.format import Trace
from moebench.trace.record import Recorder


@dataclass(frozen=True)
class RecordOptions:
    """Which model answers which prompts, and where the trace goes."""

    out: str = dataclasses.field(metadata={"help": "trace file to write"})
    model: str = option("tinymoe", "tinymoe, a model folder, or org/name in the hub cache")
    prompts: str = option("", "JSON-lines file with a field prompt; empty for the shipped prompts")
    requests: int = option(8, "prompts to run")
    new_tokens: int = option(64, "tokens each request emits")
    seed: int = option(0, "which prompts of the file are taken")
    quant: Literal["int4", "int8", "none", "stored"] = option(
        "int4", "stored precision of expert weights; stored: as a quantised checkpoint has them"
    )
    backend: Literal["torch", "mlx"] = option("torch", "tensor library that computes")
    system: str = option("", "system whose routing is executed, its options as system.NAME=VALUE; empty for none")


@dataclass(frozen=True)
class RecordedSystem:
    """A system's hooks, its name and the model as it runs it: ``top_k`` may be the system's own."""

    name: str
    hooks: Any
    geometry: Geometry


class RecordingExperts:
    """Stands where the loop's experts stand: serves every demand from the pack and notes the native routing.

    With a ``system``, its hooks are called in the loop's order and its routing is executed; nothing is read ahead.
    """

    def __init__(self, pack: Any, buffer: np.ndarray, system: RecordedSystem | None = None) -> None:
        self.pack, self.buffer, self.recorder, self.request = pack, buffer, Recorder(), 0
        self.system = system
        self.hooks: Any = system.hooks if system else Hooks([])
        self.view = RecordingView(system.geometry) if system else None
        self.step: Step | None = None
        self.native: list[Routing] = []
        self.executed: list[Routing] = []

    def begin_request(self, sequences: np.ndarray) -> None:
        """Requests are numbered by the caller."""
        self.hooks.begin_request(sequences, self.view)

    def begin(self, step: Step) -> None:
        """A pass starts."""
        self.step, self.native, self.executed = step, [], []
        self.hooks.begin_step(step, self.view)
        self._prefetch("begin")

    def serve(self, layer: int, hidden: Any, native: Routing) -> tuple[Routing, Iterator[tuple[int, np.ndarray]]]:
        """The routing to execute, and each of its experts read from the pack."""
        assert self.step is not None  # begin comes before serve
        routing = native
        if self.hooks.route is not None:
            said = self.hooks.route(self.step, layer, hidden, native, self.view)
            routing = native if said is None else routing_of(said, self.step.rows, self.pack.experts)
        self.native.append(native)
        self.executed.append(routing)
        demand = routing.demand(self.step.valid)
        keys = [layer * self.pack.experts + expert for expert in demand]
        self.hooks.acquired(self.step, layer, keys, [True] * len(keys), self.view)
        self._prefetch(layer)
        return routing, self._read(layer, demand)

    def end(self) -> None:
        """The pass is over: keep its routings, its rows under the number of the current request."""
        step, hooks = self.step, self.hooks
        assert step is not None
        self._prefetch("end")
        if hooks.stage is not None:
            hooks.stage(step, self.view)
        hooks.end_step(step, StepRecord(step, 0.0), self.view)
        numbered = dataclasses.replace(step, sequence=step.sequence + self.request)
        self.recorder.add_step(numbered, self.native, self._channels(self.system) if self.system else None)

    def _channels(self, system: RecordedSystem) -> dict[str, np.ndarray] | None:
        """What the system says it predicted, else what it routed ahead; drafts are kept with the step itself."""
        said = self.hooks.predicted(self.step) if self.hooks.predicted is not None else None
        if said is None:
            if self.hooks.draft is not None:
                return None
            return {f"predicted.{system.name}": self._ahead(system)}
        if not isinstance(said, Mapping):
            raise PluginError(f"predicted returned a {type(said).__name__}: a mapping, channel name -> int [N, L, k]")
        return {f"predicted.{name}": np.asarray(ids, np.int16) for name, ids in said.items()}

    def _ahead(self, system: RecordedSystem) -> np.ndarray:
        """What the pass executed where it was decided ahead, int16 [N, L, top_k], else -1."""
        shape = (len(self.native[0].experts), system.geometry.top_k)
        out = np.full((shape[0], len(self.executed), shape[1]), ABSENT, np.int16)
        for layer, routing in enumerate(self.executed):
            if routing.ahead:
                if routing.experts.shape != shape:
                    raise PluginError(f"system {system.name} routed {routing.experts.shape} ahead, expected {shape}")
                out[:, layer] = routing.experts
        return out

    def _prefetch(self, point: int | str) -> None:
        if self.hooks.prefetch is not None:
            self.hooks.prefetch(self.step, point, self.view)

    def _read(self, layer: int, experts: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        for expert in experts:
            self.pack.read(layer * self.pack.experts + expert, self.buffer)
            yield expert, self.buffer


def record(options: RecordOptions, spec: SystemSpec | None, knobs: Any, tick: Callable[[], None]) -> Trace:
    """Decode greedily, one request after another, and return the trace; ``spec`` with its ``knobs`` is the system."""
    from moebench.engine.loop import Loop
    from moebench.harness.assets import load_live, read_prompts
    from moebench.harness.backend import open_backend, require_backend
    from moebench.harness.plan import EMBEDDED, embedded_folder

    require_backend(options.backend)
    folder = embedded_folder() if options.model == EMBEDDED else find_model(options.model)
    name = EMBEDDED if options.model == EMBEDDED else model_name(folder)
    shipped = Path(str(resources.files("moebench.models.tinymoe"))) / "tasks" / "prompts.jsonl"
    prompts = read_prompts(Path(options.prompts) if options.prompts else shipped, options.requests, options.seed)
    live = load_live(folder, name, options.quant, "packed", backend=options.backend)
    backend = open_backend(options.backend, live)
    system = None if spec is None else prepared(spec, knobs, name, live, backend, options.seed)
    experts = RecordingExperts(live.pack, backend.buffer(live.pack.slot_bytes), system)
    loop = Loop(backend, experts)  # type: ignore[arg-type]
    for experts.request, prompt in enumerate(prompts):
        loop.generate([live.tokenizer(prompt)["input_ids"]], options.new_tokens, stop=live.ends)
        tick()
    source = f"moebench trace record, {options.requests} prompts of {options.prompts or 'the shipped set'}"
    shape = {"model": name, "experts": live.pack.experts, "source": source, "seed": options.seed}
    if spec is not None:
        shape["system"] = {"id": spec.id, **dataclasses.asdict(knobs)}
    return experts.recorder.trace(shape)


def training_trace(
    folder: Path, requests: int, new_tokens: int, prompts: str, seed: str, progress: Callable[[str, int, int], None]
) -> Trace:
    """Routing to fit on: recorded on a file of prompts or, for tinymoe, on training items of its own domains.

    ``progress(text, done, total)`` is told of each request. Training items share none with what is evaluated.
    """
    from moebench.harness.plan import EMBEDDED, embedded_folder

    own = folder.resolve() == embedded_folder().resolve()
    if not (prompts or own):
        raise UsageError("prepare: only tinymoe has prompts of its own; give prompts=FILE or trace=FILE")
    done = itertools.count(1)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(prompts) if prompts else Path(scratch) / "prompts.jsonl"
        if not prompts:
            from moebench.models.tinymoe.domains import DOMAINS, generate

            rng, domains = random.Random(seed), list(DOMAINS)
            items = [generate(domains[i % len(domains)], rng, test=False).prompt for i in range(requests)]
            file.write_text("".join(json.dumps({"prompt": item}) + "\n" for item in items))
        options = RecordOptions("", EMBEDDED if own else str(folder), str(file), requests, new_tokens)
        trace = record(options, None, None, lambda: progress("recording requests", next(done), requests))
    source = f"moebench trace record, {requests} prompts of {Path(prompts).name or 'the training side of its domains'}"
    return dataclasses.replace(trace, metadata={**trace.metadata, "source": source, "seed": seed})


def prepared(spec: SystemSpec, knobs: Any, name: str, live: Any, backend: Any, seed: int) -> RecordedSystem:
    """The system as a session would build it, with room for every expert."""
    from moebench.harness.assets import with_drafter

    known = (live.pack.manifest.model["weights_hash"], live.config, backend.selection_bias())
    target = Target(name, live.geometry, *known, trees=backend.trees)
    equipment = spec.equip(knobs, target)
    backend.adapt(equipment.adapters)
    geometry = dataclasses.replace(live.geometry, top_k=equipment.top_k or live.geometry.top_k)
    drafter = with_drafter(live, backend, equipment.draft).drafter
    run = RunContext(geometry, geometry.keys, spec.scope, seed, ops=backend.ops, equipment=equipment, drafter=drafter)
    hooks: Any = Hooks([spec.make(knobs, run)])
    if hooks.route is None and hooks.draft is None:
        raise UsageError(f"system={spec.id} executes the model's own routing; leave it out to record that")
    return RecordedSystem(spec.id, hooks, geometry)
