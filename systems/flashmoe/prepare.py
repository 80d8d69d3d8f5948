"""``moebench prepare system=flashmoe``: fit eviction nets to the routing of a model or of a geometry.

The routing is a given trace, a recording of training prompts, or for a geometry that only replays a synthetic trace of
another seed than those that runs are made of. Imports torch only when it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from moebench import geometry
from moebench.artefact import made_with
from moebench.config import at_least, option
from moebench.errors import UsageError
from moebench.systemspec import Preparation
from moebench.trace.format import Trace, load

SCRIPTS = ("labels.py", "nets.py", "prepare.py", "training.py")
HIDDEN = {"joint": 64, "shared": 32}
SHARES = (0.25, 0.5)  # of a layer's experts, held while the fitted nets are compared
PROMPT = 64  # prompt tokens of a synthetic request
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PrepareOptions:
    """On what the nets are fitted, and how."""

    nets: Literal["auto", "both", "joint", "shared"] = option(
        "auto", "which nets; auto: shared on synthetic routing, else both"
    )
    trace: str = option("", "routing trace to fit on; empty: recorded, or synthetic for a geometry")
    prompts: str = option("", "JSON-lines file with a field prompt to record; empty: tinymoe's training items")
    requests: int = option(0, "requests to record or to make up; 0: 300 recorded, 16 made up")
    new_tokens: int = option(0, "tokens that each request emits; 0: up to 64 recorded, 192 made up")
    hidden: int = option(0, "hidden size of the nets; 0: 64 in joint, 32 in shared ones")
    horizon: float = option(0.75, "distances are clipped at this share of a layer's experts")
    chunk: int = option(32, "prompt tokens that are one step")
    held_out: float = option(0.2, "share of the requests that only end the fit")
    rate: float = option(0.002, "step size of AdamW")
    epochs: int = option(200, "epochs at most")
    patience: int = option(5, "epochs without a smaller held-out loss that end the fit")
    seed: int = option(1, "seed of the routing, the start and the order")
    threads: int = option(2, "threads of torch")

    def __post_init__(self) -> None:
        at_least("prepare", self, requests=0, new_tokens=0, hidden=0, chunk=1, epochs=1, patience=1, seed=0, threads=1)
        for name, bound in {"horizon": 100, "held_out": 1, "rate": 1}.items():
            if not 0 < getattr(self, name) < bound:
                raise UsageError(f"prepare: {name} must lie between 0 and {bound}, got {getattr(self, name)}")
        if self.trace and (self.prompts or self.requests or self.new_tokens):
            raise UsageError("prepare: prompts, requests and new_tokens have no effect with trace=FILE")


def fit(options: PrepareOptions, folder: Path, name: str, out: Path, progress: Progress) -> Path:
    """Fit and write the folder ``name`` below ``out``; ``folder`` is a model's, or the file of a geometry."""
    from moebench.systems.flashmoe.artefact import Fitted, save
    from moebench.systems.flashmoe.labels import held_out_rows, samples
    from moebench.systems.flashmoe.training import Recipe
    from moebench.systems.flashmoe.training import fit as fit_net

    weights_hash, trace = _routing(options, folder, name, progress)
    horizon = round(options.horizon * trace.expert_count)
    if horizon < 2:
        raise UsageError(f"prepare: horizon={options.horizon} of {trace.expert_count} experts is less than 2 steps")
    learned = samples(trace, options.chunk, horizon, options.held_out)
    if learned.held_out.all() or not learned.held_out.any():
        raise UsageError("prepare: the routing is too short to fit on one part and hold out another")
    made_up = "generator" in trace.metadata
    kinds = {"auto": ("shared",) if made_up else ("joint", "shared"), "both": ("joint", "shared")}
    nets, reports = {}, {}
    for kind in kinds.get(options.nets, (options.nets,)):
        recipe = Recipe(options.rate, options.epochs, options.patience, options.seed)
        nets[kind], reports[kind] = fit_net(kind, options.hidden or HIDDEN[kind], learned, recipe, progress)
    progress("cache replay of what was held out", 0, 1)
    rates = _hit_rates(trace.take(held_out_rows(trace, options.held_out)), options.chunk, nets)
    preferred = max(nets, key=lambda kind: sum(rates[kind]))
    provenance = {**_provenance(options, trace, len(learned.held_out), reports), "held_out_hit_rates": rates}
    return save(Fitted(name, weights_hash, trace.top_k, trace.hash, preferred, nets, provenance), out / name)


def _hit_rates(trace: Trace, chunk: int, nets: dict[str, Any]) -> dict[str, list[float]]:
    """Hits per request of LRU and of the nets with slots for each of ``SHARES`` of a layer's experts."""
    from moebench.residency.replay import events, replay
    from moebench.systems.flashmoe.policy import Learned

    todo = events(trace, chunk)
    sizes = [trace.layers * max(trace.top_k, round(share * trace.expert_count)) for share in SHARES]
    arms = {"lru": "lru", **{kind: partial(Learned, nets=net) for kind, net in nets.items()}}
    rates = {}
    for name, policy in arms.items():
        done = [replay(todo, policy, slots, "per_layer") for slots in sizes]
        rates[name] = [round(one.hits / one.requests, 6) for one in done]
    return rates


def _routing(options: PrepareOptions, folder: Path, name: str, progress: Progress) -> tuple[str, Trace]:
    """The hash of the weights, where there are any, and the trace to fit on."""
    weights_hash = ""
    if folder.is_file():
        if options.prompts:
            raise UsageError(f"prepare: {name} only replays, it answers no prompts; give trace=FILE")
        shape = geometry.load(folder)
    else:
        from moebench.backends.torch_source import folder_hash

        weights_hash = folder_hash(folder)
    if options.trace:
        trace = load(options.trace)
        if folder.is_file() and (trace.layers, trace.expert_count) != (shape.layers, shape.experts):
            raise UsageError(
                f"prepare: trace {options.trace} has {trace.layers} layers of {trace.expert_count} experts, {name} has"
                f" {shape.layers} of {shape.experts}"
            )
        return weights_hash, trace
    if not folder.is_file():
        from moebench.commands.record import training_trace

        return weights_hash, training_trace(
            folder,
            options.requests or 300,
            options.new_tokens or 64,
            options.prompts,
            f"flashmoe/{options.seed}",
            progress,
        )
    from moebench.trace.fits import synthetic

    progress("synthetic routing", 0, 1)
    return "", synthetic(
        name, layers=shape.layers, experts=shape.experts, top_k=shape.top_k, sequences=options.requests or 16,
        prefill=PROMPT, decode=options.new_tokens or 192, seed=options.seed,
    )  # fmt: skip


def _provenance(options: PrepareOptions, trace: Trace, steps: int, reports: dict[str, Any]) -> dict[str, Any]:
    settings = {
        k: v for k, v in dataclasses.asdict(options).items() if k not in ("nets", "trace", "prompts", "requests")
    }
    data = Path(options.trace or options.prompts).name
    return {
        "source": f"{trace.metadata['source']}, seed {trace.metadata['seed']}" if not options.trace else data,
        "data": data or trace.metadata["source"],
        "requests": len(trace.sequence_starts),
        "tokens": trace.tokens,
        "steps": steps,
        "options": settings,
        "fits": reports,
        **made_with(Path(__file__).parent, SCRIPTS, ("numpy", "torch")),
    }


PREPARATION = Preparation(PrepareOptions, fit, geometries=True)
