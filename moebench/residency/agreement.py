"""How good evictions are: hits, experts that come back at once and agreement with Belady, from a cache replay.

An offline tool: it needs the future of a trace. Any policy can be judged, causal or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moebench.residency.policies import POLICIES, Belady, Policy, make_policy
from moebench.residency.replay import Events, replay


@dataclass(frozen=True)
class Judgement:
    """Of one policy with one number of slots. Shares are None where nothing was asked or evicted.

    ``refetch`` is the share of evictions whose expert was asked for again within 5 steps; ``agreement`` the share of
    victims that Belady could have chosen from the same candidates.
    """

    slots: int
    hit_rate: float | None
    misses: int
    evictions: int
    refetch: float | None
    agreement: float | None


class Judged(Policy):
    """Passes a policy's choices on and counts those that are optimal.

    Of ``need`` victims one is optimal if its next use is no sooner than the ``need``-th latest among the candidates:
    equals count, and so does any expert that is never used again.
    """

    def __init__(self, policy: Policy, oracle: Belady) -> None:
        self.policy, self.oracle, self.chosen, self.optimal = policy, oracle, 0, 0

    def begin_request(self):
        self.policy.begin_request()

    def access(self, keys, hits):
        self.policy.access(keys, hits)
        self.oracle.access(keys, hits)

    def victims(self, candidates, need):
        out = self.policy.victims(candidates, need)
        latest = np.sort(self.oracle.next_use(candidates))[len(candidates) - need]
        self.chosen += need
        self.optimal += int((self.oracle.next_use(out) >= latest).sum())
        return out


def judge(todo: Events, policy: str | Callable[..., Policy], slots: int, scope: str = "per_layer") -> Judgement:
    """Replay ``policy``, a name or what makes one out of the arguments of ``make_policy``, and judge its victims."""
    judged: list[Judged] = []
    named: dict[str, Any] = {"future": todo.keys} if policy in POLICIES and "future" in POLICIES[policy].OPTIONS else {}
    make = partial(make_policy, policy, **named) if isinstance(policy, str) else policy

    def build(*sizes: int, **where: int) -> Policy:
        judged.append(Judged(make(*sizes, **where), Belady(*sizes, **where, future=todo.keys)))
        return judged[0]

    done = replay(todo, build, slots, scope)
    return Judgement(
        slots=done.slots,
        hit_rate=done.hit_rate,
        misses=done.misses,
        evictions=done.evictions,
        refetch=done.refetches / done.evictions if done.evictions else None,
        agreement=judged[0].optimal / judged[0].chosen if judged[0].chosen else None,
    )
