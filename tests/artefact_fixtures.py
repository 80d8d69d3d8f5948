"""A small random model with tinymoe's tokenizer, and artefacts of random numbers, for tests of Edge0's files."""

from __future__ import annotations

import json
import shutil

import numpy as np
from torch_models import native_model

from moebench.backends.base import Adapters
from moebench.geometry import Geometry
from moebench.harness.plan import embedded_folder
from moebench.systems.edge0.artefact import Artefact, Base
from moebench.systems.edge0.heads import Plan, head_shapes
from moebench.systemspec import Target

BASE = Base("small", "abc", layers=4, experts=8, hidden=64, native_top_k=2, quant="int8")


def random_heads(owners, base=BASE, seed=0):
    """fp16 heads by owner."""
    rng = np.random.default_rng(seed)
    shapes = head_shapes(base.hidden, base.experts)
    return {n: {part: rng.standard_normal(s).astype(np.float16) for part, s in shapes.items()} for n in owners}


def random_pairs(names, rank=2, hidden=64, seed=0):
    """fp16 (A, B) of square projections by name."""
    rng = np.random.default_rng(seed)
    shapes = ((rank, hidden), (hidden, rank))
    return {name: tuple(rng.standard_normal(s).astype(np.float16) for s in shapes) for name in names}


def artefact(base=BASE, top_k=1, adapters=True, seed=0):
    """An artefact whose layers 1 and 2 are predicted."""
    made = Adapters(2.0, random_pairs(["model.layers.0.self_attn.q_proj", "b"], seed=seed)) if adapters else None
    plan = Plan(base.layers, top_k, (1, 2))
    return Artefact(base, plan, random_heads(plan.owners, base, seed), made, {"seed": seed})


def target(name="small", weights_hash="abc", **changes):
    """What a run asks an artefact for."""
    shape = {"layers": 4, "experts": 8, "top_k": 2, "hidden": 64, "intermediate": 32, "other_parameters": 1, **changes}
    return Target(name, Geometry(name, **shape), weights_hash)


def model_folder(folder, family="qwen3_moe", **changes):
    """A random model as a folder that transformers loads, with a tokenizer of 384 tokens."""
    native_model(family, vocab_size=384, **{"num_hidden_layers": 4, **changes}).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder() / name, folder)
    return folder


def examples_file(path):
    """A JSON-lines file of short sums."""
    items = [{"prompt": f"{n}+{n + 1}=", "completion": str(2 * n + 1)} for n in range(30)]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path
