"""``moebench prepare system=moe_infinity``: count the activation matrices of training requests.

For a model that computes they are recorded on prompts of the training side of tinymoe's own domains, or on a file of
prompts; for a geometry they are counted on a given trace. Nothing is trained.
"""

from __future__ import annotations

import hashlib
import json
import platform
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from moebench import geometry
from moebench.config import option
from moebench.errors import UsageError
from moebench.systems.moe_infinity import artefact
from moebench.systems.moe_infinity.counting import count
from moebench.systemspec import Preparation
from moebench.trace.format import Trace, load
from moebench.version import __version__

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
        for name, least in {"requests": 1, "new_tokens": 2, "seed": 0}.items():
            if getattr(self, name) < least:
                raise UsageError(f"prepare: {name} must be at least {least}, got {getattr(self, name)}")
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
        trace = load(options.trace) if options.trace else _record(options, folder, progress)
    made = artefact.Prepared(name, trace.top_k, trace.hash, count(trace), weights_hash, _provenance(options, trace))
    return artefact.save(made, out / name)


def _record(options: PrepareOptions, folder: Path, progress: Progress) -> Trace:
    from moebench.commands.record import RecordOptions, record
    from moebench.harness.plan import EMBEDDED, embedded_folder

    embedded = folder.resolve() == embedded_folder().resolve()
    if not (options.prompts or embedded):
        raise UsageError("prepare: only tinymoe has prompts of its own; give prompts=FILE or trace=FILE")
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress("requests", done, options.requests)

    with tempfile.TemporaryDirectory() as scratch:
        prompts = options.prompts or str(_training_prompts(options, Path(scratch) / "prompts.jsonl"))
        words = RecordOptions(
            out="", model=EMBEDDED if embedded else str(folder), prompts=prompts, requests=options.requests,
            new_tokens=options.new_tokens, seed=options.seed,
        )  # fmt: skip
        return record(words, None, None, tick)


def _training_prompts(options: PrepareOptions, path: Path) -> Path:
    """Prompts of all domains in turn from the training side, which shares none with what is evaluated."""
    from moebench.models.tinymoe.domains import DOMAINS, generate

    rng = random.Random(f"moe_infinity/{options.seed}")
    domains = list(DOMAINS)
    items = [generate(domains[i % len(domains)], rng, test=False) for i in range(options.requests)]
    path.write_text("".join(json.dumps({"prompt": item.prompt}) + "\n" for item in items))
    return path


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
        "versions": {
            "python": platform.python_version(),
            "moebench": __version__,
            **{
                name: metadata.version(name)
                for name in ("numpy", *(() if options.trace else ("torch", "transformers")))
            },
        },
        "scripts": {script: hashlib.sha256((here / script).read_bytes()).hexdigest() for script in SCRIPTS},
    }


PREPARATION = Preparation(PrepareOptions, fit, geometries=True)
