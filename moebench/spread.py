"""How far repeated measurements of one value lie apart. Knows no value and no unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", float, tuple[tuple[float, ...], ...])


@dataclass(frozen=True)
class Spread(Generic[T]):
    """``low`` and ``high`` of ``n`` samples: their 10th and 90th percentile, of fewer than ten the lowest and the
    highest. Of a curve both are tables like its own, and ``n`` is that of the point with the fewest.
    """

    low: T
    high: T
    n: int
