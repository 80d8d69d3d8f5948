"""Fits the eviction nets by imitation of Belady: mean squared error on next-use distances, AdamW, early stopping.

Knows samples and shapes; knows no traces and no files. Imports torch, so no run imports it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moebench.systems.flashmoe.labels import Samples
from moebench.systems.flashmoe.nets import GRID, LARGEST, Nets, widths

EPOCH = 16384  # steps (joint) or experts in steps (shared) that one layer's net sees in an epoch, at most
BATCH = 256
CHECK = 4096  # of the held-out steps or experts, at most as many are looked at
LEAST_GAIN = 1e-5


@dataclass(frozen=True)
class Recipe:
    """How long and how fast; ``patience`` epochs without a smaller held-out loss end it."""

    rate: float
    epochs: int
    patience: int
    seed: int


class Stack(torch.nn.Module):
    """The nets of all layers side by side: x [L, N, in] -> [L, N, out]."""

    def __init__(self, kind: str, layers: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.matrices, self.biases = torch.nn.ParameterList(), torch.nn.ParameterList()
        for i, o in widths(kind, experts, hidden):
            for held, shape in ((self.matrices, (layers, i, o)), (self.biases, (layers, 1, o))):
                held.append(torch.nn.Parameter((torch.rand(shape) * 2 - 1) / i**0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, (matrix, bias) in enumerate(zip(self.matrices, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, matrix)
            x = torch.nn.functional.silu(x) if n < 2 else x
        return x

    def stored(self) -> np.ndarray:
        """int16 [L, parameters], as ``nets.Nets`` lays them out."""
        parts = [p.detach().flatten(1) for pair in zip(self.matrices, self.biases, strict=True) for p in pair]
        return (torch.cat(parts, 1) * GRID).round().to(torch.int16).numpy()


def draws(kind: str, samples: Samples) -> Callable[[np.ndarray, np.ndarray], tuple[torch.Tensor, torch.Tensor]]:
    """(step, expert) indices [N] -> inputs [L, N, in] and targets [L, N, out]; ``joint`` needs no expert."""
    recency, frequency, target = (
        torch.from_numpy(np.ascontiguousarray(a.swapaxes(0, 1)))
        for a in (samples.recency, samples.frequency, samples.target)
    )

    def joint(step: np.ndarray, expert: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([recency[:, step], frequency[:, step]], 2), target[:, step]

    def shared(step: np.ndarray, expert: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.stack([recency[:, step, expert], frequency[:, step, expert]], 2)
        return x, target[:, step, expert][..., None]

    return joint if kind == "joint" else shared


def fit(
    kind: str, hidden: int, samples: Samples, recipe: Recipe, progress: Callable[[str, int, int], None]
) -> tuple[Nets, dict[str, Any]]:
    """The nets with the smallest held-out loss, and how they came about."""
    started = time.perf_counter()
    layers, experts = samples.target.shape[1:]
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    stack, draw = Stack(kind, layers, experts, hidden), draws(kind, samples)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=recipe.rate)
    seen, held = np.flatnonzero(~samples.held_out), np.flatnonzero(samples.held_out)

    def choose(steps: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """In random order: every step once for joint, as many (step, expert) for shared; ``most`` of them."""
        if kind == "joint":
            chosen = rng.permutation(steps)[:most]
            return chosen, chosen
        count = min(most, len(steps) * experts)
        return steps[rng.integers(len(steps), size=count)], rng.integers(experts, size=count)

    check = draw(*choose(held, CHECK))
    best, best_epoch, epoch = np.inf, 0, 0
    kept = stack.stored()
    while epoch < recipe.epochs and epoch - best_epoch < recipe.patience:
        epoch += 1
        step, expert = choose(seen, EPOCH)
        for at in range(0, len(step), BATCH):
            x, y = draw(step[at : at + BATCH], expert[at : at + BATCH])
            loss = (stack(x) - y).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for weight in stack.parameters():
                    weight.clamp_(-LARGEST, LARGEST)
        with torch.no_grad():
            said = float((stack(check[0]) - check[1]).square().mean())
        if said < best - LEAST_GAIN:
            best, best_epoch, kept = said, epoch, stack.stored()
        progress(f"{kind} net, epoch {epoch}, held-out loss {said:.4f}", epoch, recipe.epochs)
    report = {
        "epochs": epoch,
        "best_epoch": best_epoch,
        "held_out_loss": round(best, 6),
        "held_out_variance": round(float(check[1].var()), 6),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return Nets(kind, experts, hidden, kept), report
