"""Which texts run together: those of similar length, as many as the longest of them leaves room for.

Knows lengths only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

TOKENS = 20_480  # of a batch, padding included: bounds keys and values
LOGITS = 2**27  # of a batch, where the logits of all its tokens are kept


def batches(lengths: Sequence[int], most: int, vocabulary: int = 0) -> Iterator[list[int]]:
    """Numbers of texts, up to ``most`` at a time, shortest first, each once. With ``vocabulary`` all logits fit too."""
    tokens = min(TOKENS, LOGITS // vocabulary) if vocabulary else TOKENS
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    group: list[int] = []
    for i in order:
        if group and (len(group) == most or (len(group) + 1) * lengths[i] > tokens):
            yield group
            group = []
        group.append(i)
    if group:
        yield group
