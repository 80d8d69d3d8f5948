"""Texts of the conversion: docstrings of the packages that moebench depends on, and what the dense model itself writes.

Nothing is downloaded and no licence is carried over: texts are read on the machine and only steer numbers. Which
versions gave which text stands in the hash. Knows tokens and seeds; knows no expert.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TRAINING = ("numpy", "torch", "pandas", "sympy")  # all of them come with moebench
HELD_OUT = ("networkx",)
TEMPERATURE = 0.8  # of what the dense model writes
SHORTEST = 200  # characters of a docstring that counts as text
ASKED = (
    "Explain in simple words {}.", "Write a short story about {}.", "What should everybody know about {}?",
    "Describe a day that was changed by {}.", "List three common mistakes with {} and how to avoid them.",
    "Give step by step instructions for somebody new to {}.", "Why is {} important?",
    "Write a letter to a friend about {}.", "Compare the past and the future of {}.",
    "A child asks about {}. What do you answer?",
)  # fmt: skip
ABOUT = (
    "the weather", "cooking rice", "riding a bicycle", "a lost dog", "computer memory", "photosynthesis",
    "the French Revolution", "playing the piano", "a visit to the dentist", "gardening in spring", "how banks work",
    "the human heart", "learning a language", "football", "a rainy wedding", "black holes", "vaccines", "a new job",
    "sorting a list in Python", "the ocean", "painting a wall", "washing a car", "friendship", "an exam at school",
    "volcanoes", "electric cars", "saving money", "a birthday party", "birds", "camping in the mountains", "the moon",
    "baking bread", "a broken window", "swimming", "recycling", "an old bridge", "dinosaurs", "haircuts", "bees",
    "fixing a shoe", "the Roman Empire", "fractions", "headaches", "libraries", "a train journey", "snow", "elections",
    "making coffee", "a neighbour who is too loud", "databases", "chess", "an apology", "sleep", "the stock market",
    "ice skating", "shaving", "mowing the lawn", "a promise that was broken", "maps", "weight lifting",
)  # fmt: skip


def docstrings(packages: Sequence[str]) -> list[str]:
    """Distinct cleaned docstrings of ``packages`` of ``SHORTEST`` characters or more, in order of file and line.

    Sources are parsed, never imported.
    """
    found: dict[str, None] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        roots = list(spec.submodule_search_locations or []) if spec else []
        for root in roots:
            for file in sorted(Path(root).rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
                if "tests" not in file.relative_to(root).parts:
                    found.update(dict.fromkeys(_of_file(file)))
    return list(found)


def _of_file(file: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in other people's strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates that only look like Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            if len(text) >= SHORTEST:
                yield text


def windows(texts: Sequence[str], tokenizer: Any, length: int, count: int, seed: int) -> np.ndarray:
    """``count`` windows int64 [count, length] of the texts in an order drawn by ``seed``, one after the other with the
    end token between; fewer where the texts are shorter.
    """
    order = list(range(len(texts)))
    random.Random(f"windows/{seed}").shuffle(order)
    ids: list[int] = []
    for at in order:
        if len(ids) >= length * count:
            break
        ids += [*tokenizer(texts[at])["input_ids"], tokenizer.eos_token_id]
    whole = min(count, len(ids) // length)
    return np.array(ids[: whole * length], np.int64).reshape(whole, length)


def questions(count: int, seed: int) -> list[str]:
    """``count`` distinct questions, in an order drawn by ``seed``."""
    every = [form.format(subject) for subject in ABOUT for form in ASKED]
    random.Random(f"questions/{seed}").shuffle(every)
    if count > len(every):
        raise ValueError(f"there are {len(every)} questions, not {count}")
    return every[:count]


def written(
    dense: Any, tokenizer: Any, length: int, count: int, seed: int, batch: int, progress: Callable[[int, int], None]
) -> np.ndarray:
    """int64 [count, length]: what the dense model writes, half of it answers to questions, half of it
    from nothing but its start token.

    Sequences go on past the end token, so all have one length.
    """
    import torch

    starts: list[list[int]] = []
    asked = questions(count // 2, seed)
    for text in asked:
        starts.append(tokenizer(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    starts += [[tokenizer.eos_token_id]] * (count - len(asked))
    generator, made = torch.Generator().manual_seed(seed), []
    ordered = sorted(starts, key=len)
    for at in range(0, count, batch):
        group = ordered[at : at + batch]
        made.append(_sampled(dense, group, length, generator))
        progress(min(at + batch, count), count)
    return np.concatenate(made)


def _sampled(dense: Any, starts: list[list[int]], length: int, generator: Any) -> np.ndarray:
    """int64 [B, length]; a row follows its own start as long as that lasts, then the model."""
    import torch
    from transformers import DynamicCache

    ids = torch.zeros(len(starts), length, dtype=torch.long)
    shortest = min(map(len, starts))
    for row, start in enumerate(starts):
        ids[row, : min(len(start), length)] = torch.tensor(start[:length])
    given = torch.tensor([len(start) for start in starts])
    cache, fed = DynamicCache(), 0
    with torch.inference_mode():
        for at in range(shortest, length):
            out = dense(ids[:, fed:at], cache=cache, use_cache=True, logits_to_keep=1)
            share = (out.logits[:, -1].float() / TEMPERATURE).softmax(-1)
            drawn = torch.multinomial(share, 1, generator=generator)[:, 0]
            ids[:, at] = torch.where(at < given, ids[:, at], drawn)
            fed = at
    return ids.numpy()


def perplexity(model: Any, ids: np.ndarray, batch: int = 4) -> float:
    """exp of the mean negative log likelihood of each window's tokens but the first; ids int64 [N, S]."""
    import torch
    import torch.nn.functional as F

    total, count = 0.0, 0
    with torch.inference_mode():
        for at in range(0, len(ids), batch):
            part = torch.from_numpy(ids[at : at + batch])
            logits = model(part, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            total += float(F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum"))
            count += part[:, 1:].numel()
    return float(np.exp(total / count))


def token_hash(ids: np.ndarray) -> str:
    """sha256 of windows of tokens, as little-endian int64."""
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()
