"""An observer that checks a run as it goes: what is served, what is in use, what is booked, what is executed.

Raises ``AssertionError`` at the pass and layer where something is wrong. Poisons memory that holds nothing, so that
whoever computes on it computes on NaN. Knows no system.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from moebench.hookspecs import hookimpl
from moebench.residency.tier import FREE, LEASED
from moebench.step import PREFILL, Routing, Step

POISON = 0xFF  # of every byte: NaN in bf16, fp16, fp32
UNTIMED = ("step", "harness_s")


@dataclasses.dataclass
class Chance:
    """How often what was wanted was at hand, beside how often chance would have it so. ``score`` is in deviations."""

    events: int = 0
    found: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def draw(self, found: int, drawn: int, marked: int, of: int) -> None:
        """``drawn`` of ``of`` were drawn without replacement, ``found`` of them among the ``marked``."""
        p = marked / of
        self.events += 1
        self.found += found
        self.expected += drawn * p
        self.variance += drawn * p * (1 - p) * (of - drawn) / (of - 1)  # hypergeometric

    @property
    def score(self) -> float:
        """Standard deviations above chance."""
        return (self.found - self.expected) / self.variance**0.5 if self.variance else 0.0


class Audit:
    """One run's observer; ``attach`` it to the session before the first request.

    ``truth`` [keys, bytes] are the experts as packed, where bytes move. ``until(step, layer)`` ends the
    log before that layer is routed.
    """

    def __init__(
        self, truth: np.ndarray | None = None, until: Callable[[Step, int], bool] = lambda step, layer: False
    ) -> None:
        self.truth, self.until = truth, until
        self.log: list[tuple[Any, ...]] = []
        self.native: list[Routing] = []  # of the pass under way, by layer
        self.executed: list[Routing] = []
        self.altered = ""  # where another routing than the router's was executed first
        self.unstaged = ""  # where a routing decided ahead found an expert that was neither here nor on its way
        self.resident, self.routed = Chance(), Chance()
        self.keys_read = self.bytes_read = self.recorded_keys = self.recorded_bytes = 0
        self.records: list[Any] = []
        self.logging = True

    def attach(self, session: Any, ops: Any = None) -> Audit:
        """Look over the shoulder of a session's experts and timeline."""
        self.session, self.experts, self.ops = session, session.experts, ops
        timeline = session.timeline
        self._serve, self.experts.serve = self.experts.serve, self.serve
        self._read, timeline.read = timeline.read, self.read
        self._copy, timeline.copy = timeline.copy, self.copy
        self._cancel, timeline.cancel = timeline.cancel, self.cancel
        self.first_bytes = timeline.storage_bytes
        self._check("before the first pass")
        return self

    @property
    def where(self) -> str:
        """The pass under way."""
        step = self.experts.step
        return "before the first pass" if step is None else f"pass {step.index}"

    # --- hooks ---

    @hookimpl
    def begin_step(self, step: Step) -> None:
        """What the system did between two passes."""
        self.native, self.executed = [], []
        self._check(f"before pass {step.index}")

    @hookimpl
    def acquired(self, layer: int, keys: list[int], ready: list[bool]) -> None:
        """A demand."""
        self._note("demand", layer, tuple(keys), tuple(map(bool, ready)))
        self._check(f"{self.where}, layer {layer}")

    @hookimpl
    def end_step(self, step: Step, record: Any) -> None:
        """A record is what was read, and nothing else."""
        self._check(f"end of pass {step.index}")
        if self.logging:
            for tier in self._tiers():
                self._note("held", tier.name, np.packbits(tier.slot_of >= 0).tobytes())
            fields = dataclasses.fields(record)
            self._note("pass", tuple((f.name, str(getattr(record, f.name))) for f in fields if f.name not in UNTIMED))
        self.records.append(record)

    # --- what the loop does ---

    def serve(self, layer: int, hidden: Any, native: Routing) -> tuple[Routing, Iterator[tuple[int, Any]]]:
        """Note the routing before and after the system saw it."""
        step = self.experts.step
        self.logging = self.logging and not self.until(step, layer)
        kept = Routing(np.array(native.experts), self._numbers(native.weights))
        held = self._held(layer)
        routing, served = self._serve(layer, hidden, native)
        experts = np.asarray(routing.experts)
        self.native.append(kept)
        self.executed.append(routing)
        if not self.altered and not self._same(kept, routing, step.valid):
            self.altered = f"{self.where}, layer {layer}"
        if routing.ahead and step.phase != PREFILL and not self.unstaged:
            missing = [e for e in routing.demand(step.valid) if not held[e]]
            self.unstaged = f"{self.where}, layer {layer}: experts {missing}" if missing else ""
        if step.phase != PREFILL:  # the first row alone: nothing of what was read before depends on its routing
            own = kept.experts[0][kept.experts[0] >= 0]
            self.resident.draw(int(held[own].sum()), len(own), int(held.sum()), len(held))
            if routing.ahead:
                chosen = experts[0][experts[0] >= 0]
                self.routed.draw(len(np.intersect1d(chosen, own)), len(own), len(chosen), len(held))
        return routing, self._served(layer, routing, served)

    def _served(self, layer: int, routing: Routing, served: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Pass experts on to whoever computes, each once, in use, and with the bytes that were packed."""
        seen = []
        for expert, data in served:
            key = layer * self.experts.geometry.experts + expert
            where = f"{self.where}, layer {layer}, expert {expert}"
            assert self._in_use(key, data), f"{where}: its slot is not protected while it is computed on"
            if data is not None and self.truth is not None:
                wanted = self.truth[key]
                assert np.array_equal(data[: len(wanted)], wanted), f"{where}: computed on bytes that are not its own"
            seen.append(expert)
            yield expert, data
        demand = routing.demand(self.experts.step.valid)
        where = f"{self.where}, layer {layer}"
        assert sorted(seen) == demand, f"{where}: {len(demand)} experts were routed, {len(seen)} served"

    def _in_use(self, key: int, data: Any) -> bool:
        """Whether some tier holds the expert, leased, in the very slot that was handed out."""
        for tier in self._tiers():
            slot = tier.slot(key)
            there = data is None or tier.arena is None or np.shares_memory(data, tier.arena[slot])
            if slot >= 0 and there and (tier.state[slot] == LEASED or tier is self.experts.scratch):
                return True
        return False

    def read(self, keys: Any, slots: Any, tier: str, priority: int, together: Any = ()) -> list[Any]:
        """Count what is read, into slots that hold nothing of before."""
        keys = [int(key) for key in keys]
        self._poison(tier, slots)
        self._note("read", tuple(keys), priority)
        tickets = self._read(keys, slots, tier, priority, together)
        self.keys_read += len(keys)
        self.bytes_read += sum(ticket.nbytes for ticket in tickets)
        return tickets

    def copy(self, key: int, source: tuple[str, int], target: tuple[str, int], after: Any) -> Any:
        """A copy goes into a slot that holds nothing of before."""
        self._poison(target[0], [target[1]])
        return self._copy(key, source, target, after)

    def _poison(self, tier: str, slots: Any) -> None:
        arena = next(t.arena for t in self._tiers() if t.name == tier)
        if arena is not None:
            arena[list(slots)] = POISON

    def cancel(self, read: Any, copy: Any) -> bool:
        """What is taken back was not read."""
        if not self._cancel(read, copy):
            return False
        self._note("cancel", read.key)
        self.keys_read -= 1
        self.bytes_read -= read.nbytes
        return True

    # --- checks ---

    def finish(self) -> None:
        """All transfers have ended."""
        self._check("at the end")

    def _check(self, where: str) -> None:
        """Tiers, tickets and ledger agree; memory that holds nothing is poison."""
        try:
            self.experts.check_integrity()
            self.session.ledger.check_integrity()
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
        for tier in self._tiers():
            if tier.arena is not None:
                tier.arena[tier.state == FREE] = POISON

    def _tiers(self) -> list[Any]:
        return [*self.experts.tiers, *([self.experts.scratch] if self.experts.scratch is not None else [])]

    def _held(self, layer: int) -> np.ndarray:
        """Per expert of a layer (bool): in the fastest tier, or on its way there."""
        first = layer * self.experts.geometry.experts
        return np.array(self.experts.device.slot_of[first : first + self.experts.geometry.experts]) >= 0

    def _same(self, native: Routing, routing: Routing, valid: np.ndarray) -> bool:
        """Whether the valid rows have the router's experts and weights."""
        experts = np.asarray(routing.experts)
        if experts.shape != native.experts.shape or not np.array_equal(experts[valid], native.experts[valid]):
            return False
        weights = self._numbers(routing.weights)
        if weights is None or native.weights is None:
            return weights is native.weights
        return np.array_equal(weights[valid], native.weights[valid])

    def _numbers(self, weights: Any) -> np.ndarray | None:
        if weights is None:
            return None
        return np.array(weights if isinstance(weights, np.ndarray) else self.ops.numpy(weights), np.float32)

    def _note(self, *event: Any) -> None:
        if self.logging:
            self.log.append(event)
