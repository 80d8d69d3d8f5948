"""Edge0: a trained prerouter chooses the next token's experts, and that choice is the routing.

Heads of ``predictor.py`` predict, ``staging.py`` books what they chose, recovery adapters (served by the backend)
repair what the replaced routing costs. ``equipment.py`` finds the trained files. See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.residency.policies import make_policy
from moebench.step import ABSENT, DECODE, Routing, Step
from moebench.systems.edge0.equipment import PUBLISHED, Content, equip
from moebench.systems.edge0.ladder import ladder
from moebench.systems.edge0.prepare import PREPARATION
from moebench.systems.edge0.staging import Staging, capacity
from moebench.systemspec import RunContext, SystemSpec

PAPER = "arXiv 2609.18063, The Other Half of the Memory Wall: Serving 35B MoEs from SSD with Trained Routing Prediction"

FILL = "overlap"


@dataclass(frozen=True)
class Edge0Config:
    """Options of edge0."""

    k: int = field(
        default=0,
        metadata={"help": "experts per token; 0 takes the paper's for this model, else half of the model's own"},
    )
    prerouter: bool = field(
        default=True, metadata={"help": "predictions are the routing; false: the model's router, LRU"}
    )
    fill: Literal["staged_sync", "overlap", "eager"] = field(
        default=FILL,
        metadata={"help": "when a set is filled: one by one after the step, all at once after it, or after each head"},
    )
    first_token: Literal["auto", "gate", "heads"] = field(
        default="auto", metadata={"help": "what routes the first decoded token; auto as the heads were trained"}
    )
    lora: bool = field(default=True, metadata={"help": "serve the recovery adapters"})
    artefact: str = field(default="", metadata={"help": "folder of trained files; empty: found by the model's weights"})

    def __post_init__(self) -> None:
        if self.k < 0:
            raise UsageError(f"system.k must be 0 or more, got {self.k}")
        if not self.prerouter and (self.fill, self.first_token) != (FILL, "auto"):
            raise UsageError("system.fill and system.first_token have an effect with system.prerouter=true only")
        if not self.prerouter and not self.lora and self.artefact:
            raise UsageError("system.artefact has no effect with both system.prerouter and system.lora off")


class Edge0:
    """The hooks of one run."""

    def __init__(self, config: Edge0Config, run: RunContext) -> None:
        content: Content = run.equipment.content
        geometry, self.fill, self.k = run.geometry, config.fill, run.geometry.top_k
        self.ops, self.law, self.head_bytes = run.ops, content.law, content.head_bytes
        self.plan = content.plan if config.prerouter else None
        self.consumers = set(self.plan.consumers) if self.plan else set()
        self.owners = list(self.plan.owners) if self.plan else []
        self.consumers_of = {owner: owner + 1 for owner in self.owners}
        self.predictor = content.predictor(run.ops) if self.plan else None
        room = 0
        if self.plan:
            shape = (run.slots, run.scope, geometry.layers, geometry.experts, len(self.consumers), self.k, run.batch)
            room = capacity(*shape, ahead=int(self.fill == "eager"), slot_bytes=geometry.slot_bytes)
        policy = make_policy(
            "lru", geometry.keys, run.slots, layers=geometry.layers, seed=run.seed,
            pools=geometry.layers if run.scope == "per_layer" else 1,
        )  # fmt: skip
        self.staging = Staging(geometry.layers, geometry.experts, sorted(self.consumers), room, policy)
        self.predicted = self.native_layers = self.shared = self.compared = 0

    @hookimpl
    def begin_request(self, sequences: np.ndarray) -> None:
        """Nothing of an earlier request is left: features, predictions, bookings."""
        self.staging.reset()
        if self.predictor:
            self.predictor.reset(sequences)

    @hookimpl
    def begin_step(self, step: Step) -> None:
        """Predictions and sets made for this step are in force."""
        self.staging.advance()
        if self.predictor:
            self.predictor.begin(step)

    @hookimpl
    def route(self, step: Step, layer: int, hidden: Any, native: Routing) -> Routing | None:
        """The prediction where there is one, else the router's best k; owners remember what they saw."""
        routing = self.predictor.routing(layer, step) if layer in self.consumers else None
        if routing is None:
            routing = self._narrowed(native)
            self.native_layers += step.phase == DECODE
        else:
            self.predicted += 1
            self._compare(step, routing, native)
        if layer in self.consumers_of:
            self.predictor.observe(layer, step, hidden, np.asarray(routing.experts))
        return routing

    def _narrowed(self, native: Routing) -> Routing:
        """The best k of the router's choice, their weights summing to what all of them did."""
        if native.experts.shape[1] == self.k:
            return native
        if native.weights is None:
            return Routing(native.experts[:, : self.k], None)
        weights = self.ops.numpy(native.weights) if self.ops else np.asarray(native.weights, np.float32)
        best = np.argsort(-weights, axis=1, kind="stable")  # some routers leave their choice unsorted
        experts, weights = (np.take_along_axis(a, best, 1) for a in (native.experts, weights))
        return Routing(experts[:, : self.k], self.law.narrow(weights, self.k) if self.law else None)

    def _compare(self, step: Step, routing: Routing, native: Routing) -> None:
        own = self._narrowed(native).experts[step.valid]
        self.shared += int((routing.experts[step.valid][:, :, None] == own[:, None, :]).sum())
        self.compared += own.size

    @hookimpl
    def prefetch(self, step: Step, point: int | str, view: Any) -> list[int] | None:
        """Run the heads when they may run, book what they chose, and ask for what is not under way yet."""
        if not self.plan or self.fill == "staged_sync":
            return None
        # a prompt's waves take every slot there is, so its sets are booked when it has been read
        if self.fill == "eager" and step.phase == DECODE:
            if point in self.consumers_of:
                self._evaluate([int(point)], step, view)
        elif point == "end":
            self._evaluate(self.owners, step, view)
        return self.staging.waiting(view)

    @hookimpl
    def stage(self, step: Step, view: Any) -> list[int] | None:
        """With fill=staged_sync everything happens here: heads, then each layer's newcomers one after another."""
        if not self.plan or self.fill != "staged_sync":
            return None
        self._evaluate(self.owners, step, view)
        return self.staging.waiting(view)

    def _evaluate(self, layers: list[int], step: Step, view: Any) -> None:
        chosen = self.predictor.evaluate(layers, step)
        if chosen:  # heads read their weights once, and the host reads the choices once
            view.account(nbytes=self.head_bytes * len(chosen), syncs=1)
        experts = self.staging.experts
        for layer, ids in chosen.items():
            wanted = sorted(set(ids.ravel().tolist()) - {ABSENT})
            if wanted:
                self.staging.book(layer, [layer * experts + expert for expert in wanted])

    @hookimpl
    def acquired(self, step: Step, layer: int, keys: list[int], ready: list[bool]) -> None:
        """A demand: all of it must be staged where the layer owns a set."""
        if layer in self.consumers:
            self.staging.use(layer, keys)
        self.staging.policy.access(keys, ready)

    @hookimpl
    def evict(self, tier: str, need: int, candidates: np.ndarray, view: Any) -> np.ndarray:
        """The least recently used; of the fastest tier only what is not booked."""
        if tier != view.tiers[0]:
            return self.staging.policy.victims(candidates, need)
        return self.staging.victims(candidates, need)

    @hookimpl
    def report(self) -> dict[str, float]:
        """Counts of the whole run, warm-up included."""
        if not self.plan:
            return {}
        staging = self.staging
        return {
            "predicted_layers": self.predicted,
            "router_layers": self.native_layers,
            "dropped": staging.routed - staging.found,  # a drop raises as well
            "sets_staged": staging.sets_staged,
            "sets_refused": staging.sets_refused,
            "newcomers": staging.newcomers,
            "members": staging.members,
            "overlap": round(self.shared / self.compared, 6) if self.compared else 0.0,
        }


@hookimpl
def register_systems(register):
    """Register edge0."""
    register(
        SystemSpec(
            id="edge0",
            title="Edge0",
            summary="predictions of trained heads are the routing; their experts are staged a token ahead",
            make=Edge0,
            paper=PAPER,
            config=Edge0Config,
            fidelity=lambda config: "altered",
            reads_ahead=True,
            needs=("trained heads and adapters (live), a predicted channel or a surrogate (replay)",),
            equip=equip,
            published=PUBLISHED,
            prepare=PREPARATION,
            ladder=ladder,
        )
    )
