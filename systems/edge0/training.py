"""Training of heads and recovery adapters in three phases, in this order (Edge0, arXiv 2609.18063):

1. ``distil``: heads alone learn the next layer's true router, one token early (cross-entropy with its distribution);
2. ``tune``: with predicted routing in force, heads and adapters learn given text by cross-entropy;
3. ``onpolicy``: the student writes, the unquantised model scores; reverse KL over its likeliest tokens plus one bucket
   for all others.

A batch is a pure function of (seed, step), and the state is saved as it goes, so an interrupted run continues with the
data it would have seen and ends with the numbers it would have had. Needs torch.
"""

from __future__ import annotations

import io
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from moebench.errors import UsageError
from moebench.scratch import whole_file
from moebench.systems.edge0.data import Example, Examples
from moebench.systems.edge0.student import Student

PHASES = ("distil", "tune", "onpolicy")
TEACHER_TOKENS = 16  # likeliest tokens that the reverse KL tells apart
CLIP = 1.0


@dataclass(frozen=True)
class Recipe:
    """How long each phase runs and how fast it learns."""

    steps: tuple[int, int, int] = (300, 900, 120)
    examples: int = 56  # per step
    head_rate: tuple[float, float, float] = (2e-3, 1e-3, 2e-4)
    adapter_rate: tuple[float, float, float] = (0.0, 3e-3, 5e-4)
    new_tokens: int = 112  # the student writes at most so many in phase 3
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """Right-padded ids int64 [B, S], lengths of prompts and of all [B], and the targets that count: completions'."""

    ids: torch.Tensor
    prompt: torch.Tensor
    length: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """bool [B, S - 1]: target s is token s + 1 of a completion."""
        position = torch.arange(1, self.ids.shape[1])[None]
        return (position >= self.prompt[:, None]) & (position < self.length[:, None])


def pad(examples: list[Example]) -> Batch:
    """Examples as one batch."""
    lengths = [len(e.prompt) + len(e.completion) for e in examples]
    ids = torch.zeros(len(examples), max(lengths), dtype=torch.long)
    for row, e in enumerate(examples):
        ids[row, : lengths[row]] = torch.tensor([*e.prompt, *e.completion])
    return Batch(ids, torch.tensor([len(e.prompt) for e in examples]), torch.tensor(lengths))


def groups(examples: list[Example], parts: int = 2) -> Iterator[list[Example]]:
    """Examples in ``parts`` of similar length, so that little is padding."""
    ordered = sorted(examples, key=lambda e: len(e.prompt) + len(e.completion))
    size = -(-len(ordered) // parts)
    for at in range(0, len(ordered), size):
        yield ordered[at : at + size]


def distil_loss(student: Student, batch: Batch) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy of each head with the next layer's router one token on, over decoded positions."""
    student.mode = "native"
    with torch.no_grad():
        student(batch.ids, batch.prompt)
    student.mode = "predicted"
    position = torch.arange(batch.ids.shape[1])[None]
    rows = (student.predicted & (position < batch.length[:, None]))[:, 1:].reshape(-1)
    total = torch.zeros(())
    for owner in student.plan.owners:
        said = student.heads[str(owner)](student.features[owner])[:, :-1].flatten(0, 1)[rows]
        true = student.router_logits[owner + 1].reshape(*batch.ids.shape, -1)[:, 1:].flatten(0, 1)[rows]
        total = total - (true.softmax(-1) * said.log_softmax(-1)).sum()
    return total, int(rows.sum()) * len(student.plan.owners)


def tune_loss(student: Student, batch: Batch) -> torch.Tensor:
    """Summed cross-entropy of the completions under predicted routing."""
    logits = student(batch.ids, batch.prompt)[:, :-1][batch.counts]
    return F.cross_entropy(logits, batch.ids[:, 1:][batch.counts], reduction="sum")


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor, k: int = TEACHER_TOKENS) -> torch.Tensor:
    """KL(student || teacher) [N] over the teacher's ``k`` likeliest tokens and a bucket for the rest; logits [N, V]."""
    k = min(k, teacher.shape[-1] - 1)
    top = teacher.topk(k, dim=-1).indices

    def buckets(logits: torch.Tensor) -> torch.Tensor:
        log = logits.log_softmax(-1)
        rest = log.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([log.gather(-1, top), rest], -1)

    said, true = buckets(student), buckets(teacher)
    return (said.exp() * (said - true)).sum(-1)


class Training:
    """One resumable run of the three phases; ``state`` is the file it goes on from.

    ``fingerprint`` holds all that decides what comes out: a state with another one is refused.
    """

    def __init__(
        self,
        student: Student,
        teacher: Any,
        examples: Examples,
        recipe: Recipe,
        state: Path,
        fingerprint: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.student, self.teacher, self.examples, self.recipe, self.state = student, teacher, examples, recipe, state
        self.fingerprint = dict(fingerprint)
        self.phase, self.step, self.tokens, self.seconds = 0, 0, 0, 0.0
        self.losses: dict[str, float] = {}
        self._saved: dict[str, Any] | None = None
        self._whole = True  # parameters and counters belong to the same step
        if state.is_file():
            saved = read_state(state)
            found = saved.get("fingerprint", {})
            names = sorted(n for n in {*found, *fingerprint} if found.get(n) != fingerprint.get(n))
            if names:
                other = ", ".join(f"{name}={found.get(name)}, not {fingerprint.get(name)}" for name in names)
                raise UsageError(f"{state} began with {other}; go on with that, or remove the file to start anew")
            student.load_state_dict(saved["student"])
            self.phase, self.step, self.tokens = saved["phase"], saved["step"], saved["tokens"]
            self.seconds, self.losses, self._saved = saved["seconds"], saved["losses"], saved["optimizer"]

    def run(self, report: Callable[[str, int, int, float], None], finished: Callable[[str], None]) -> None:
        """Go on to the end; ``report(phase, step, steps, loss)`` each step, ``finished(phase)`` after each phase."""
        while self.phase < len(PHASES):
            self._run_phase(report)
            finished(PHASES[self.phase])
            self.phase, self.step, self._saved = self.phase + 1, 0, None
            self.save(None)

    def _run_phase(self, report: Callable[[str, int, int, float], None]) -> None:
        phase, recipe, student = PHASES[self.phase], self.recipe, self.student
        heads, adapters = list(student.heads.parameters()), list(student.adapters.parameters())
        student.use_adapters(phase != "distil")
        rates = (recipe.head_rate[self.phase], recipe.adapter_rate[self.phase])
        optimizer = torch.optim.AdamW(
            [{"params": heads, "lr": rates[0]}, {"params": adapters, "lr": rates[1]}],
            betas=(0.9, 0.98), weight_decay=0.0, fused=True,
        )  # fmt: skip
        if self._saved is not None:
            optimizer.load_state_dict(self._saved)
        try:
            self._steps(phase, optimizer, rates, report)
        except KeyboardInterrupt:
            if self._whole:
                self.save(optimizer)
            raise

    def _steps(
        self,
        phase: str,
        optimizer: torch.optim.Optimizer,
        rates: tuple[float, float],
        report: Callable[[str, int, int, float], None],
    ) -> None:
        steps, saved_at = self.recipe.steps[self.phase], time.perf_counter()
        while self.step < steps:
            started = time.perf_counter()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                warm = min(1.0, (self.step + 1) / 30)
                group["lr"] = rate * warm * max(0.02, 0.5 * (1 + math.cos(math.pi * self.step / steps)))
            optimizer.zero_grad(set_to_none=True)
            loss, tokens = self._backward(phase)
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP)
            self._whole = False
            optimizer.step()
            self.step += 1
            self.tokens += tokens
            self.losses[phase] = 0.95 * self.losses.get(phase, loss) + 0.05 * loss
            self.seconds += time.perf_counter() - started
            self._whole = True
            report(phase, self.step, steps, self.losses[phase])
            if time.perf_counter() - saved_at > 60:
                self.save(optimizer)
                saved_at = time.perf_counter()

    def _backward(self, phase: str) -> tuple[float, int]:
        """One step's gradients; returns the mean loss per counted token, and the tokens read."""
        rng = random.Random(f"{self.recipe.seed}/{phase}/{self.step}")
        batch = self.examples.draw(rng, self.recipe.examples)
        if phase == "onpolicy":
            batch = self._written(batch)
        padded = [pad(part) for part in groups(batch)]
        counted = sum(int(part.counts.sum()) for part in padded)
        total = 0.0
        for part in padded:
            if phase == "distil":
                summed, n = distil_loss(self.student, part)
                loss = summed / max(1, n) / len(padded)
            elif phase == "tune":
                loss = tune_loss(self.student, part) / counted
            else:
                with torch.no_grad():
                    true = self.teacher(input_ids=part.ids, use_cache=False).logits[:, :-1][part.counts]
                loss = reverse_kl(self.student(part.ids, part.prompt)[:, :-1][part.counts], true).sum() / counted
            loss.backward()
            total += loss.item()
        return total, sum(int(part.length.sum()) for part in padded)

    def _written(self, batch: list[Example]) -> list[Example]:
        """The student's own completions of the batch's prompts."""
        written = []
        for part in groups(batch, 1):
            prompts = [e.prompt for e in part]
            out = self.student.generate(prompts, self.recipe.new_tokens, self.examples.stop, self.examples.pad)
            written += [Example(e.prompt, tuple(tokens)) for e, tokens in zip(part, out, strict=True)]
        return written

    def save(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Keep everything that a later ``run`` needs, in one step."""
        held = {
            "fingerprint": self.fingerprint,
            "student": self.student.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "phase": self.phase,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "losses": self.losses,
        }
        torch.save(held, content := io.BytesIO())  # torch's own words for a full disk say nothing
        with whole_file(self.state) as file:
            file.write(content.getbuffer())


def read_state(file: Path) -> dict[str, Any]:
    """The saved state of a training; a damaged file is one line."""
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:  # torch and zipfile raise whatever a damaged file leads them to
        raise UsageError(
            f"{file} is unreadable ({' '.join(str(error).split())[:100]}); remove it to start anew"
        ) from None
