"""What a run counts: rounds, how deep drafts held, what windows demanded and in how many requests it was read.

Passes that decode or verify, warm-up included; prompts are left out. Knows no time.
"""

from __future__ import annotations

import numpy as np

from moebench.step import PREFILL, VERIFY, Step


class Counts:
    """Running sums of one run."""

    def __init__(self, depth: int) -> None:
        self.right = np.zeros(depth, np.int64)  # rounds whose first d levels were right
        self.sums = dict.fromkeys(("passes", "rounds", "emitted", "rows", "demanded", "read", "requests", "between"), 0)
        self.nodes_drafted = self.experts_dropped = 0
        self.impact = 0.0
        self.layers_pruned = 0
        self.counting = False

    def begin(self, step: Step) -> None:
        """A pass begins."""
        self.counting = step.phase != PREFILL

    def drafted(self, nodes: int) -> None:
        """A draft was looked at before nodes were left out of it."""
        self.nodes_drafted += nodes

    def dropped(self, experts: int, impact: float) -> None:
        """A layer's window lost experts, and this share of its impact."""
        self.experts_dropped += experts
        self.impact += impact
        self.layers_pruned += 1

    def demand(self, keys: list[int]) -> None:
        """A layer's distinct experts."""
        self.sums["demanded"] += len(keys) if self.counting else 0

    def read(self, wanted: int, requests: int, between: int) -> None:
        """Experts that were read in so many requests, with others ``between`` them that nobody wanted."""
        if self.counting:
            for name, count in (("read", wanted), ("requests", requests), ("between", between)):
                self.sums[name] += count

    def end(self, step: Step) -> None:
        """A pass ended."""
        if not self.counting:
            return
        self.sums["passes"] += 1
        self.sums["emitted"] += step.emits
        self.sums["rows"] += int(step.valid.sum())
        if step.phase == VERIFY and step.accepted is not None:
            for nodes in step.node_rows():
                if len(nodes):
                    self.sums["rounds"] += 1
                    self.right[: int(step.accepted[nodes].sum())] += 1

    def report(self) -> dict[str, float]:
        """Everything by name; what did not happen is left out."""
        sums: dict[str, float] = dict(self.sums)
        if sums["rounds"]:
            sums |= {
                f"right_at_{d}": round(int(n) / sums["rounds"], 6) for d, n in enumerate(self.right.tolist(), start=1)
            }
        if self.nodes_drafted:
            sums["nodes_drafted"] = self.nodes_drafted
        if self.layers_pruned:
            sums["experts_dropped"] = self.experts_dropped
            sums["impact_dropped"] = round(self.impact / self.layers_pruned, 6)
        return sums
