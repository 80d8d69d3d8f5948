"""What a run counts: how good predictions were, and what became of what was read ahead. Decode passes only.

Recall at M: share of a row's experts that are among the M best scored, M = K/2, K, K+2. Ready recall: share of a
layer's demand that was complete when the layer came, over the layers that a prediction can reach. A prefetch is useful
if it was complete when its layer demanded it, late if the layer had to wait for the rest of it, cancelled if it was
taken back, else wasted (SpecPrefetch, arXiv 2607.24787, metrics; the last four are this project's). Knows no time.
"""

from __future__ import annotations

import numpy as np


class Counts:
    """Running sums of one run."""

    def __init__(self, expert_bytes: int) -> None:
        self.expert_bytes = expert_bytes
        self.sizes: tuple[int, ...] = ()  # a trace may have another K than its model
        self.found = {1: np.zeros(3, np.int64), 2: np.zeros(3, np.int64)}
        self.asked_of = {1: 0, 2: 0}
        self.rows = self.exact = self.predictions = 0
        self.windows = self.held = 0
        self.demanded = self.ready = self.issued = self.useful = self.late = self.cancelled = 0

    def predicted(self, lag: int, rank: np.ndarray, experts: np.ndarray) -> None:
        """A layer was predicted ``lag`` layers before: ranks by expert, and the rows' experts int [rows, K]."""
        k = experts.shape[1]
        self.sizes = (max(1, k // 2), k, k + 2)
        got = np.append(rank, len(rank))[experts]
        self.found[lag] += [int((got < size).sum()) for size in self.sizes]
        self.asked_of[lag] += got.size
        self.predictions += 1
        if lag == 1:
            self.rows += len(got)
            self.exact += int((got < k).all(1).sum())

    def window(self, lag: int, holds: int) -> None:
        """A window was looked at, and so many transfers it holds."""
        if lag == 1:
            self.windows += 1
            self.held += holds

    def demand(self, ready: np.ndarray, ahead: np.ndarray, flying: np.ndarray) -> None:
        """A layer's demand came: bools per key, complete, asked for ahead, on its way."""
        self.demanded += len(ready)
        self.ready += int(ready.sum())
        self.useful += int((ready & ahead).sum())
        self.late += int((flying & ahead).sum())

    def step(self, issued: int, cancelled: int) -> None:
        """A pass ended: prefetches that found a slot, and those of them that were taken back."""
        self.issued += issued
        self.cancelled += cancelled

    def report(self) -> dict[str, float]:
        """Everything by name; a share of nothing is left out."""
        shares = {}
        for lag, of in self.asked_of.items():
            suffix = "" if lag == 1 else f"_lag{lag}"
            if of:
                shares |= {
                    f"recall_at_{m}{suffix}": int(n) / of for m, n in zip(self.sizes, self.found[lag], strict=True)
                }
        if self.rows:
            shares["exact_set"] = self.exact / self.rows
        if self.demanded:
            shares["ready_recall"] = self.ready / self.demanded
        if self.windows:
            shares["window_holds"] = self.held / self.windows
        fates = {"issued": self.issued, "useful": self.useful, "late": self.late, "cancelled": self.cancelled}
        fates["wasted"] = self.issued - self.useful - self.late - self.cancelled
        return {
            "predictions": self.predictions,
            **{name: round(share, 6) for name, share in shares.items()},
            **fates,
            **{f"{name}_bytes": count * self.expert_bytes for name, count in fates.items()},
        }
