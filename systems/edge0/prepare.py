"""``moebench prepare system=edge0``: train heads and adapters for a model, or take those that others published.

An artefact is the folder ``<model>-k<K>`` below ``out``; while it trains, ``<model>-k<K>.training`` stands beside its
place and a later call with the same options goes on from there. Imports torch only when it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from moebench.artefact import made_with, sha256
from moebench.config import at_least, option
from moebench.errors import UsageError
from moebench.systemspec import Preparation

SCRIPTS = ("basemodel.py", "data.py", "heads.py", "prepare.py", "student.py", "training.py")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PrepareOptions:
    """What is trained, on what, and for how long."""

    k: int = option(0, "experts per token; 0 takes half of the model's own")
    first: int = option(0, "first layer whose routing is predicted; 0 takes 7 of 40 layers, as the paper")
    last_layer: Literal["gate", "head"] = option("gate", "whether the last layer keeps its router or follows a head")
    first_token: Literal["gate", "heads"] = option("gate", "what routes the first decoded token")
    rank: int = option(16, "inner dimension of the recovery adapters")
    alpha: float = option(32.0, "adapters are scaled by alpha / rank")
    data: str = option("", "JSON-lines file with prompt and completion; empty: items of tinymoe's own domains")
    steps_distil: int = option(300, "steps in which heads learn the next layer's router")
    steps_tune: int = option(800, "steps on given text with predicted routing, heads and adapters")
    steps_onpolicy: int = option(60, "steps on what the model itself writes, scored by the unquantised model")
    seed: int = option(0, "seed of the start and of the choice of examples")
    threads: int = option(2, "threads of torch")
    quant: Literal["int4", "int8", "none"] = option("int4", "stored precision of experts that training sees")

    def __post_init__(self) -> None:
        steps = dict.fromkeys(("steps_distil", "steps_tune", "steps_onpolicy"), 0)
        at_least("prepare", self, k=0, first=0, rank=1, **steps, seed=0, threads=1)
        if not 0 < self.alpha < float("inf"):
            raise UsageError(f"prepare: alpha must be a positive number, got {self.alpha}")


def place(out: Path, name: str, top_k: int) -> Path:
    """Where the artefact of a model stands below ``out``."""
    return out / f"{name}-k{top_k}"


def fit(options: PrepareOptions, folder: Path, name: str, out: Path, progress: Progress) -> Path:
    """Train and write the artefact; ``KeyboardInterrupt`` leaves a state to go on from and says where it is."""
    import torch

    from moebench.systems.edge0.artefact import save
    from moebench.systems.edge0.basemodel import open_base, served_top_k
    from moebench.systems.edge0.heads import Plan, consumers_from
    from moebench.systems.edge0.training import PHASES, Recipe, Training

    base, _ = open_base(folder, name, options.quant)
    examples = _examples(options, folder)
    first = options.first or -(-7 * base.layers // 40)
    consumers = consumers_from(first, base.layers, options.last_layer == "head")
    if not consumers:
        most = base.layers - (1 if options.last_layer == "head" else 2)
        raise UsageError(f"prepare: first={first} must be at most {most} with last_layer={options.last_layer}")
    plan = Plan(base.layers, served_top_k(base, options.k), consumers, options.first_token)
    steps = (options.steps_distil, options.steps_tune, options.steps_onpolicy)
    out.mkdir(parents=True, exist_ok=True)
    target = place(out, name, plan.top_k)
    state = target.with_name(f"{target.name}.training")
    torch.manual_seed(options.seed)
    student, teacher = _models(options, folder, plan)
    training = Training(
        student, teacher, examples, Recipe(steps, seed=options.seed), state, _fingerprint(options, base, examples)
    )

    def report(phase: str, step: int, of: int, loss: float) -> None:
        done = sum(steps[: PHASES.index(phase)]) + step
        progress(f"{phase} {step}/{of}, loss {loss:.3f}", done, sum(steps))

    try:
        training.run(report, lambda phase: None)
    except KeyboardInterrupt:
        kept = f"the same command goes on from {state}" if state.is_file() else "nothing was kept yet"
        raise KeyboardInterrupt(f"stopped by Ctrl-C; {kept}") from None
    save(_artefact(base, plan, student, _provenance(training, options)), target)
    state.unlink()
    return target


def convert(options: PrepareOptions, source: Path, folder: Path, name: str, out: Path) -> Path:
    """Take published files, see ``importer.py``."""
    from moebench.systems.edge0.importer import convert as take

    return take(options, source, folder, name, out)


def _models(options: PrepareOptions, folder: Path, plan: Any) -> tuple[Any, Any]:
    """The student on experts as they are stored, and the model itself as teacher where a phase asks one."""
    from moebench.backends.torch_source import load_model
    from moebench.routing import law_of_config
    from moebench.systems.edge0.student import Student, dequantise_experts

    model = load_model(folder, "float32", "sdpa")
    law = law_of_config(model.config.to_dict())
    dequantise_experts(model, options.quant)
    teacher = load_model(folder, "float32", "sdpa") if options.steps_onpolicy else None
    if teacher is not None:
        teacher.set_experts_implementation("grouped_mm")
    return Student(model, law, plan, options.rank, options.alpha), teacher


def _artefact(base: Any, plan: Any, student: Any, provenance: dict[str, Any]) -> Any:
    """The student's heads and adapters in fp16; a number that fp16 cannot hold is an error that names its tensor."""
    import numpy as np

    from moebench.backends.base import Adapters
    from moebench.systems.edge0.artefact import Artefact
    from moebench.systems.edge0.heads import PARTS

    def half(tensor: Any) -> Any:
        with np.errstate(over="ignore"):  # an infinity is named when the artefact is made
            return tensor.detach().numpy().astype(np.float16)

    heads = {int(n): {part: half(getattr(head, part)) for part in PARTS} for n, head in student.heads.items()}
    pairs = {name: (half(a.a), half(a.b)) for name, a in zip(student.adapted, student.adapters, strict=True)}
    return Artefact(base, plan, heads, Adapters(student.scale, pairs), provenance)


def _examples(options: PrepareOptions, folder: Path) -> Any:
    from moebench.harness.assets import load_tokenizer
    from moebench.systems.edge0.data import from_file, from_generator

    own = Path(str(resources.files("moebench.models.tinymoe"))) / "checkpoint"
    if not options.data and folder.resolve() != own.resolve():
        raise UsageError(
            "prepare: only tinymoe has examples of its own; give data=FILE, JSON-lines of prompt, completion"
        )
    tokenizer = load_tokenizer(folder)
    made = from_file(options.data, tokenizer) if options.data else from_generator(tokenizer)
    if made.stop is None:
        raise UsageError(f"the tokenizer at {folder} has no end token, which completions need")
    return made


def _fingerprint(options: PrepareOptions, base: Any, examples: Any) -> dict[str, Any]:
    """All that decides what a training ends with; threads only decide when."""
    chosen = {k: v for k, v in dataclasses.asdict(options).items() if k not in ("threads", "data")}
    return {**chosen, "weights": base.weights_hash, **_data(options, examples)}


def _data(options: PrepareOptions, examples: Any) -> dict[str, str]:
    """What the examples are: a file by name and content, or a generator's description."""
    if not options.data:
        return {"data": examples.name}
    return {"data": Path(options.data).name, "data_sha256": sha256(Path(options.data))}


def _provenance(training: Any, options: PrepareOptions) -> dict[str, Any]:
    return {
        **_data(options, training.examples),
        "seed": options.seed,
        "steps": {"distil": options.steps_distil, "tune": options.steps_tune, "onpolicy": options.steps_onpolicy},
        "examples_per_step": training.recipe.examples,
        "tokens": training.tokens,
        "seconds": round(training.seconds, 1),
        "threads": options.threads,
        "losses": {phase: round(loss, 6) for phase, loss in training.losses.items()},
        **made_with(Path(__file__).parent, SCRIPTS, ("torch", "transformers")),
    }


PREPARATION = Preparation(PrepareOptions, fit, convert)
