"""The byte ledger: every allocation of a run, by category, with its high-water mark.

*Peak active memory* of a row is this ledger's ``peak_bytes``: the same definition on every machine and backend. Knows
bytes, not what they hold.
"""

from __future__ import annotations

from collections import Counter

from moebench.errors import UsageError
from moebench.units import human_bytes

CATEGORIES = ("dense", "kv", "expert slots", "host slots", "staging", "activations", "adapters", "predictor", "draft")


class BudgetError(UsageError):
    """A budget that cannot hold what a run needs at the least; the message states the smallest legal one."""


class Ledger:
    """Books bytes by category. ``cap_bytes`` bounds the total; exceeding it raises ``BudgetError``, never a silent
    spill.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.current: Counter[str] = Counter()
        self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes booked now, over all categories."""
        return sum(self.current.values())

    def book(self, category: str, nbytes: int) -> None:
        """Add ``nbytes`` (negative to release) to one category."""
        if category not in CATEGORIES:
            raise KeyError(f"ledger category {category!r} is not one of {', '.join(CATEGORIES)}")
        self.set(category, self.current[category] + nbytes)

    def set(self, category: str, nbytes: int) -> None:
        """Set one category to ``nbytes``."""
        if nbytes < 0:
            raise BudgetError(f"ledger: {category} would fall to {nbytes} bytes; more was released than booked")
        total = self.total_bytes - self.current[category] + nbytes
        if self.cap_bytes is not None and total > self.cap_bytes:
            raise BudgetError(
                f"memory cap of {human_bytes(self.cap_bytes)} is too small: {category} needs {human_bytes(nbytes)} "
                f"beside {human_bytes(total - nbytes)} already in use; raise memory= or lower budget="
            )
        self.current[category] = nbytes
        if total > self.peak_bytes:
            self.peak_bytes, self.at_peak = total, dict(self.current)

    def forget_peak(self) -> None:
        """Start the high-water mark anew from what is booked now."""
        self.peak_bytes, self.at_peak = self.total_bytes, dict(self.current)

    def check_integrity(self) -> None:
        """Raise if a category is negative or the peak lies below the current total."""
        if any(v < 0 for v in self.current.values()) or self.peak_bytes < self.total_bytes:
            raise AssertionError(f"ledger out of balance: {dict(self.current)}, peak {self.peak_bytes}")
