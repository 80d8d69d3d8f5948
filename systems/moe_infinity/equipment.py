"""What MoE-Infinity brings to a run: the collection that matching searches; and the figures its project published.

For weights it is a prepared file, for a recorded trace one prepared from others, for a synthetic trace it is counted
on other requests to the same synthetic model.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moebench.artefact import read_header
from moebench.errors import UsageError
from moebench.systems.moe_infinity import artefact
from moebench.systems.moe_infinity.counting import count
from moebench.systemspec import Equipment, Published, Target
from moebench.trace.format import Trace
from moebench.trace.synthetic import SyntheticSpec, synthesize

if TYPE_CHECKING:
    from moebench.systems.moe_infinity import MoeInfinityConfig

PAPER = "arXiv 2401.14361"
FLOAT = 4
CAPACITY = 1000  # trace_capacity of its code
MADE_UP = 64  # requests that a synthetic collection is counted on

SETTING = (
    "bf16, batch 1, all experts in pinned host memory, prefetch switched off in its main branch; prompts of LongBench, "
    "GSM8K, FLAN, BIG-Bench and MMLU"
)


def published_setting(config: MoeInfinityConfig, run: Any) -> bool:
    """Whether options are those of the code that the project's table was taken with."""
    return not config.prefetch and config.replace == "incache" and run.quant == "none"


PUBLISHED = tuple(
    Published("a5000_24gb", model, {"decode_tok_s": claim}, SETTING, published_setting)
    for model, claim in (("mixtral-8x7b", "moe_infinity_mixtral"), ("deepseek-v2-lite", "moe_infinity_deepseek"))
)


def equip(config: MoeInfinityConfig, target: Target) -> Equipment:
    """The starting matrices float64 [N, L, E] as content, and what the collection will hold; raises one clear line."""
    shape = target.geometry
    if not config.matches:
        return Equipment(content=np.zeros((0, shape.layers, shape.experts)))
    counts, notes, files = _start(config, target)
    capacity = config.capacity or len(counts) or CAPACITY
    if config.persistent >= capacity:
        raise UsageError(
            f"system.persistent={config.persistent} must be below the {capacity} entries of the collection"
        )
    held = {"predictor": capacity * shape.keys * FLOAT}
    return Equipment(held, assumptions=notes, files=files, content=counts.astype(np.float64))


def _start(config: MoeInfinityConfig, target: Target) -> tuple[np.ndarray, tuple[str, ...], dict[str, str]]:
    """Matrices, what is assumed, and the digest of a prepared file."""
    shape, trace = target.geometry, target.trace
    if config.collection == "empty":
        return np.zeros((0, shape.layers, shape.experts)), (), {}
    folder = Path(config.collection).expanduser() if config.collection else None
    if folder is None and trace is not None and "parameters" in trace.metadata:
        return _made_up(trace)
    folder = folder or artefact.find(target)
    if folder is None:
        raise UsageError(
            f"moe_infinity: no collection for {target.name}; {artefact.command(target)}, or start with"
            " system.collection=empty"
        )
    made = artefact.load(folder)
    artefact.check(made, target)
    notes = () if trace is None else (f"assumed: activation matrices of another trace ({made.trace_hash[:8]})",)
    return made.counts, notes, {"collection": read_header(folder / artefact.FILE)["digest"]}


def _made_up(trace: Trace) -> tuple[np.ndarray, tuple[str, ...], dict[str, str]]:
    """Matrices of other requests to the synthetic model that made this trace."""
    known = {field.name for field in fields(SyntheticSpec)}
    spec = SyntheticSpec(**{name: value for name, value in trace.metadata["parameters"].items() if name in known})
    texts = -(-MADE_UP // spec.sequences)
    counts = [count(synthesize(replace(spec, text=spec.text + n))) for n in range(1, texts + 1)]
    matrices = np.concatenate(counts)[:MADE_UP]
    return matrices, (f"assumed: activation matrices of {MADE_UP} other requests to the same synthetic model",), {}
