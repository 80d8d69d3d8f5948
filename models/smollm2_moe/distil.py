"""A brief distillation: the split model learns to give the dense model's distribution over next tokens.

All weights but the embeddings move. A batch is a pure function of (seed, step) and the state is saved as it goes, so a
run that was interrupted goes on with the text it would have seen and ends with the very numbers. Needs torch.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moebench.errors import UsageError

WARM_UP = 0.05  # share of all steps
CLIP = 1.0  # norm of a gradient at most
STATE = "distil.pt"


@dataclass(frozen=True)
class Recipe:
    """How long and how fast: ``windows`` of text in each of ``steps``; ``save_every`` steps the state is kept."""

    steps: int = 200
    windows: int = 4
    rate: float = 2e-4
    seed: int = 0
    save_every: int = 10

    def __post_init__(self) -> None:
        if self.steps < 0 or min(self.windows, self.save_every) < 1 or not 0 < self.rate < 1:
            raise UsageError(f"distillation needs steps >= 0, windows >= 1 and a rate between 0 and 1, got {self}")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: up in a line, down in a cosine."""
        warm = max(1, round(WARM_UP * self.steps))
        rising = min(1.0, (step + 1) / warm)
        return self.rate * rising * 0.5 * (1 + math.cos(math.pi * step / max(1, self.steps)))

    def batch(self, step: int, of: int) -> list[int]:
        """Which of ``of`` windows a step sees: each once in an epoch, in an order of its own."""
        found = []
        for at in range(step * self.windows, (step + 1) * self.windows):
            order = list(range(of))
            random.Random(f"distil/{self.seed}/{at // of}").shuffle(order)
            found.append(order[at % of])
        return found


def loss_of(student: Any, dense: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of KL(dense || student) in nats; ids int64 [B, S]."""
    with torch.no_grad():
        truth = dense(ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
    said = student(ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
    return (truth.exp() * (truth - said)).sum(-1).mean()


def distil(
    student: Any,
    dense: Any,
    ids: np.ndarray,
    recipe: Recipe,
    folder: Path,
    key: str,
    told: Callable[[int, int, float], None],
) -> list[float]:
    """Train ``student`` in place on windows int64 [N, S]; the loss of each step.

    Goes on from ``folder`` where a run of the same ``key`` and recipe was interrupted; one of another is refused.
    """  # fmt: skip
    trained = {name: value for name, value in student.named_parameters() if "embed_tokens" not in name}
    for name, value in student.named_parameters():
        value.requires_grad_(name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = _resume(folder / STATE, f"{key} {recipe}", trained, optimizer)
    for step in range(len(losses), recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        total = 0.0
        for window in recipe.batch(step, len(ids)):  # one at a time: the logits of a window are large
            loss = loss_of(student, dense, torch.from_numpy(ids[window : window + 1])) / recipe.windows
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        told(step + 1, recipe.steps, total)
        if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
            _save(folder / STATE, f"{key} {recipe}", trained, optimizer, losses)
    return losses


def _save(file: Path, key: str, trained: dict[str, Any], optimizer: Any, losses: list[float]) -> None:
    """Written beside and renamed, so that an interruption leaves the state before."""
    state = {"key": key, "trained": trained, "optimizer": optimizer.state_dict(), "losses": losses}
    scratch = file.with_suffix(".part")
    torch.save(state, scratch)
    os.replace(scratch, file)


def _resume(file: Path, key: str, trained: dict[str, Any], optimizer: Any) -> list[float]:
    """Losses so far, with weights and optimizer as they were kept; none where nothing was."""
    if not file.is_file():
        return []
    state = torch.load(file, weights_only=True)
    if state["key"] != key:
        raise UsageError(f"{file} is of another recipe or other weights; remove {file.parent} to begin anew")
    for name, value in trained.items():
        value.data.copy_(state["trained"][name])
    optimizer.load_state_dict(state["optimizer"])
    return list(state["losses"])
