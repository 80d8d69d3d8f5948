"""Decoding in rounds: draft, verify the whole window in one pass, keep the longest right path, roll the rest back.

The answer is that of plain greedy decoding, token for token, whatever was drafted. Knows drafts and windows; knows no
drafter, no cache and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from moebench.draft import NOTHING, Draft
from moebench.errors import PluginError, UsageError
from moebench.step import DECODE, VERIFY

if TYPE_CHECKING:
    from moebench.engine.loop import Loop


def verified(draft: Draft, levels: int, prune: Callable | None, view: object) -> np.ndarray:
    """bool [n]: nodes that are no deeper than ``levels`` and, of those, kept by the hook ``prune``."""
    mask = draft.depth <= levels
    if prune is None or not mask.any():
        return mask
    within = draft.keep(mask)
    if (kept := prune(within, view)) is not None:
        try:
            within.keep(kept)  # refuses what is no tree
        except ValueError as error:
            raise PluginError(f"prune: {error}") from None
        mask[mask] = kept
    return mask


def right_path(draft: Draft, choices: np.ndarray) -> list[int]:
    """Rows of a window (0: the last accepted token, 1 + node) on the longest path of right guesses.

    ``choices`` (int64 [1 + n]) is the target's own token after each row.
    """
    right, parents = np.zeros(1 + len(draft), bool), draft.parents + 1
    right[0] = True
    for node, (parent, token) in enumerate(zip(parents.tolist(), draft.tokens.tolist(), strict=True)):
        right[1 + node] = right[parent] and choices[parent] == token
    row = int(np.where(right, np.append(0, draft.depth), -1).argmax())
    path = [row]
    while row:
        path.append(row := int(parents[row - 1]))
    return path[::-1]


@dataclass
class Text:
    """One sequence under way: the ids so far, how many of them are the prompt's, and how many more it may emit."""

    ids: list[int]
    prompt: int
    left: int
    forced: Sequence[int] | None
    logits: list[np.ndarray] = field(default_factory=list)

    @property
    def emitted(self) -> list[int]:
        """Ids after the prompt."""
        return self.ids[self.prompt :]

    def choices(self, logits: np.ndarray, depth: np.ndarray) -> np.ndarray:
        """The token after each row of logits [W, V], rows at ``depth``: the greedy one, or the one that is forced."""
        if self.forced is None:
            return logits.argmax(-1)
        return np.asarray(self.forced)[len(self.ids) - self.prompt + depth]

    def emit(self, tokens: Sequence[int], ended: Callable[[Sequence[int]], bool]) -> int:
        """Append ``tokens`` up to the end of the answer; returns how many."""
        for taken, token in enumerate(tokens, 1):
            self.ids.append(int(token))
            self.left -= 1
            if ended(self.emitted):
                self.left = 0
                return taken
        return len(tokens)


class Rounds:
    """A batch of requests decoded in rounds on one loop, each sequence at its own pace."""

    def __init__(
        self, loop: Loop, prompts: Sequence[Sequence[int]], new_tokens: int, ended: Callable[[Sequence[int]], bool],
        forced: Sequence[Sequence[int]] | None, keep_logits: bool,
    ) -> None:  # fmt: skip
        self.loop, self.ended, self.keep_logits = loop, ended, keep_logits
        self.hooks, self.view = loop.experts.hooks, loop.experts.view
        self.texts = [
            Text(list(prompt), len(prompt), new_tokens if given is None else min(new_tokens, len(given)), given)
            for prompt, given in zip(prompts, forced or [None] * len(prompts), strict=True)
        ]

    def run(self, logits: np.ndarray) -> tuple[list[list[int]], list[np.ndarray]]:
        """Decode to the end from the logits [B, V] after the prompts: ids by sequence, and logits [B, V] by token."""
        texts, self.vocabulary = self.texts, logits.shape[-1]
        drafts, alive = [NOTHING] * len(texts), [text.left > 0 for text in texts]
        self._accept(logits[:, None], alive, drafts)
        while any(alive := [text.left > 0 for text in texts]):
            drafts = [self._draft(b, text) if text.left > 1 else NOTHING for b, text in enumerate(texts)]
            tokens, position, valid = self._window(drafts, alive)
            if tokens.shape[1] == 1:
                logits = self.loop.forward(DECODE, tokens, position, valid, sum(alive))
                self._accept(logits[:, None], alive, drafts)
            else:
                self._verify(tokens, position, valid, alive, drafts)
        return [text.emitted for text in texts], _by_token([text.logits for text in texts])

    def _draft(self, sequence: int, text: Text) -> Draft:
        """The draft to verify for one sequence; the last token that may be emitted needs no row of its own."""
        draft = self.hooks.draft(sequence, np.array(text.ids, np.int64), self.view)
        if draft is None:
            return NOTHING
        if not isinstance(draft, Draft):
            raise PluginError(f"draft returned a {type(draft).__name__}: a moebench.draft.Draft, or None")
        draft = draft.keep(verified(draft, text.left - 1, self.hooks.prune, self.view))
        if not (draft.is_chain or self.loop.backend.trees):
            raise UsageError("this model has layers that carry state: it verifies chains, and a tree was drafted")
        if len(draft) and not (draft.tokens.min() >= 0 and draft.tokens.max() < self.vocabulary):
            raise PluginError(f"draft names token {draft.tokens.max()}; the model has {self.vocabulary}")
        return draft

    def _window(self, drafts: list[Draft], alive: list[bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and validity [B, W]: the last token, the nodes, padding."""
        shape = (len(drafts), 1 + max(map(len, drafts)))
        tokens, position, valid = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
        for b, (text, draft) in enumerate(zip(self.texts, drafts, strict=True)):
            nodes = slice(1, 1 + len(draft))
            tokens[b, 0], tokens[b, nodes] = text.ids[-1], draft.tokens
            position[b] = len(text.ids) - 1
            position[b, nodes] += draft.depth
            valid[b, : nodes.stop] = alive[b]
        return tokens, position, valid

    def _verify(
        self, tokens: np.ndarray, position: np.ndarray, valid: np.ndarray, alive: list[bool], drafts: list[Draft]
    ) -> None:
        """One pass over a window: what is right stays in the backend's cache, the rest leaves it."""
        loop = self.loop
        step = loop.step(VERIFY, position, valid, 0, tuple(drafts))
        loop.experts.begin(step)
        logits = loop.backend.forward(step, tokens, loop.experts, all_rows=True).reshape(*tokens.shape, -1)
        kept = self._accept(logits, alive, drafts)
        step.settle(kept.ravel())
        loop.experts.end()
        loop.backend.retain(kept)

    def _accept(self, logits: np.ndarray, alive: list[bool], drafts: list[Draft]) -> np.ndarray:
        """Emit what is right and the model's own token after it; bool [B, W]: rows that stand, one a token."""
        kept = np.zeros(logits.shape[:2], bool)
        for b in np.flatnonzero(alive).tolist():
            text, rows = self.texts[b], logits[b, : 1 + len(drafts[b])]
            choices = text.choices(rows, np.append(0, drafts[b].depth))
            path = right_path(drafts[b], choices)
            path = path[: text.emit(choices[path].tolist(), self.ended)]
            if self.keep_logits:
                text.logits += list(rows[path])
            kept[b, path] = True
        return kept


def _by_token(logits: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Logits by sequence and emitted token -> [B, V] by emitted token, zero where a sequence had ended before."""
    if not any(logits):
        return []
    nothing = np.zeros_like(next(of[0] for of in logits if of))
    return [np.stack([of[i] if i < len(of) else nothing for of in logits]) for i in range(max(map(len, logits)))]
