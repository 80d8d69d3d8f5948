"""What one step leaves behind for observers."""

from __future__ import annotations

from dataclasses import dataclass, field

from moebench.step import Step


@dataclass(slots=True)
class StepRecord:
    """Counters of one forward pass. Times are seconds on the run's clock.

    A request is one distinct (window, layer, expert). ``hits`` had their bytes ready at acquire, ``late`` were in
    flight and joined, the rest missed. ``read_bytes`` are bytes asked of storage by demand and prefetch; a joined read
    counts once, a cancelled one is taken off again.
    """

    step: Step
    started_s: float
    ended_s: float = 0.0
    stall_s: float = 0.0
    demand_reads: int = 0
    prefetch_reads: int = 0
    cancelled: int = 0  # of the prefetches, those taken back before they began
    lost: int = 0  # prefetches that failed, and harmed nobody
    read_bytes: int = 0
    copies: int = 0
    evictions: int = 0
    temporary: int = 0
    waves: int = 0
    on_host: int = 0  # experts computed on the host's processor
    relocated_bytes: int = 0  # written to storage since the step before, to re-organise it
    pool_waits: int = 0  # transfers that waited for a buffer of the pool
    from_host: int = 0  # requests that missed and were found in the host tier
    requests: list[int] = field(default_factory=list)  # per layer
    hits: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end of the pass."""
        return self.ended_s - self.started_s

    @property
    def misses(self) -> int:
        """Requests that were neither ready nor in flight."""
        return sum(self.requests) - sum(self.hits) - sum(self.late)
