"""The observer that turns step records into the numbers of a row. Definitions: ``docs/metrics.md``.

Decode only, after warm-up, unless a name says otherwise. Memory grows by 16 bytes a decode step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from moebench.hookspecs import hookimpl
from moebench.step import PREFILL, VERIFY
from moebench.units import GB, MIB

P99_MINIMUM = 100
UNDRAFTED = "nothing was drafted"


class Metrics:
    """Accumulates one run. ``storage`` gives the bytes that storage has delivered so far, and in how many requests."""

    def __init__(self, warmup_tokens: int, storage: Callable[[], tuple[int, int]]) -> None:
        self.warmup_tokens, self.storage = warmup_tokens, storage
        self.ttft_s: list[float] = []
        self.step_s = array("d")  # duration of each counted decode step
        self.token_s = array("d")  # duration per token of one sequence
        self.seen = self.tokens = self.steps = 0
        self.rounds = self.verified = 0  # passes, counted for each sequence, and rows in them
        self.drafts = False
        self.requests = self.hits = self.late = self.demand_reads = self.prefetch_reads = self.evictions = 0
        self.bytes = self.read_bytes = self.storage_requests = 0
        self.from_host, self.two_tiers = 0, False
        self.stall_s = 0.0
        self._request_s = 0.0
        self._before = (0, 0)

    @hookimpl
    def begin_request(self, sequences, view) -> None:
        """The clock of time to first token starts."""
        self._request_s = view.now

    @hookimpl
    def begin_step(self, step, view) -> None:
        """Remember what storage had delivered before the step."""
        self._before = self.storage()

    @hookimpl
    def end_step(self, step, record, view) -> None:
        """Count a decode step once warm-up is over; a prefill step only ends the time to first token."""
        if step.phase == PREFILL:
            self.ttft_s += [record.ended_s - self._request_s] * step.emits  # one per request of the batch
            return
        self.seen += step.emits
        if self.seen <= self.warmup_tokens:
            return
        duration = record.duration_s
        self.steps += 1
        self.tokens += step.emits
        self.step_s.append(duration)
        active = 1 if step.rows == 1 else len(set(step.sequence[step.valid].tolist()))
        self.token_s.append(duration * active / max(1, step.emits))
        self.rounds += active
        if step.phase == VERIFY:
            self.drafts = True
            self.verified += int(step.valid.sum())
        else:
            self.verified += step.emits
        self.requests += sum(record.requests)
        self.hits += sum(record.hits)
        self.late += sum(record.late)
        self.from_host += record.from_host
        self.two_tiers = len(view.tiers) > 1
        self.demand_reads += record.demand_reads
        self.prefetch_reads += record.prefetch_reads - record.cancelled
        self.evictions += record.evictions
        self.read_bytes += record.read_bytes
        nbytes, requests = self.storage()
        self.bytes += nbytes - self._before[0]
        self.storage_requests += requests - self._before[1]
        self.stall_s += record.stall_s

    def numbers(self) -> dict[str, tuple[float | None, str, int]]:
        """Metric name to (value, reason why it is missing, sample count)."""
        if not self.tokens:
            gone = (None, "no decode step was left after warm-up", 0)
            return dict.fromkeys(NAMES, gone) | {"ttft_s": self._ttft()}
        elapsed, tokens = float(np.sum(self.step_s)), self.tokens
        samples = np.sort(np.asarray(self.token_s)) * 1e3
        few = f"needs {P99_MINIMUM} samples, had {len(samples)}"

        def rank(q: float) -> float:
            return float(samples[max(0, int(np.ceil(q * len(samples))) - 1)])

        return {
            "decode_tok_s": (tokens / elapsed if elapsed else None, "" if elapsed else "no time passed", len(samples)),
            "ttft_s": self._ttft(),
            "tpot_p50_ms": (rank(0.50), "", len(samples)),
            "tpot_p95_ms": (rank(0.95), "", len(samples)),
            "tpot_p99_ms": (rank(0.99), "", len(samples)) if len(samples) >= P99_MINIMUM else (None, few, len(samples)),
            "hit_rate": (
                self.hits / self.requests if self.requests else None,
                "no expert was requested",
                self.requests,
            ),
            "late_rate": (
                self.late / self.requests if self.requests else None,
                "no expert was requested",
                self.requests,
            ),
            "host_rate": (
                self.from_host / self.requests if self.requests and self.two_tiers else None,
                "no expert was requested" if self.two_tiers else "there is one tier",
                self.requests,
            ),
            "ssd_mib_per_token": (self.bytes / tokens / MIB, "", tokens),
            "reads_per_token": ((self.demand_reads + self.prefetch_reads) / tokens, "", tokens),
            "storage_requests_per_token": (self.storage_requests / tokens, "", tokens),
            "stall_ms_per_token": (self.stall_s / tokens * 1e3, "", tokens),
            "effective_gb_s": (self.bytes / elapsed / GB if elapsed else None, "no time passed", tokens),
            "accepted_per_round": (tokens / self.rounds if self.drafts else None, UNDRAFTED, self.rounds),
            "verified_per_token": (self.verified / tokens if self.drafts else None, UNDRAFTED, tokens),
        }

    def _ttft(self) -> tuple[float | None, str, int]:
        if not self.ttft_s:
            return None, "the workload has no prompt tokens", 0
        return float(np.mean(self.ttft_s)), "", len(self.ttft_s)


NAMES = (
    "decode_tok_s",
    "ttft_s",
    "tpot_p50_ms",
    "tpot_p95_ms",
    "tpot_p99_ms",
    "hit_rate",
    "late_rate",
    "host_rate",
    "ssd_mib_per_token",
    "reads_per_token",
    "storage_requests_per_token",
    "stall_ms_per_token",
    "effective_gb_s",
    "accepted_per_round",
    "verified_per_token",
)
