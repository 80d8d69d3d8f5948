"""What Edge0's heads and adapters are trained on: prompts with completions, as token ids.

A JSON-lines file with the fields ``prompt`` and ``completion``, or a model's own generator of items. Knows a tokenizer;
knows no tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebench.errors import UsageError
from moebench.jsonl import read_jsonl


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of what follows it, its end token included."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


@dataclass(frozen=True)
class Examples:
    """A source of examples: ``item(rng)`` gives one (prompt, completion) text; ``name`` says what it is."""

    name: str
    item: Callable[[random.Random], tuple[str, str]]
    tokenizer: Any

    @property
    def stop(self) -> int:
        """The token that ends a completion."""
        return self.tokenizer.eos_token_id

    @property
    def pad(self) -> int:
        """The token that fills rows."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.stop

    def draw(self, rng: random.Random, count: int) -> list[Example]:
        """``count`` examples."""
        return [self._ids(*self.item(rng)) for _ in range(count)]

    def _ids(self, prompt: str, completion: str) -> Example:
        ids = self.tokenizer(completion)["input_ids"]
        return Example(tuple(self.tokenizer(prompt)["input_ids"]), (*ids, self.stop))


def from_file(path: str, tokenizer: Any) -> Examples:
    """Examples of a JSON-lines file, drawn evenly; a line without prompt and completion is an error."""
    items = []
    for number, line in enumerate(read_jsonl(Path(path)), 1):
        if not all(isinstance(line.get(name), str) and line[name] for name in ("prompt", "completion")):
            raise UsageError(f"{path}: item {number} needs the text fields 'prompt' and 'completion'")
        items.append((line["prompt"], line["completion"]))
    if not items:
        raise UsageError(f"{path} holds no examples")
    return Examples(path, lambda rng: rng.choice(items), tokenizer)


def from_generator(tokenizer: Any) -> Examples:
    """Training items of tinymoe's five domains: never an item of its tests."""
    from moebench.models.tinymoe.domains import DOMAINS, generate

    names = list(DOMAINS)

    def item(rng: random.Random) -> tuple[str, str]:
        level = 1.0 if rng.random() < 0.7 else rng.random()
        made = generate(rng.choice(names), rng, test=False, level=level)
        return made.prompt, made.completion

    return Examples("training items of tinymoe's domains", item, tokenizer)
