"""``moebench prepare system=moe_infinity``: count the activation matrices of training requests.

For a model that computes they are recorded on prompts of the training side of tinymoe's own domains, or on a file of
prompts; for a geometry they are counted on a given trace. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from moebench import geometry
from moebench.artefact import made_with
from moebench.config import at_least, option
from moebench.errors import UsageError
from moebench.systems.moe_infinity import artefact
from moebench.systems.moe_infinity.counting import count
from moebench.systemspec import Preparation
from moebench.trace.format import Trace, load

SCRIPTS = ("counting.py", "prepare.py")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PrepareOptions:
    """Which requests the collection is made of."""

    requests: int = option(200, "prompts to record; a given trace has its own")
    new_tokens: int = option(64, "tokens each request emits, at most")
    prompts: str = option("", "JSON-lines file with a field prompt; empty: tinymoe's own domains, training side")
    trace: str = option("", "routing trace to count instead of recording one")
    seed: int = option(0, "seed of the choice of prompts")

    def __post_init__(self) -> None:
        at_least("prepare", self, requests=1, new_tokens=2, seed=0)
        if self.trace and self.prompts:
            raise UsageError("prepare: prompts has no effect with trace=FILE")


def fit(options: PrepareOptions, folder: Path, name: str, out: Path, progress: Progress) -> Path:
    """Write the folder ``name`` below ``out``; ``folder`` is a model's, or the file of a geometry."""
    weights_hash = ""
    if folder.is_file():
        if not options.trace:
            raise UsageError(f"prepare: {name} only replays; give trace=FILE, a routing trace of it")
        trace = load(options.trace)
        shape = geometry.load(folder)
        if (trace.layers, trace.expert_count) != (shape.layers, shape.experts):
            raise UsageError(
                f"prepare: trace {options.trace} has {trace.layers} layers of {trace.expert_count} experts, {name} has"
                f" {shape.layers} of {shape.experts}"
            )
    else:
        from moebench.backends.torch_source import folder_hash

        weights_hash = folder_hash(folder)
        trace = load(options.trace) if options.trace else _recorded(options, folder, progress)
    made = artefact.Prepared(name, trace.top_k, trace.hash, count(trace), weights_hash, _provenance(options, trace))
    return artefact.save(made, out / name)


def _recorded(options: PrepareOptions, folder: Path, progress: Progress) -> Trace:
    from moebench.commands.record import training_trace

    seed = f"moe_infinity/{options.seed}"
    return training_trace(folder, options.requests, options.new_tokens, options.prompts, seed, progress)


def _provenance(options: PrepareOptions, trace: Trace) -> dict[str, Any]:
    here = Path(str(resources.files(__package__)))
    if options.trace:
        data: dict[str, Any] = {"data": Path(options.trace).name, "source": trace.metadata["source"]}
    else:
        data = {
            "data": Path(options.prompts).name or "moebench.models.tinymoe.domains, test=False",
            "seed": options.seed,
        }
    return {
        **data,
        "requests": len(trace.sequence_starts),
        "tokens": trace.tokens,
        **made_with(here, SCRIPTS, ("numpy",) if options.trace else ("numpy", "torch", "transformers")),
    }


PREPARATION = Preparation(PrepareOptions, fit, geometries=True)
