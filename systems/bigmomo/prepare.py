"""``moebench prepare system=bigmomo``: count how deep a draft's guesses hold on a model's own greedy text.

At each place of each answer the draft guesses; a level counts as right if the path of all levels up to it is what the
served model went on to say. Imports torch only when it runs.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moebench.artefact import made_with
from moebench.config import at_least, option
from moebench.draft import ROOT, Draft, lookup
from moebench.errors import UsageError
from moebench.systems.bigmomo.acceptance import LOOKUP, Counted, draft_hash_of, save
from moebench.systemspec import Preparation

Progress = Callable[[str, int, int], None]
Propose = Callable[[np.ndarray, int, int], Draft]


@dataclass(frozen=True)
class PrepareOptions:
    """Which draft, and on which text."""

    draft: str = option("auto", "auto (tinymoe's own draft, else lookup), lookup, or the folder of a dense model")
    depth: int = option(4, "levels to count")
    branching: int = option(3, "continuations of each node to count, from 1 up")
    prompts: str = option("", "JSON-lines file with a field prompt; empty: tinymoe's training items")
    requests: int = option(48, "prompts to answer")
    new_tokens: int = option(64, "tokens of an answer at most")
    quant: Literal["int4", "int8", "none", "stored"] = option(
        "int4", "stored precision of expert weights; stored: as a quantised checkpoint has them"
    )
    seed: int = option(1, "seed of tinymoe's items, or the first prompt of a file")
    threads: int = option(1, "threads of torch")

    def __post_init__(self) -> None:
        at_least("prepare", self, depth=1, branching=1, requests=1, threads=1, new_tokens=2, seed=0)
        if self.draft == "none":
            raise UsageError("prepare: draft=none has no acceptance; choose auto, lookup, or a folder")


def path_ranks(draft: Draft, truth: np.ndarray) -> list[int]:
    """Which child of its parent, from 0, each node on the path is that says ``truth`` (int64), as far as one does."""
    parent, ranks = ROOT, []
    for token in truth.tolist():
        children = np.flatnonzero(draft.parents == parent)
        found = np.flatnonzero(draft.tokens[children] == token)
        if not len(found):
            break
        ranks.append(int(found[0]))
        parent = int(children[found[0]])
    return ranks


def count(propose: Propose, prompt: list[int], answer: list[int], depth: int, branching: int) -> tuple[int, np.ndarray]:
    """Places of one answer that ``depth`` more tokens follow, and int64 [branching, depth] how often levels held.

    A tree with fewer continuations is the part of one with more that keeps the first of each node.
    """
    text = np.array([*prompt, *answer], np.int64)
    right = np.zeros((branching, depth), np.int64)
    ends = range(len(prompt) + 1, len(text) - depth + 1)
    for end in ends:
        ranks = np.array(path_ranks(propose(text[:end], depth, branching), text[end : end + depth]), np.int64)
        needs = np.maximum.accumulate(ranks)  # the branching that holds the path so far, less one
        right[:, : len(needs)] += np.arange(branching)[:, None] >= needs
    return len(ends), right


def fit(options: PrepareOptions, folder: Path, name: str, out: Path, progress: Progress) -> Path:
    """Answer, count, and write a folder named after model and draft below ``out``."""
    from moebench.backends.torch_model import TorchBackend
    from moebench.backends.torch_source import folder_hash
    from moebench.commands.record import RecordingExperts
    from moebench.engine.loop import Loop
    from moebench.harness.assets import load_live, with_drafter
    from moebench.store.pages import aligned_buffer
    from moebench.systems.bigmomo.equipment import draft_folder

    chosen = draft_folder(options.draft, name)
    live = load_live(folder, name, options.quant, "packed")
    backend = TorchBackend(live.pack, live.pack.dense_path, live.config)
    drafter = with_drafter(live, backend, chosen).drafter
    propose = lookup if drafter is None else drafter.propose
    loop = Loop(backend, RecordingExperts(live.pack, aligned_buffer(live.pack.slot_bytes)))  # type: ignore[arg-type]
    prompts, places = _prompts(options, name), 0
    right = np.zeros((options.branching, options.depth), np.int64)
    for done, prompt in enumerate(prompts, start=1):
        ids = live.tokenizer(prompt)["input_ids"]
        answer = loop.generate([ids], options.new_tokens, stop=live.ends).tokens[0]
        more, held = count(propose, ids, answer, options.depth, options.branching)
        places, right = places + more, right + held
        progress("drafting along answers", done, len(prompts))
    if not places:
        raise UsageError(f"prepare: no answer was longer than depth={options.depth} tokens")
    draft = LOOKUP if chosen is None else chosen.resolve().name
    draft_hash = LOOKUP if chosen is None else draft_hash_of(chosen)
    counted = Counted(
        name, folder_hash(folder), live.geometry.top_k, draft, draft_hash, places, right,
        _provenance(options, len(prompts)),
    )  # fmt: skip
    return save(counted, out / f"{name}-{draft}")


def _prompts(options: PrepareOptions, name: str) -> list[str]:
    """Prompts that share none with what is evaluated."""
    from moebench.harness.assets import read_prompts
    from moebench.harness.plan import EMBEDDED

    if options.prompts:
        return read_prompts(Path(options.prompts), options.requests, options.seed)
    if name != EMBEDDED:
        raise UsageError("prepare: only tinymoe has prompts of its own; give prompts=FILE")
    from moebench.models.tinymoe.domains import DOMAINS, generate

    rng, domains = random.Random(f"bigmomo/{options.seed}"), list(DOMAINS)
    return [generate(domains[i % len(domains)], rng, test=False).prompt for i in range(options.requests)]


def _provenance(options: PrepareOptions, prompts: int) -> dict[str, Any]:
    script = Path(__file__)
    return {
        "source": Path(options.prompts).name or "training side of tinymoe's domains",
        "prompts": prompts,
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k not in ("draft", "prompts", "threads")},
        **made_with(script.parent, (script.name,), ("torch", "transformers")),
    }


PREPARATION = Preparation(PrepareOptions, fit)
