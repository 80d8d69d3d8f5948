"""``moebench trace stats``: one trace in numbers, as a table and as JSON. Knows no definition of any number."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.trace.format import Trace, load

WIDTH = 40  # columns of a line that its name takes


@dataclass(frozen=True)
class StatsOptions:
    """A trace to describe."""

    path: str = dataclasses.field(metadata={"help": "trace file"})
    cached: int = option(10000, "tokens, from the first, that hit rates by policy are counted on; 0 leaves them out")
    shares: tuple[float, ...] = option((0.125, 0.25, 0.375, 0.5, 0.75), "shares of all experts that are held")
    scope: Literal["per_layer", "shared"] = option("per_layer", "slots in equal parts per layer, or shared by all")

    def __post_init__(self) -> None:
        if self.cached < 0:
            raise UsageError(f"trace stats: cached must be at least 0, got {self.cached}")
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise UsageError(f"trace stats: shares must lie above 0 and up to 1, got {','.join(map(str, self.shares))}")
        if not self.cached and (self.shares, self.scope) != (StatsOptions.shares, StatsOptions.scope):
            raise UsageError("trace stats: shares and scope say how hit rates are counted, which cached=0 leaves out")


def stats(words: Sequence[str]) -> int:
    """Print the statistics of a trace, the JSON document last."""
    options = parse(words, StatsOptions, "trace stats")
    if options is None:
        return 0
    from moebench.trace.stats import statistics

    trace = load(options.path)
    numbers = statistics(trace)
    shape = f"{trace.layers} layers of {trace.expert_count} experts, {trace.top_k} a token"
    print(f"{trace.metadata['model']}: {trace.tokens} tokens of {numbers['sequences']} sequences, {shape}")
    for gap in numbers["gaps"]:
        print(f"gap: {gap}")
    _show(numbers)
    if options.cached:
        numbers |= _hit_rates(trace, options)
    print(json.dumps(numbers, sort_keys=True, separators=(",", ":")))
    return 0


def _show(numbers: Mapping[str, Any]) -> None:
    """The statistics as lines of a name and values; what is a value by number has the numbers above it."""
    _line("overlap with the token so many before", numbers["overlap"])
    print(f"  {'by chance':<{WIDTH}}{numbers['overlap_chance']:>8.3f}")
    for name, where in (("popularity", "in the trace"), ("popularity_in_sequence", "in a sequence")):
        found = numbers[name]
        _line(f"share of uses of the busiest, {where}", found["top"])
        for what in ("gini", "zipf", "unused"):
            print(f"  {what:<{WIDTH}}{_cell(found[what]):>8}")
    _line("distinct experts a layer in so many tokens", numbers["unique_experts"])
    _line("... in a step of so many sequences", numbers["unique_experts_in_batch"])
    _line("uses that come back within so many tokens", numbers["reuse_distance"]["within"])
    quantiles = {name: numbers["reuse_distance"][name] for name in ("p50", "p90", "p99")}
    _line("tokens until an expert comes back", quantiles)
    for name, what in (("next_token", "the next token's"), ("next_layer", "the next layer's")):
        _line(f"recall of {what} experts", numbers[name])
    for name, found in numbers.items():
        if name.startswith("predicted."):
            _line(name, found)


def _hit_rates(trace: Trace, options: StatsOptions) -> dict[str, Any]:
    """Hit rates by policy and share held, printed too."""
    from moebench.residency.replay import hit_rates

    rows = slice(0, options.cached)
    columns = (trace.experts[rows], trace.phase[rows], trace.sequence[rows], trace.position[rows])
    start = Trace(*columns, metadata=trace.metadata)
    found = hit_rates(start, options.shares, options.scope)
    _line(
        f"hit rate, {start.tokens} tokens, share held", {f"{share:g}": None for share in options.shares}, values=False
    )
    for policy, rates in found.items():
        print(f"  {policy:<{WIDTH}}" + "".join(f"{_cell(rate):>8}" for rate in rates.values()))
    return {"hit_rate": found, "hit_rate_tokens": start.tokens, "hit_rate_scope": options.scope}


def _line(name: str, by_number: Mapping[str, Any], values: bool = True) -> None:
    print(f"{name:<{WIDTH + 2}}" + "".join(f"{key:>8}" if len(key) < 8 else f"  {key}" for key in by_number))
    if values:
        cells = [_cell(value) for value in by_number.values()]
        print(" " * (WIDTH + 2) + "".join(f"{c:>{max(8, len(k) + 2)}}" for c, k in zip(cells, by_number, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
