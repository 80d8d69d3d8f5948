"""Which of two policies chooses better at each decision of one cache, judged by when the victims are used next.

An offline tool: it needs the future of a trace. Knows keys and slots; knows no bytes and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.residency.policies import Belady, Policy, make_policy
from moebench.residency.replay import Events, replay


@dataclass(frozen=True)
class Duel:
    """Decisions (victims), those of whose next uses differ, and those in which the first policy's is used later."""

    decisions: int
    differing: int
    better: int


class _Duel(Policy):
    """The first policy decides; the second is asked at the same moment, with the same candidates."""

    def __init__(self, first: Policy, second: Policy, oracle: Belady) -> None:
        self.first, self.second, self.oracle = first, second, oracle
        self.counts = np.zeros(3, np.int64)

    def begin_request(self):
        self.first.begin_request()
        self.second.begin_request()

    def access(self, keys, hits):
        for policy in (self.first, self.second, self.oracle):
            policy.access(keys, hits)

    def victims(self, candidates, need):
        chosen, other = (policy.victims(candidates, need) for policy in (self.first, self.second))
        own, rival = (np.sort(self.oracle.next_use(np.asarray(keys))) for keys in (chosen, other))
        self.counts += (need, int((own != rival).sum()), int((own > rival).sum()))
        return chosen


def duel(todo: Events, first: str, second: str, slots: int, scope: str = "per_layer") -> Duel:
    """Replay ``first``, starting empty, and ask ``second`` at each of its decisions."""
    made: list[_Duel] = []

    def build(*sizes: int, **where: Any) -> Policy:
        one, two = (make_policy(name, *sizes, **where) for name in (first, second))
        made.append(_Duel(one, two, Belady(*sizes, **where, future=todo.keys)))
        return made[0]

    replay(todo, build, slots, scope)
    return Duel(*map(int, made[0].counts))
