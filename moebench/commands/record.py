"""``moebench trace record``: run prompts through a model that computes and keep what its router chose.

The model's own routing runs, from a pack read expert by expert: no cache, no clock, no system.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moebench.config import option
from moebench.step import Routing, Step
from moebench.trace.format import Trace
from moebench.trace.record import Recorder


@dataclass(frozen=True)
class RecordOptions:
    """Which model answers which prompts, and where the trace goes."""

    out: str = dataclasses.field(metadata={"help": "trace file to write"})
    model: str = option("tinymoe", "tinymoe or a model folder")
    prompts: str = option("", "JSON-lines file with a field prompt; empty for the shipped prompts")
    requests: int = option(8, "prompts to run")
    new_tokens: int = option(64, "tokens each request emits")
    seed: int = option(0, "which prompts of the file are taken")
    quant: Literal["int4", "int8", "none"] = option("int4", "stored precision of expert weights")


class RecordingExperts:
    """Stands where the loop's experts stand: serves every demand from the pack and notes the native routing."""

    def __init__(self, pack: Any, buffer: np.ndarray) -> None:
        self.pack, self.buffer, self.recorder, self.request = pack, buffer, Recorder(), 0
        self.step: Step | None = None
        self.routings: list[Routing] = []

    def begin_request(self, sequences: np.ndarray) -> None:
        """Requests are numbered by the caller."""

    def begin(self, step: Step) -> None:
        """A pass starts; its rows belong to the current request."""
        self.step = dataclasses.replace(step, sequence=step.sequence + self.request)
        self.routings = []

    def serve(self, layer: int, hidden: Any, native: Routing) -> tuple[Routing, Iterator[tuple[int, np.ndarray]]]:
        """The native routing, and each of its experts read from the pack."""
        assert self.step is not None  # begin comes before serve
        self.routings.append(native)
        return native, self._read(layer, native.demand(self.step.valid))

    def end(self) -> None:
        """The pass is over: keep its routings."""
        assert self.step is not None
        self.recorder.add_step(self.step, self.routings)

    def _read(self, layer: int, experts: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        for expert in experts:
            self.pack.read(layer * self.pack.experts + expert, self.buffer)
            yield expert, self.buffer


def record(options: RecordOptions, tick: Callable[[], None]) -> Trace:
    """Decode greedily, one request after another, and return the trace."""
    from moebench.backends.torch_model import TorchBackend
    from moebench.engine.loop import Loop
    from moebench.harness.assets import load_live, read_prompts
    from moebench.harness.plan import EMBEDDED, embedded_folder
    from moebench.store.pages import aligned_buffer

    folder = embedded_folder() if options.model == EMBEDDED else Path(options.model)
    name = EMBEDDED if options.model == EMBEDDED else folder.resolve().name
    shipped = Path(str(resources.files("moebench.models.tinymoe"))) / "tasks" / "prompts.jsonl"
    prompts = read_prompts(Path(options.prompts) if options.prompts else shipped, options.requests, options.seed)
    live = load_live(folder, name, options.quant, "packed")
    backend = TorchBackend(live.pack, live.pack.dense_path, live.config)
    experts = RecordingExperts(live.pack, aligned_buffer(live.pack.slot_bytes))
    loop = Loop(backend, experts)  # type: ignore[arg-type]
    for experts.request, prompt in enumerate(prompts):
        loop.generate([live.tokenizer(prompt)["input_ids"]], options.new_tokens, stop=live.tokenizer.eos_token_id)
        tick()
    source = f"moebench trace record, {options.requests} prompts of {options.prompts or 'the shipped set'}"
    shape = {"model": name, "experts": live.pack.experts, "source": source, "seed": options.seed}
    return experts.recorder.trace(shape)
