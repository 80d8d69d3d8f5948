"""Distillation of the adapters: KL(softmax of the next router's own logits || prediction), over answers' tokens, layers
and lags, the lags weighted 2 to 1 (SpecPrefetch, arXiv 2607.24787, and its code). The model and its routers are frozen.

A batch is a pure function of (seed, step). Needs torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moebench.artefact import sha256
from moebench.backends.torch_experts import expert_modules, router_module
from moebench.backends.torch_source import folder_hash, load_model
from moebench.errors import UsageError
from moebench.harness.assets import load_tokenizer
from moebench.jsonl import read_jsonl
from moebench.systems.specprefetch.adapters import Shape
from moebench.systems.specprefetch.prepare import PrepareOptions

LAG_WEIGHT = {1: 2.0, 2: 1.0}
WARM, CLIP = 0.03, 0.5
Item = tuple[list[int], list[int]]  # prompt, completion with its end token


class Teacher:
    """The frozen model: what its routers see and say. ``gates`` [L, n, D] are their weights."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder, "float32", "sdpa")
        self.model.set_experts_implementation("grouped_mm")
        self.model.requires_grad_(False)
        routers = [router_module(self.model, name) for name in expert_modules(self.model)]
        self.gates = torch.stack([router.weight.detach() for router in routers])
        self.layers, self.experts, self.hidden = self.gates.shape
        self.top_k = self.model.config.get_text_config().num_experts_per_tok
        self.weights_hash = folder_hash(folder)
        self._seen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_pre_hook(lambda module, inputs: self._seen.append(inputs[0]))

    def gate_arrays(self) -> tuple[np.ndarray, ...]:
        """The routers' weights, fp16."""
        return tuple(half(gate) for gate in self.gates)

    @torch.no_grad()
    def features(self, batch: list[Item]) -> torch.Tensor:
        """Router inputs fp32 [L, N, D] at the tokens of the completions, which are what decoding runs over."""
        lengths = [len(p) + len(c) for p, c in batch]
        ids, counted = torch.zeros(len(batch), max(lengths), dtype=torch.long), []
        for row, (prompt, completion) in enumerate(batch):  # right-padded: causal attention never looks there
            ids[row, : lengths[row]] = torch.tensor([*prompt, *completion])
            counted.append(row * ids.shape[1] + torch.arange(len(prompt), lengths[row] - 1))
        self._seen.clear()
        self.model(input_ids=ids, use_cache=False)
        return torch.stack([x.reshape(-1, self.hidden)[torch.cat(counted)] for x in self._seen])


class Adapters(nn.Module):
    """A and B of every adapter; B starts at zero, A random over r."""

    def __init__(self, shape: Shape, gates: torch.Tensor) -> None:
        super().__init__()
        self.shape, self.frozen = shape, gates
        count = len(shape.names)
        self.a = nn.Parameter(torch.randn(count, shape.rank, shape.hidden) / shape.rank)
        self.b = nn.Parameter(torch.zeros(count, shape.experts, shape.rank))
        at = {name: i for i, name in enumerate(shape.names)}
        self.used = torch.tensor([at[shape.name(layer, lag)] for layer, lag in shape.pairs])
        self.source = torch.tensor([layer for layer, _ in shape.pairs])
        self.target = torch.tensor([layer + lag for layer, lag in shape.pairs])
        self.weight = torch.tensor([LAG_WEIGHT[lag] for _, lag in shape.pairs])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [pairs, N, n] from router inputs [L, N, D]."""
        seen = x[self.source]
        z = seen @ self.a[self.used].transpose(1, 2) @ self.b[self.used].transpose(1, 2)
        if self.shape.base == "next_gate":
            z = z + seen @ self.frozen[self.target].transpose(1, 2)
        return z

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Mean KL over tokens and pairs, lags weighted."""
        true = (x[self.target] @ self.frozen[self.target].transpose(1, 2)).log_softmax(-1)
        said = self(x).log_softmax(-1)
        each = (true.exp() * (true - said)).sum(-1).mean(1)
        return (each * self.weight).sum() / self.weight.sum()

    def arrays(self) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """Name to (A, B), fp16."""
        return {name: (half(self.a[i]), half(self.b[i])) for i, name in enumerate(self.shape.names)}


def half(tensor: torch.Tensor) -> np.ndarray:
    """fp16; a number that it cannot hold is named when the artefact is made."""
    with np.errstate(over="ignore"):
        return tensor.detach().numpy().astype(np.float16)


def distil(
    student: Adapters,
    teacher: Teacher,
    draw: Callable[[random.Random], Item],
    options: PrepareOptions,
    progress: Callable[[str, int, int], None],
) -> tuple[list[float], int]:
    """Train in place; returns the loss of each step and the tokens seen. AdamW, warm-up and cosine as the paper's."""
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses, tokens, steps = [], 0, options.steps
    for step in range(steps):
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / max(1, WARM * steps))
            group["lr"] = options.rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        rng = random.Random(f"{options.seed}/{step}")
        x = teacher.features([draw(rng) for _ in range(options.examples)])
        optimizer.zero_grad(set_to_none=True)
        loss = student.loss(x)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
        tokens += x.shape[1]
        progress(f"KL {losses[-1]:.4f}", step + 1, steps)
    return losses, tokens


def items(data: str, folder: Path) -> tuple[Callable[[random.Random], Item], Any]:
    """A drawer of items as token ids, and what they are: a file, or tinymoe's own domains, never their tests."""
    own = Path(str(resources.files("moebench.models.tinymoe"))) / "checkpoint"
    if not data and folder.resolve() != own.resolve():
        raise UsageError("prepare: only tinymoe has items of its own; give data=FILE, JSON-lines of prompt, completion")
    tokenizer = load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer at {folder} has no end token, which completions need")

    def ids(prompt: str, completion: str) -> Item:
        return tokenizer(prompt)["input_ids"], [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]

    if data:
        lines = read_jsonl(Path(data))
        pairs = [
            (line["prompt"], line["completion"]) for line in lines if line.get("prompt") and line.get("completion")
        ]
        if not pairs:
            raise UsageError(f"{data} holds no lines with the text fields 'prompt' and 'completion'")
        return lambda rng: ids(*rng.choice(pairs)), {"file": Path(data).name, "sha256": sha256(Path(data))}
    from moebench.models.tinymoe.domains import DOMAINS, generate

    def made(rng: random.Random) -> Item:
        level = 1.0 if rng.random() < 0.7 else rng.random()
        item = generate(rng.choice(list(DOMAINS)), rng, test=False, level=level)
        return ids(item.prompt, item.completion)

    return made, "training items of tinymoe's domains"
