"""Named statistics of a trace, as parameter files of synthetic routing state them: ``overlap@1``, ``lru@0.25``, ...

Knows the names and what each means; knows no files and no generator. ``docs/traces.md`` lists the names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

from moebench.residency.policies import POLICIES
from moebench.residency.replay import Events, events, replay
from moebench.trace import stats
from moebench.trace.format import Trace, TraceError

SUFFIXES = {"": "per_layer", "_shared": "shared", "_reset": "per_layer"}


class Measures:
    """Statistics of one trace by name; demands are cut into events once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._events: dict[bool, list[Events]] = {}

    @cached_property
    def _recurrences(self) -> dict[str, float | None]:
        """What one pass gives: overlaps, their spread over layers, and how soon uses come back."""
        shared, chosen, distances = stats.recurrences(self.trace, stats.LAGS)
        found: dict[str, float | None] = {}
        for lag, both in zip(stats.LAGS, zip(shared, chosen, strict=True), strict=True):
            layers = both[0][both[1] > 0] / both[1][both[1] > 0]
            found[f"overlap@{lag}"] = float(layers.mean()) if len(layers) else None
            found[f"overlap_spread@{lag}"] = float(layers.std()) if len(layers) else None
        within = stats.reuse_distance(self.trace, distances)["within"]
        return found | {f"reuse_within@{distance}": share for distance, share in within.items()}

    def __call__(self, name: str) -> float | None:
        """The value of ``NAME@NUMBER``; an unknown name is an error that lists the valid ones."""
        kind, _, number = name.partition("@")
        if name in self._recurrences:
            return self._recurrences[name]
        if kind in PLAIN and number:
            return PLAIN[kind](self.trace, float(number))
        for suffix in sorted(SUFFIXES, key=len, reverse=True):
            if (policy := kind.removesuffix(suffix)) in POLICIES and kind.endswith(suffix) and number:
                return self._hit_rate(policy, float(number), suffix)
        valid = ["overlap", "overlap_spread", "reuse_within", *PLAIN, *(f"<policy>{suffix}" for suffix in SUFFIXES)]
        raise TraceError(f"statistic {name!r} is not one of {', '.join(f'{v}@NUMBER' for v in valid)}")

    def _hit_rate(self, policy: str, share: float, suffix: str) -> float | None:
        """Decode hits per request with slots for ``share`` of all experts; ``_reset`` starts each sequence empty."""
        per_layer = SUFFIXES[suffix] == "per_layer"
        groups = self.trace.layers if per_layer else 1
        least = self.trace.top_k * groups
        slots = max(least, groups * round(share * self.trace.layers * self.trace.expert_count / groups))
        runs = [replay(todo, policy, slots, SUFFIXES[suffix]) for todo in self._cut(suffix == "_reset")]
        requests = sum(run.decode_requests for run in runs)
        return sum(run.decode_hits for run in runs) / requests if requests else None

    def _cut(self, by_sequence: bool) -> list[Events]:
        if by_sequence not in self._events:
            bounds = [*self.trace.sequence_starts.tolist(), self.trace.tokens] if by_sequence else [0, None]
            parts = [self.trace.take(slice(low, high)) for low, high in pairwise(bounds)]
            self._events[by_sequence] = [events(part) for part in parts]
        return self._events[by_sequence]


PLAIN: dict[str, Callable[[Trace, float], float | None]] = {
    "top": stats.top_share,
    "top_in_sequence": lambda trace, share: stats.top_share(trace, share, within_sequence=True),
    "unique": lambda trace, window: stats.unique_experts(trace, int(window)),
    "unique_in_batch": lambda trace, batch: stats.unique_in_batch(trace, int(batch)),
    "next_layer": lambda trace, _: stats.next_layer(trace)["conditional"],
    "next_token": lambda trace, _: stats.next_token(trace)["conditional"],
}
