"""MoE-Infinity: requests leave matrices of which experts they took; the nearest earlier one says what to read ahead.

``matrices.py`` counts, ``matching.py`` finds the nearest, ``lookahead.py`` orders and bounds what is read ahead,
``replacement.py`` chooses who leaves; ``equipment.py`` brings the collection. Native routing runs: predictions only
move bytes. See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.step import DECODE, Routing, Step
from moebench.systems.moe_infinity.equipment import PUBLISHED, equip
from moebench.systems.moe_infinity.lookahead import MOST, admitted, best, priorities, worthwhile
from moebench.systems.moe_infinity.matching import FLOAT, Matcher
from moebench.systems.moe_infinity.matrices import Activity, Collection
from moebench.systems.moe_infinity.prepare import PREPARATION
from moebench.systems.moe_infinity.replacement import Replacement
from moebench.systemspec import RunContext, SystemSpec

PAPER = "arXiv 2401.14361, MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert Cache"


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class MoeInfinityConfig:
    """Options of moe_infinity."""

    prefetch: bool = _option(True, "read predicted experts ahead; false: as its main branch runs")
    match: Literal["observed", "masked", "off"] = _option(
        "observed", "layers compared with earlier requests: those routed, as its code those behind; off: own counts"
    )
    ahead: int = _option(
        0,
        "experts on their way ahead at a time, at any cost; 0: those that pay, as many as a layer's window moves",
    )
    replace: Literal["activation", "incache", "incache_decayed", "lru"] = _option(
        "activation", "who leaves: low ratio and deep layers (paper), few dispatches (its code), those decayed, oldest"
    )
    update: Literal["nearest", "least_matched", "off"] = _option(
        "nearest", "which entry a finished request replaces in a full collection"
    )
    capacity: int = _option(0, "entries of the collection; 0: as many as it starts with")
    persistent: int = _option(0, "entries, from the first, that update=least_matched never replaces")
    collection: str = _option("", "folder of a prepared collection; empty: found by the model; 'empty': none at first")

    def __post_init__(self) -> None:
        for name in ("ahead", "capacity", "persistent"):
            if getattr(self, name) < 0:
                raise UsageError(f"system.{name} must be 0 or more, got {getattr(self, name)}")
        if not self.prefetch and (self.match, self.ahead) != ("observed", 0):
            raise UsageError("system.match and system.ahead have an effect with system.prefetch=true only")
        if not self.matches and (self.update, self.capacity, self.collection) != ("nearest", 0, ""):
            raise UsageError("system.update, capacity and collection have an effect with prefetch and match on only")
        if self.persistent and not (self.matches and self.update == "least_matched"):
            raise UsageError("system.persistent has an effect with system.update=least_matched only")
        if self.collection == "empty" and self.update == "off":
            raise UsageError("system.collection=empty stays empty with system.update=off")

    @property
    def matches(self) -> bool:
        """Whether earlier requests are searched."""
        return self.prefetch and self.match != "off"


class MoeInfinity:
    """The hooks of one run."""

    def __init__(self, config: MoeInfinityConfig, run: RunContext) -> None:
        shape, start = run.geometry, run.equipment.content
        self.config, self.layers, self.experts = config, shape.layers, shape.experts
        self.activity = Activity(shape.layers, shape.experts)
        self.replacement = Replacement(config.replace, self.activity)
        self.matcher = None
        if config.matches:
            capacity = run.equipment.held_bytes["predictor"] // (FLOAT * shape.keys)
            collection = Collection(start, shape.layers, shape.experts, capacity, config.persistent)
            self.matcher = Matcher(collection, config.match)
        self.span = shape.layers + (config.match == "masked")
        self.layer_of = np.arange(shape.keys) // shape.experts
        self.chosen = np.zeros(0, np.int64)  # the nearest entry of each sequence
        self.top_k, self.demanded, self.issue_s = shape.top_k, (0.0, np.zeros(0, np.int64)), np.inf
        self.asked = np.zeros(0, np.int64)  # read ahead and perhaps still on their way
        self.fresh = np.zeros(shape.keys, bool)  # asked for in this pass, its layer still to come: protected
        self.ahead = np.zeros(shape.keys, bool)  # read ahead in a decode step and not used since
        self.counted = dict.fromkeys(("prefetched", "hits", "late", "missed", "left_unused", "matched", "updated"), 0)

    @hookimpl
    def begin_request(self, sequences: np.ndarray) -> None:
        """Matrices of the requests before are kept; new ones begin."""
        if self.matcher and self.config.update != "off":
            for matrix in self.activity.counts:
                if matrix.any():
                    self.matcher.collection.add(matrix, self.config.update)
                    self.counted["updated"] += 1
        self.activity.reset(sequences)
        self.chosen = np.zeros(0, np.int64)
        if self.matcher:
            self.matcher.reset(len(sequences))

    @hookimpl
    def begin_step(self) -> None:
        """A pass starts: what was read ahead in the one before and not used has no protection any more."""
        self.fresh[:] = False
        self.replacement.begin_step()
        if self.matcher:
            self.matcher.begin_step()

    @hookimpl
    def route(self, step: Step, layer: int, native: Routing, view: Any) -> None:
        """Count what the router chose and look for the nearest request; the choice itself stays."""
        seen = self.activity.observe(step, layer, np.asarray(native.experts))
        if self.matcher and self.matcher.collection.size and seen:
            streamed = self.matcher.observe(layer, seen, self.activity.counts)
            if layer + 1 < self.layers:
                nearest = self.matcher.nearest(layer)
                self.counted["matched"] += len(nearest)
                if not np.array_equal(nearest, self.chosen):
                    self.chosen = nearest
                    self.expected = sum(self.matcher.collection.ratio(at) for at in nearest.tolist())
                    streamed += FLOAT * len(nearest) * self.expected.size
            view.account(nbytes=streamed)

    @hookimpl
    def acquired(self, step: Step, layer: int, keys: list[int], ready: list[bool], view: Any) -> None:
        """A demand: note uses, and what became of what was read ahead."""
        keys, ready = np.asarray(keys, np.int64), np.asarray(ready, bool)
        self.replacement.access(keys)
        if step.phase == DECODE:
            waited = ~ready & view.in_flight(keys)
            early = self.ahead[keys]
            self.counted["hits"] += int((early & ready).sum())
            self.counted["late"] += int((early & waited).sum())
            self.counted["missed"] += int((~ready & ~waited).sum())
        self.ahead[keys] = False
        self.fresh[layer * self.experts : (layer + 1) * self.experts] = False
        self.demanded = view.now, keys[~ready]

    @hookimpl
    def cancel(self, layer: int) -> np.ndarray | None:
        """Reads ahead whose layer has come: what it does not demand is stale."""
        stale = self.asked[self.layer_of[self.asked] <= layer]
        return stale if len(stale) else None

    @hookimpl
    def prefetch(self, step: Step, point: int | str, view: Any) -> np.ndarray | None:
        """Experts of later layers by priority, as many as ``ahead`` or the layer's window lets through."""
        if not self.config.prefetch or not isinstance(point, int) or point + 1 == self.layers:
            return None
        if self.matcher and not len(self.chosen):
            return None  # nothing to resemble yet
        self._observe_issue(view)
        self.asked = self.asked[view.in_flight(self.asked)]
        ratio = self.expected if self.matcher else self.activity.ratio
        first = (point + 1) * self.experts
        later = np.arange(first, self.layers * self.experts)
        scores = priorities(ratio, point, self.span).ravel()
        view.account(nbytes=FLOAT * scores.size)
        wanted = ~(view.resident(later) | self.fresh[first:])
        wanted[self.asked[self.asked >= first] - first] = False
        count = self.config.ahead - len(self.asked) if self.config.ahead else MOST
        if count <= 0:
            return None
        keys = later[best(scores, wanted, count)]
        if not self.config.ahead:
            cost = view.cost(keys)
            pays = worthwhile(self.top_k * ratio.ravel()[keys], cost, self.issue_s)
            keys, cost = keys[pays], cost[pays]
            keys = keys[: admitted(cost, float(view.cost(self.asked).sum()), view.window(point))]
        self.asked = np.concatenate([self.asked, keys])
        self.fresh[keys], self.ahead[keys] = True, step.phase == DECODE
        return keys

    def _observe_issue(self, view: Any) -> None:
        """What starting one read costs the host at the least: the time that this layer's own reads took to start."""
        since, missing = self.demanded
        if started := int(view.in_flight(missing).sum()):
            self.issue_s = min(self.issue_s, (view.now - since) / started)

    @hookimpl
    def evict(self, tier: str, need: int, candidates: np.ndarray, view: Any) -> np.ndarray:
        """The worst by the chosen law. What was read ahead for a layer to come leaves last, and never for another."""
        safe = self.fresh[candidates] & (tier == view.tiers[0])
        if view.reading_ahead:
            candidates, safe = candidates[~safe], safe[~safe]
        victims = self.replacement.worst(candidates, need, safe)
        if tier == view.tiers[0]:
            self.counted["left_unused"] += int(self.ahead[victims].sum())
            self.ahead[victims] = self.fresh[victims] = False
        return victims

    @hookimpl
    def demote(self, keys: list[int], view: Any) -> np.ndarray | None:
        """Copy down what is worth more than the least that the host alone holds; the other laws copy all.

        While copies that the device holds too leave room for these and for as many reads, all are copied.
        """
        if self.config.replace != "activation":
            return None
        held = np.flatnonzero(view.resident(np.arange(len(self.layer_of)), "host"))
        alone = held[~view.resident(held)]
        if view.slots("host") - len(alone) >= 2 * len(keys) or not len(alone):
            return None
        return self.replacement.score(np.asarray(keys)) > self.replacement.score(alone).min()

    @hookimpl
    def end_step(self, step: Step, record: Any) -> None:
        """Count the reads ahead that were really started."""
        if step.phase == DECODE:
            self.counted["prefetched"] += record.prefetch_reads - record.cancelled

    @hookimpl
    def report(self) -> dict[str, float]:
        """Counts of decode steps, warm-up included: what was read ahead, used in time or late, and what was missed."""
        counted = dict(self.counted)
        used = counted["hits"] + counted["late"]
        if counted["prefetched"]:
            counted["precision"] = round(used / counted["prefetched"], 6)
        if used + counted["missed"]:
            counted["coverage"] = round(used / (used + counted["missed"]), 6)
        return counted


@hookimpl
def register_systems(register):
    """Register moe_infinity."""
    register(
        SystemSpec(
            id="moe_infinity",
            title="MoE-Infinity",
            summary="activation matrices of earlier requests say what to read ahead and what to keep",
            make=MoeInfinity,
            paper=PAPER,
            config=MoeInfinityConfig,
            fidelity=lambda config: "advisory" if config.prefetch else "exact",
            reads_ahead=True,
            needs=("a collection of activation matrices, prepared or of a synthetic trace's own model",),
            equip=equip,
            published=PUBLISHED,
            prepare=PREPARATION,
        )
    )
