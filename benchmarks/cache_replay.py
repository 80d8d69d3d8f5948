"""How fast cache replay alone goes, without a timeline: requests per second of every policy, on one core.

    python benchmarks/cache_replay.py [--tokens N] [--rounds N] [--share S] [--trace FILE]

A synthetic trace of Qwen3-30B-A3B's shape, or a given one, with slots for a share of all experts, shared by all layers
and split between them. CPU time of this process, the best of several rounds: others can only slow one down. What is
compiled at first use is not in it. Beside it the same policy as the decode loop drives it, call by call, on part of the
trace. The bar is two million requests a second for lru. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

from moebench.residency.policies import POLICIES, make_policy
from moebench.residency.replay import Events, events, replay
from moebench.trace.format import Trace, load
from moebench.trace.synthetic import SyntheticSpec, synthesize

BAR = 2e6  # requests/s of lru
SHAPE = {"layers": 48, "experts": 128, "top_k": 8}
PART = 300  # tokens that a policy is driven through call by call
SCOPES = ("shared", "per_layer")


def best(work: Callable[[], object], rounds: int) -> float:
    """Least CPU seconds of several rounds."""
    least = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        work()
        least = min(least, time.process_time() - started)
    return least


def called(name: str, todo: Events) -> Callable[..., object]:
    """What makes a policy that only Python may run."""
    future = {"future": todo.keys} if name.startswith("belady") else {}
    return partial(make_policy, name, **future)


def main() -> None:
    """Measure each policy and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--trace", help="trace file to replay instead of a synthetic one")
    arguments = parser.parse_args()
    if arguments.trace:
        trace: Trace = load(arguments.trace)
    else:
        trace = synthesize(SyntheticSpec(**SHAPE, sequences=8, prefill=0, decode=arguments.tokens // 8))
    first = events(trace.take(slice(0, PART)))
    replay(first, "lru", trace.layers * trace.top_k)  # compiles
    cut = best(lambda: events(trace), arguments.rounds)
    todo = events(trace)
    requests, slots = len(todo.flat), round(arguments.share * trace.layers * trace.expert_count)
    size = f"{requests} requests of {trace.tokens} tokens, {slots} slots"
    print(f"{size}; cut into events at {requests / cut / 1e6:.1f} M/s")
    print(f"{'million requests/s':20s}" + "".join(f"{s:>12s}{'by calls':>12s}" for s in SCOPES))
    rates: dict[str, dict[str, float]] = {}
    for name in POLICIES:
        rates[name] = {}
        for scope in SCOPES:
            run = partial(replay, todo, name, slots, scope)
            rates[name][scope] = requests / best(run, arguments.rounds)
            slow = partial(replay, first, called(name, first), slots, scope)
            rates[name][f"{scope}, by calls"] = len(first.flat) / best(slow, 1)
        print(f"{name:20s}" + "".join(f"{rate / 1e6:12.2f}" for rate in rates[name].values()))
    verdict = "ok" if min(rates["lru"][scope] for scope in SCOPES) >= BAR else "below"
    print(f"lru: bar {BAR / 1e6:.0f} M requests/s {verdict}")
    print(json.dumps({"requests": requests, "slots": slots, "rates": rates}, separators=(",", ":")))


if __name__ == "__main__":
    main()
