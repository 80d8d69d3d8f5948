"""Re-organising storage while a run goes on: after a step the system may name two experts that change places.

Knows keys, tiers and when a swap has landed; knows no file, and not why they move. One swap at a time, of experts that
are in memory anyway, so that none is read for it; the map that view, loop and clock share changes between two steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from moebench.engine.answers import keys_of
from moebench.errors import PluginError
from moebench.hookspecs import hookimpl
from moebench.step import PREFILL
from moebench.timeline.base import Ticket
from moebench.timeline.virtual import VirtualTimeline
from moebench.units import MIB

if TYPE_CHECKING:
    from moebench.engine.movement import Movement


class Mover(Protocol):
    """What writes experts to each other's places, in the background."""

    @property
    def written_bytes(self) -> int:
        """Bytes written so far."""

    @property
    def seconds(self) -> float:
        """What writing them took."""

    def move(self, a: int, b: int, bytes_a: np.ndarray | None, bytes_b: np.ndarray | None) -> None:
        """Start a swap, given the experts' bytes where there are any."""

    def landed(self) -> bool:
        """Whether the swap that was started is complete; True once. Raises what stopped it."""


class ModeledMover:
    """Swaps on a modeled clock: ``expert_bytes`` written twice."""

    def __init__(self, timeline: VirtualTimeline, expert_bytes: int) -> None:
        self._timeline, self._nbytes = timeline, 2 * expert_bytes
        self._ticket: Ticket | None = None

    @property
    def written_bytes(self) -> int:
        """Bytes written so far."""
        return self._timeline.writes.written_bytes

    @property
    def seconds(self) -> float:
        """Time of storage that they took."""
        writes = self._timeline.writes
        return writes.written_bytes / writes.unit_bytes * writes.unit_s

    def move(self, a: int, b: int, bytes_a: np.ndarray | None, bytes_b: np.ndarray | None) -> None:
        """Book the writes."""
        self._ticket = self._timeline.write(self._nbytes)

    def landed(self) -> bool:
        """Whether the clock has passed their end."""
        if self._ticket is None or not self._timeline.is_ready(self._ticket):
            return False
        self._ticket = None
        return True


class Relayout:
    """Swaps of one run, of ``budget_bytes`` written at most; an observer too, which reports what they wrote."""

    def __init__(self, mover: Mover, expert_bytes: int, budget_bytes: int, warmup_tokens: int = 0) -> None:
        self.mover, self.swap_bytes, self.left_bytes = mover, 2 * expert_bytes, budget_bytes
        self.swaps = 0
        self._moving: tuple[int, int] | None = None
        self._seen = 0
        self._warmup, self._decoded, self._tokens, self._nbytes = warmup_tokens, 0, 0, 0

    def after_step(self, experts: Movement) -> None:
        """Take over a swap that has landed; where none is under way and the budget allows, ask for the next."""
        if self._moving is not None and self.mover.landed():
            experts.places.swap(*self._moving)
            self._moving = None
            self.swaps += 1
        hook = experts.hooks.relayout
        if self._moving is None and hook is not None and self.left_bytes >= self.swap_bytes:
            swap = hook(experts.step, experts.view)
            if swap is not None:
                pair = keys_of("relayout", swap, experts.geometry.keys)
                if len(pair) != 2:
                    raise PluginError(f"relayout returned {len(pair)} experts; it may exchange two of one layer")
                self._start(experts, *pair)
        written = self.mover.written_bytes
        experts.record.relocated_bytes, self._seen = written - self._seen, written

    def _start(self, experts: Movement, a: int, b: int) -> None:
        each = experts.geometry.experts
        if a == b or a // each != b // each:
            raise PluginError(f"relayout returned experts {a} and {b}; it may only exchange two of one layer")
        self.mover.move(a, b, self._bytes(experts, a), self._bytes(experts, b))
        self._moving = a, b
        self.left_bytes -= self.swap_bytes

    def _bytes(self, experts: Movement, key: int) -> np.ndarray | None:
        """The expert as it lies in a tier; None on runs without bytes."""
        for tier in experts.tiers:
            if tier.resident([key])[0]:
                return None if tier.arena is None else tier.arena[tier.slot(key)]
        raise PluginError(f"relayout returned expert {key}, which is not in memory; it may only move resident ones")

    @hookimpl
    def end_step(self, step, record) -> None:
        """Count what was written while tokens were decoded, after warm-up."""
        if step.phase != PREFILL:
            self._decoded += step.emits
            if self._decoded > self._warmup:
                self._tokens += step.emits
                self._nbytes += record.relocated_bytes

    @hookimpl
    def report(self) -> dict[str, float]:
        """Swaps, bytes and seconds of the run, and bytes per token."""
        found = {"swaps": self.swaps, "relocated_mib": self.mover.written_bytes / MIB}
        if self._tokens:
            found["relocated_mib_per_token"] = self._nbytes / MIB / self._tokens
        return {**found, "relocation_s": self.mover.seconds}
