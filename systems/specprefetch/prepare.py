"""``moebench prepare system=specprefetch``: distil adapters for a model, or take those that others published.

An artefact is the folder ``<model>-<adapters>-<base>`` below ``out``. Imports torch only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moebench.artefact import made_with
from moebench.config import at_least, option
from moebench.errors import UsageError
from moebench.systemspec import Preparation

SCRIPTS = ("adapters.py", "prepare.py", "training.py")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PrepareOptions:
    """What is distilled, from what, and for how long."""

    adapters: Literal["pairs", "shared"] = option("pairs", "one adapter for each pair of layers, or one for all")
    base: Literal["next_gate", "none"] = option("next_gate", "what an adapter corrects: the next router, or nothing")
    rank: int = option(0, "inner dimension; 0 takes a quarter of the experts, as the paper's 32 of 128")
    horizon: int = option(2, "layers ahead that are learned, 1 or 2")
    data: str = option("", "JSON-lines file with prompt and completion; empty: training items of tinymoe's domains")
    steps: int = option(300, "batches; each item is seen once")
    examples: int = option(24, "items in a batch")
    rate: float = option(3e-3, "peak learning rate; the paper's 1e-4 is for batches of a thousand long items")
    seed: int = option(0, "seed of the start and of the choice of items")
    threads: int = option(2, "threads of torch")

    def __post_init__(self) -> None:
        at_least("prepare", self, rank=0, horizon=1, steps=0, examples=1, seed=0, threads=1)
        if not 0 < self.rate < 1:
            raise UsageError(f"prepare: rate must lie between 0 and 1, got {self.rate}")


def place(out: Path, name: str, kind: str, base: str) -> Path:
    """Where the artefact of a model stands below ``out``."""
    return out / f"{name}-{kind}-{base}"


def fit(options: PrepareOptions, folder: Path, name: str, out: Path, progress: Progress) -> Path:
    """Distil and write the artefact."""
    import torch

    from moebench.systems.specprefetch.adapters import Shape
    from moebench.systems.specprefetch.artefact import Artefact, save
    from moebench.systems.specprefetch.training import Adapters, Teacher, distil, items

    torch.manual_seed(options.seed)
    teacher = Teacher(folder)
    rank = options.rank or max(1, teacher.experts // 4)
    shape = Shape(
        teacher.layers, teacher.experts, teacher.hidden, rank, options.horizon, options.adapters, options.base
    )
    draw, named = items(options.data, folder)
    student = Adapters(shape, teacher.gates)
    losses, tokens = distil(student, teacher, draw, options, progress)
    provenance = {
        "data": named,
        "seed": options.seed,
        "steps": options.steps,
        "examples_per_step": options.examples,
        "rate": options.rate,
        "tokens": tokens,
        "kl": {"first": round(losses[0], 6), "last": round(losses[-1], 6)} if losses else {},
        **made_with(Path(__file__).parent, SCRIPTS, ("torch", "transformers")),
    }
    made = Artefact(
        name, teacher.weights_hash, teacher.top_k, shape, student.arrays(), teacher.gate_arrays(), provenance
    )
    return save(made, place(out, name, shape.kind, shape.base))


def convert(options: PrepareOptions, source: Path, folder: Path, name: str, out: Path) -> Path:
    """Take published files, see ``importer.py``."""
    from moebench.systems.specprefetch.importer import convert as take

    return take(options, source, folder, name, out)


def given(options: Any) -> list[str]:
    """Names of the options that are not at their default."""
    return [name for name, f in type(options).__dataclass_fields__.items() if getattr(options, name) != f.default]


PREPARATION = Preparation(PrepareOptions, fit, convert)
