"""Cache replay: hits, misses and victims of a policy over a trace, without any clock.

One event is what one layer demands in one step, as in the decode loop: a decode row alone, or a chunk of prefill rows
of one sequence. Keys of the event in progress are never victims. A named policy runs its law compiled, one of somebody
else's runs as the loop would run it; the two give the same victims. Knows keys and slots; knows no bytes and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moebench.residency import kernels
from moebench.residency.kernels import REFETCH_STEPS
from moebench.residency.policies import CAUSAL, POLICIES, Policy, PolicyError, Random, make_policy
from moebench.residency.tier import SCOPES
from moebench.step import DECODE
from moebench.trace.format import Trace


@dataclass(frozen=True, eq=False)
class Events:
    """Demands of a trace in order: in step ``step[i]`` layer ``layer[i]`` asks for ``keys[i]`` (ascending).

    ``request[i]`` says of which sequence, counted from 0.
    """

    flat: np.ndarray  # int32, the keys of one event after another
    cuts: np.ndarray  # int64 [events + 1], where each event begins and ends in it
    layer: np.ndarray  # int64
    step: np.ndarray  # int64
    decode: np.ndarray  # bool
    request: np.ndarray  # int64
    layers: int
    experts: int
    top_k: int

    @cached_property
    def keys(self) -> list[np.ndarray]:
        """The flat keys (int64) of each event."""
        return np.split(self.flat.astype(np.int64), self.cuts[1:-1]) if len(self.layer) else []

    @property
    def largest(self) -> int:
        """Most keys that one event asks for."""
        return int(np.diff(self.cuts).max(initial=0))


def events(trace: Trace, chunk: int = 128) -> Events:
    """Cut a trace into events: each decode row is a step, up to ``chunk`` prefill rows of one sequence are a step."""
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    decode = trace.phase == DECODE
    rows = np.arange(trace.tokens)
    run = np.ones(trace.tokens, bool)  # where a new sequence or phase starts
    run[1:] = (trace.sequence[1:] != trace.sequence[:-1]) | (decode[1:] != decode[:-1])
    since = rows - np.maximum.accumulate(np.where(run, rows, 0)) if trace.tokens else rows
    starts = np.flatnonzero(decode | (since % chunk == 0))
    most = len(starts) * trace.layers
    flat, cuts = np.empty(trace.experts.size, np.int32), np.zeros(most + 1, np.int64)
    layer, step = np.empty(most, np.int64), np.empty(most, np.int64)
    ids, bounds = np.ascontiguousarray(trace.experts), np.append(starts, trace.tokens)
    count = kernels.compiled()["gather"](ids, bounds, trace.expert_count, flat, cuts, layer, step)
    first = starts[step[:count]]
    return Events(
        flat=flat[: cuts[count]],
        cuts=cuts[: count + 1],
        layer=layer[:count],
        step=step[:count],
        decode=decode[first],
        request=np.searchsorted(trace.sequence_starts, first, side="right") - 1,
        layers=trace.layers,
        experts=trace.expert_count,
        top_k=trace.top_k,
    )


@dataclass(frozen=True, eq=False)
class CacheResult:
    """What a policy did: a request is one (step, layer, expert); ``refetches`` are misses within 5 steps of leaving."""

    policy: str
    scope: str
    slots: int
    requests: int
    hits: int
    misses: int
    evictions: int
    refetches: int
    decode_requests: int
    decode_hits: int
    victims: list[list[int]] | None  # per event, worst first

    @property
    def hit_rate(self) -> float | None:
        """Hits per request over decode steps; None where the trace has none."""
        return self.decode_hits / self.decode_requests if self.decode_requests else None


def replay(
    trace: Trace | Events,
    policy: str | Callable[..., Policy],
    slots: int,
    scope: str = "shared",
    *,
    chunk: int = 128,
    seed: int = 0,
    victims: bool = False,
    **options: Any,
) -> CacheResult:
    """Run ``policy`` with ``slots`` slots in all, starting empty; ``victims`` keeps the list of who left at each event.

    ``policy`` is a name, or makes one out of the arguments of ``make_policy``. ``per_layer`` gives each layer
    ``slots // layers``. A bypassing policy keeps up to ``slots`` experts and uses
    temporary slots beyond them. An event larger than its slots runs in waves, what is resident first. Fewer slots than
    one token's demand are an error that states the minimum.
    """
    todo = trace if isinstance(trace, Events) else events(trace, chunk)
    if scope not in SCOPES:
        raise ValueError(f"scope {scope!r} is not one of {', '.join(SCOPES)}")
    pools = todo.layers if scope == "per_layer" else 1
    room = slots // pools
    if room < todo.top_k:
        raise ValueError(
            f"{slots} slots, {scope}: the smallest legal number is {todo.top_k * pools} (one token's demand)"
        )
    sizes = (todo.layers * todo.experts, room * pools, todo.layers)
    if isinstance(policy, str):
        if policy in POLICIES and "future" in POLICIES[policy].OPTIONS:
            options["future"] = (todo.flat, todo.cuts)
        chosen = make_policy(policy, *sizes, seed=seed, pools=pools, **options)
    else:
        chosen = policy(*sizes, seed=seed, pools=pools, **options)
    run = _compiled if isinstance(policy, str) else _interpreted
    counted, log, gone = run(todo, chosen, room, pools, victims)
    requests = int(todo.cuts[-1])
    return CacheResult(
        policy=policy if isinstance(policy, str) else type(chosen).__name__.lower(),
        scope=scope,
        slots=room * pools,
        requests=requests,
        hits=int(counted[kernels.HITS]),
        misses=requests - int(counted[kernels.HITS]),
        evictions=int(counted[kernels.EVICTIONS]),
        refetches=int(counted[kernels.REFETCHES]),
        decode_requests=int(counted[kernels.DECODE_REQUESTS]),
        decode_hits=int(counted[kernels.DECODE_HITS]),
        victims=[part.tolist() for part in np.split(log, np.cumsum(gone))[: len(gone)]] if victims else None,
    )


def _compiled(todo: Events, policy: Policy, room: int, pools: int, victims: bool):
    """Counts as ``kernels.drive`` has them, victims in order (empty unless wanted) and how many each event had."""
    log = np.empty(len(todo.flat) if victims else 0, np.int64)
    gone = np.zeros(len(todo.layer), np.int64)
    salts = policy.salts(len(gone)) if isinstance(policy, Random) else np.empty(0, np.uint64)
    counted = kernels.compiled()["drive"](
        policy.code, policy.bypass, todo.flat, todo.cuts, todo.step, todo.decode, salts, room, pools,
        policy.rank, policy.whole, policy.real, log, gone,
    )  # fmt: skip
    return counted, log[: counted[kernels.LOGGED]], gone


def _interpreted(todo: Events, policy: Policy, room: int, pools: int, victims: bool):
    """The same as ``_compiled`` by calls of the policy, as the loop makes them."""
    total = todo.layers * todo.experts
    cache = _Cache(total, room, pools)
    log: list[int] = []
    gone = np.zeros(len(todo.layer), np.int64)
    counted = np.zeros(kernels.LOGGED + 1, np.int64)
    left = np.full(total, -REFETCH_STEPS - 1, np.int64)  # step in which a key last left, or was not kept
    served = 0
    for at, keys in enumerate(todo.keys):
        if todo.request[at] != served:
            policy.begin_request()
            served = todo.request[at]
        ready = cache.resident[keys]
        found = int(ready.sum())
        policy.access(keys, ready)
        if found < len(keys):
            missing = keys[~ready]
            counted[kernels.REFETCHES] += (todo.step[at] - left[missing] <= REFETCH_STEPS).sum()
            pool = int(todo.layer[at]) if pools > 1 else 0
            out = cache.bypass(policy, pool, keys, missing) if policy.bypass else cache.admit(policy, pool, keys, ready)
            left[out] = todo.step[at]
            gone[at] = len(out)
            log += out
        counted[kernels.HITS] += found
        if todo.decode[at]:
            counted[kernels.DECODE_REQUESTS] += len(keys)
            counted[kernels.DECODE_HITS] += found
    counted[kernels.EVICTIONS] = len(log)
    return counted, np.array(log, np.int64), gone


class _Cache:
    """Which keys are resident, in pools of ``room`` slots; keys of pool p are p's equal share of all keys."""

    def __init__(self, keys: int, room: int, pools: int) -> None:
        self.resident = np.zeros(keys, bool)
        self.pool = self.resident.reshape(pools, -1)
        self.held = [0] * pools
        self.room = room

    def _others(self, pool: int, wave: np.ndarray) -> np.ndarray:
        """Resident keys of a pool that the wave does not need, ascending."""
        inside = self.resident[wave]
        self.resident[wave] = False
        others = np.flatnonzero(self.pool[pool])
        self.resident[wave] = inside
        return others + pool * self.pool.shape[1] if pool else others

    def admit(self, policy, pool: int, keys: np.ndarray, ready: np.ndarray) -> list[int]:
        """Bring in what is missing, in waves if the event exceeds the slots; returns who had to leave."""
        waves: list[tuple[np.ndarray, np.ndarray]] = [(keys, keys[~ready])]
        if len(keys) > self.room:
            missing = waves[0][1]
            parts = [missing[i : i + self.room] for i in range(0, len(missing), self.room)]
            waves = [(part, part) for part in parts]
        gone: list[int] = []
        for wave, missing in waves:
            short = self.held[pool] + len(missing) - self.room
            if short > 0:
                out = policy.victims(self._others(pool, wave), short)
                self.resident[out] = False
                gone += out.tolist()
            self.resident[missing] = True
            self.held[pool] += len(missing) - max(short, 0)
        return gone

    def bypass(self, policy, pool: int, keys: np.ndarray, missing: np.ndarray) -> list[int]:
        """Keep the best of what is held and what was used; returns who left, or was not kept.

        What the event hit may leave as well: it has been used, and keeping it by force would not be optimal.
        """
        short = self.held[pool] + len(missing) - self.room
        self.resident[missing] = True
        self.held[pool] += len(missing)
        if short <= 0:
            return []
        out = policy.victims(np.concatenate([self._others(pool, keys), keys]), short)
        self.resident[out] = False
        self.held[pool] -= short
        return out.tolist()


def hit_rates(
    trace: Trace,
    fractions: Sequence[float] = (0.125, 0.25, 0.375, 0.5),
    scope: str = "per_layer",
    *,
    policies: Sequence[str] = (*CAUSAL, "belady", "belady_bypass"),
    chunk: int = 128,
) -> dict[str, dict[str, float | None]]:
    """Decode hit rate by policy and by share of all experts that has a slot, at least one token's demand per pool."""
    if unknown := [name for name in policies if name not in POLICIES]:
        raise PolicyError(f"policy {unknown[0]!r} is not one of {', '.join(POLICIES)}")
    todo = events(trace, chunk)
    least = trace.top_k * (trace.layers if scope == "per_layer" else 1)
    slots = {f: max(least, round(f * trace.layers * trace.expert_count)) for f in fractions}
    return {name: {f"{f:g}": replay(todo, name, slots[f], scope).hit_rate for f in fractions} for name in policies}
