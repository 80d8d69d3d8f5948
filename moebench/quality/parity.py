"""How near a system's predictions are to the unmodified model's on held-out text: agreement, KL and perplexity.

Every token after a text's beginning is predicted from the text before it. Knows the loop and the tokenizer; knows no
system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from moebench.engine.loop import Loop
from moebench.errors import UsageError
from moebench.jsonl import read_jsonl
from moebench.quality.batches import batches

TEXTS = 20  # of each task, at most
TOP = 512  # likeliest tokens of the unmodified model that are kept one by one; all others are one outcome
WINDOW = 256  # tokens of a piece of plain text
P99_MINIMUM = 100


@dataclass(frozen=True)
class Text:
    """A held-out text: what is given, and what is predicted token by token."""

    given: str
    predicted: str


@dataclass(frozen=True, eq=False)
class TextScores:
    """What the unmodified model says of all predicted tokens, text after text: ids of its TOP likeliest tokens (int32
    [T, K], likeliest first), their log-probabilities (fp32 [T, K]), and that of the token that follows (fp32 [T]).
    """

    ids: np.ndarray
    log_probabilities: np.ndarray
    follows: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


@dataclass(frozen=True)
class Parity:
    """A system against the unmodified model over ``tokens`` predicted tokens; KL in nats, ``kl_p99`` None below 100."""

    tokens: int
    agreement: float
    kl_median: float
    kl_p99: float | None
    perplexity: float
    native_perplexity: float

    def block(self) -> Mapping[str, Any]:
        """What a row keeps beside the metrics."""
        return {"tokens": self.tokens, "perplexity": self.perplexity, "reference_perplexity": self.native_perplexity}


Pairs = Sequence[tuple[list[int], list[int]]]  # of each text: ids given, ids to predict


def held_out(path: str, own: Pairs, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """The held-out text of a suite: the file ``path``, or without one the suite's own."""
    found = _read(Path(path).expanduser(), tokenizer) if path else list(own)
    if not found:
        where = f"quality.text={path} has" if path else "the tasks have"
        raise UsageError(f"{where} no text to predict; name one with quality.text=FILE")
    return found


def _read(file: Path, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """JSON lines with ``prompt`` and ``completion``, or plain text, cut into windows of which the first token is
    given.
    """
    if file.suffix == ".jsonl":
        items = read_jsonl(file)
        for number, item in enumerate(items, 1):
            if not all(isinstance(item.get(key), str) and item[key] for key in ("prompt", "completion")):
                raise UsageError(f"quality.text={file}, item {number}: needs texts 'prompt' and 'completion'")
        return encode(tokenizer, [Text(item["prompt"], item["completion"]) for item in items])
    try:
        ids = tokenizer(file.read_text())["input_ids"]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"quality.text={file}: {getattr(error, 'strerror', None) or error}") from None
    windows = (ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW))
    return [(window[:1], window[1:]) for window in windows if len(window) > 1]


def encode(tokenizer: Any, texts: Sequence[Text]) -> list[tuple[list[int], list[int]]]:
    """Ids of all texts that give and predict at least one token, cut where the whole text would be."""
    found = []
    for text in texts:
        given = tokenizer(text.given)["input_ids"]
        found.append((given, tokenizer(text.given + text.predicted)["input_ids"][len(given) :]))
    return [pair for pair in found if all(pair)]


def predict(loop: Loop, pairs: Pairs, vocabulary: int, batch: int) -> TextScores:
    """The unmodified model's predictions."""
    total, top = sum(len(predicted) for _, predicted in pairs), min(TOP, vocabulary)
    ids, kept, follows = (
        np.zeros((total, top), np.int32),
        np.zeros((total, top), np.float32),
        np.zeros(total, np.float32),
    )
    for rows, tokens, logs in _predictions(loop, pairs, vocabulary, batch, decoded=False):
        best = np.argsort(-logs, axis=1, kind="stable")[:, :top]
        ids[rows], kept[rows] = best, np.take_along_axis(logs, best, 1)
        follows[rows] = logs[np.arange(len(rows)), tokens]
    return TextScores(ids, kept, follows)


def compare(loop: Loop, pairs: Pairs, native: TextScores, vocabulary: int, batch: int) -> Parity:
    """A system's predictions against the unmodified model's. The system decodes the texts, as it decodes answers."""
    same = np.zeros(len(native.follows), bool)
    divergence, follows = np.zeros(len(same)), np.zeros(len(same))
    for rows, tokens, logs in _predictions(loop, pairs, vocabulary, batch, decoded=True):
        same[rows] = logs.argmax(1) == native.ids[rows, 0]
        follows[rows] = logs[np.arange(len(rows)), tokens]
        divergence[rows] = kl(native.ids[rows], native.log_probabilities[rows], logs)
    ordered = np.sort(divergence)
    p99 = float(ordered[int(np.ceil(0.99 * len(ordered))) - 1]) if len(ordered) >= P99_MINIMUM else None
    perplexity, native_perplexity = (float(np.exp(-np.mean(of, dtype=np.float64))) for of in (follows, native.follows))
    median = float(np.median(ordered))
    return Parity(len(same), float(same.mean()), median, p99, perplexity, native_perplexity)


def kl(ids: np.ndarray, native: np.ndarray, system: np.ndarray) -> np.ndarray:
    """KL(native || system) in nats by row, fp64 [n]: sum of p log(p / q) over the tokens ``ids`` [n, K], and the rest
    of the vocabulary as one outcome (so a lower bound where there is a rest). ``native`` are log-probabilities [n, K],
    ``system`` [n, V].
    """
    p, q = native.astype(np.float64), np.take_along_axis(system, ids, 1).astype(np.float64)
    total = (np.exp(p) * (p - q)).sum(1)
    if ids.shape[1] < system.shape[1]:
        rest_p, rest_q = (np.clip(1.0 - np.exp(of).sum(1), 1e-12, None) for of in (p, q))
        total += rest_p * np.log(rest_p / rest_q)
    return np.maximum(total, 0.0)  # rounding


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """fp64 log-probabilities [n, V] of fp32 logits."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _predictions(
    loop: Loop, pairs: Pairs, vocabulary: int, batch: int, decoded: bool
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(numbers of predicted tokens [n], the tokens [n], log-probabilities [n, V]), a pass at a time."""
    starts = np.cumsum([0, *(len(predicted) for _, predicted in pairs)])
    for group in batches([len(given) + len(predicted) for given, predicted in pairs], batch, vocabulary):
        texts = [pairs[i] for i in group]
        for sequence, index, logits in loop.score([t[0] for t in texts], [t[1] for t in texts], decoded):
            rows = starts[np.asarray(group)[sequence]] + index
            tokens = np.array([texts[b][1][i] for b, i in zip(sequence, index, strict=True)])
            yield rows, tokens, log_softmax(logits)
