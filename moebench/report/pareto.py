"""Which points nothing beats: fronts over speed, memory and quality. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Name = TypeVar("Name")


def front(points: Sequence[tuple[Name, Sequence[float]]]) -> list[Name]:
    """Names of the points that no other is at least as good as in everything and better in something; more is better.

    Points are (name, values), all of one length. Equal points stand on the front together.
    """
    return [
        name
        for name, mine in points
        if not any(
            all(a >= b for a, b in zip(other, mine, strict=True)) and tuple(other) != tuple(mine) for _, other in points
        )
    ]
