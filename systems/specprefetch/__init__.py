"""SpecPrefetch: small adapters say what the next layer will ask for, and as much as the window holds is read ahead.

Predictions are advice: the router's own choice is always executed. ``predictor.py`` predicts, ``budget.py`` chooses,
``counts.py`` counts what became of it, ``equipment.py`` finds the adapters. See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.residency.policies import make_policy
from moebench.step import PREFILL, Routing, Step
from moebench.systems.specprefetch.budget import chosen, fitting, of_batch, ranking, reversed_scores
from moebench.systems.specprefetch.counts import Counts
from moebench.systems.specprefetch.equipment import PUBLISHED, Content, channel_name, equip
from moebench.systems.specprefetch.prepare import PREPARATION
from moebench.systemspec import RunContext, SystemSpec

PAPER = "arXiv 2607.24787, SpecPrefetch"
READING = ("naive_prev_token", "gate_replay", "adapter", "oracle", "adversarial")
COMPUTING = ("pred0", "gate_replay", "adapter", "adversarial")
ADAPTED = ("pred0", "adapter", "adversarial")
USED_BY = {  # an option has an effect in these modes only
    "m": READING,
    "window": READING,
    "filter": READING,
    "cancel": READING,
    "horizon": (*READING, "pred0"),
    "score": ("naive_prev_token", *COMPUTING),
    "readback": COMPUTING,
    "artefact": COMPUTING,
    "adapters": ADAPTED,
    "base": ADAPTED,
    "rank": ADAPTED,
}


@dataclass(frozen=True)
class SpecPrefetchConfig:
    """Options of specprefetch."""

    mode: Literal["off", "pred0", "naive_prev_token", "gate_replay", "adapter", "oracle", "adversarial"] = field(
        default="adapter",
        metadata={
            "help": "what is read ahead: nothing; nothing, though the predictor runs; the previous token's experts;"
            " what the next router says already; what adapters say; what will be asked for; what adapters expect least"
        },
    )
    m: int = field(default=0, metadata={"help": "experts asked for at each layer, at most; 0: K + 2"})
    window: bool = field(
        default=True, metadata={"help": "ask for no more than can be read until the layer comes; false: for m"}
    )
    horizon: int = field(default=1, metadata={"help": "layers ahead that are predicted, 1 or 2"})
    adapters: Literal["pairs", "shared"] = field(
        default="pairs", metadata={"help": "one adapter for each pair of layers, or one for all"}
    )
    base: Literal["next_gate", "none"] = field(
        default="next_gate", metadata={"help": "what an adapter corrects: the next layer's router, or nothing"}
    )
    rank: int = field(default=0, metadata={"help": "inner dimension of the adapters; 0: the artefact's, 32 in replay"})
    score: Literal["mass", "votes"] = field(
        default="mass",
        metadata={"help": "how rows of a batch are joined: summed probability, or the number that want an expert"},
    )
    filter: bool = field(
        default=True, metadata={"help": "choose among what is not resident or on its way; false: among all experts"}
    )
    cancel: bool = field(
        default=True, metadata={"help": "take back what has not begun when its layer has come and does not need it"}
    )
    readback: Literal["with_router", "own"] = field(
        default="with_router",
        metadata={"help": "whether the host reads predictions together with the routing, or waits once more for them"},
    )
    artefact: str = field(default="", metadata={"help": "folder of adapters; empty: found by the model's weights"})

    def __post_init__(self) -> None:
        if self.m < 0 or self.rank < 0:
            raise UsageError(f"system.m and system.rank must be 0 or more, got {self.m} and {self.rank}")
        if self.horizon not in (1, 2):
            raise UsageError(f"system.horizon must be 1 or 2, got {self.horizon}")
        defaults = {f.name: f.default for f in fields(self)}
        for name, modes in USED_BY.items():
            if getattr(self, name) != defaults[name] and self.mode not in modes:
                raise UsageError(
                    f"system.{name} has no effect with system.mode={self.mode}; it has with {', '.join(modes)}"
                )


class SpecPrefetch:
    """The hooks of one run: a cache of the least recently used, and what is read ahead into it."""

    def __init__(self, config: SpecPrefetchConfig, run: RunContext) -> None:
        content: Content = run.equipment.content
        geometry, self.config, self.content = run.geometry, config, content
        self.layers, self.experts, self.top_k = geometry.layers, geometry.experts, geometry.top_k
        self.predictor = content.predictor(run)
        self.most = config.m or geometry.top_k + 2  # the paper's throughput peaks there and falls beyond
        self.policy = make_policy(
            "lru", geometry.keys, run.slots, layers=geometry.layers, seed=run.seed,
            pools=geometry.layers if run.scope == "per_layer" else 1,
        )  # fmt: skip
        self.counts = Counts(geometry.slot_bytes)
        self.held = np.zeros(geometry.keys, bool)  # asked for a layer that is still to come
        self._clear()

    def _clear(self) -> None:
        """A pass begins: predictions, requests and the hidden state of the one before are spent."""
        self.rows: dict[tuple[int, int], np.ndarray] = {}  # (layer, lag) -> scores [rows, experts]
        self.scores: dict[tuple[int, int], np.ndarray] = {}  # the same for the batch [experts]
        self.asked: dict[int, np.ndarray] = {}  # layer -> keys asked for, best first
        self.held[:] = False
        self.hidden: Any = None

    @hookimpl
    def begin_request(self) -> None:
        """Nothing of an earlier request is left."""
        self.predictor.reset()

    @hookimpl
    def begin_step(self) -> None:
        """Nothing of an earlier pass is left."""
        self._clear()

    @hookimpl
    def route(self, step: Step, layer: int, hidden: Any, native: Routing, view: Any) -> None:
        """Keep the router's choice; compare it with what was said, and predict the layers to come."""
        if step.phase != PREFILL:
            for lag in (1, 2):
                if (layer, lag) in self.scores:
                    self.counts.predicted(lag, ranking(self.scores[layer, lag]), native.experts[step.valid])
        self.predictor.see(step, layer, native)
        if step.phase != PREFILL:
            self.hidden = hidden
            if self.config.readback == "with_router":
                self._predict(step, layer, view)

    def _predict(self, step: Step, layer: int, view: Any) -> None:
        config = self.config
        for lag, rows in self.predictor.scores(step, layer, self.hidden).items():
            target = (layer + lag, lag)
            self.rows[target] = rows
            scores = of_batch(rows, config.score, self.top_k)
            self.scores[target] = reversed_scores(scores) if config.mode == "adversarial" else scores
        if nbytes := self.content.streamed[layer]:
            view.account(nbytes=nbytes, syncs=int(config.readback == "own"))

    @hookimpl
    def prefetch(self, step: Step, point: int | str, view: Any) -> np.ndarray | None:
        """At a layer: the best for the next, as many as fit; with horizon 2 what then still fits for the one after."""
        if not isinstance(point, int) or step.phase == PREFILL:
            return None
        config = self.config
        if config.readback == "own":
            self._predict(step, point, view)
        if config.mode not in READING:
            return None
        wanted: list[np.ndarray] = []
        later = [keys for layer, keys in self.asked.items() if layer > point]
        busy = int(view.in_flight(np.concatenate(later)).sum()) if later else 0
        for lag in range(1, config.horizon + 1):
            target = point + lag
            if (target, lag) in self.scores:
                keys = target * self.experts + np.arange(self.experts)
                most = self.most
                if config.window:
                    holds = fitting(point, lag, keys, view)
                    self.counts.window(lag, holds)
                    most = min(most, holds - busy)  # what was asked for two layers ahead is still to be read
                most -= sum(map(len, wanted))
                there = view.resident(keys) | view.in_flight(keys)
                found = chosen(self.scores[target, lag], keys[0], max(0, most), there, config.filter)
                self.asked[target] = np.concatenate([self.asked.get(target, found[:0]), found])
                self.held[found] = True
                wanted.append(found)
        return np.concatenate(wanted) if wanted else None

    @hookimpl
    def acquired(self, step: Step, layer: int, keys: list[int], ready: list[bool], view: Any) -> None:
        """A demand: what was asked for this layer is ordinary cache from now on."""
        self.held[layer * self.experts : (layer + 1) * self.experts] = False
        self.policy.access(keys, ready)
        if step.phase != PREFILL and layer:
            complete = np.asarray(ready, bool)
            ahead = np.isin(keys, self.asked.get(layer, []))
            self.counts.demand(complete, ahead, view.in_flight(keys) & ~complete)

    @hookimpl
    def cancel(self, layer: int) -> np.ndarray | None:
        """What was asked for this layer is stale; what it demands is joined and not taken back."""
        return self.asked.get(layer) if self.config.cancel else None

    @hookimpl
    def evict(self, tier: str, need: int, candidates: np.ndarray, view: Any) -> np.ndarray:
        """The least recently used of what no layer to come waits for, then of that; a prefetch takes only the first."""
        held = self.held[candidates]
        free = candidates[~held]
        victims = self.policy.victims(free, min(need, len(free)))
        if len(victims) == need or (view.reading_ahead and tier == view.tiers[0]):
            return victims
        return np.concatenate([victims, self.policy.victims(candidates[held], need - len(victims))])

    @hookimpl
    def end_step(self, step: Step, record: Any) -> None:
        """Count what was issued and taken back."""
        self.counts.step(record.prefetch_reads, record.cancelled)

    @hookimpl
    def predicted(self, step: Step) -> dict[str, np.ndarray]:
        """For a recorder: all experts in the order predicted for each row, by channel of each lag."""
        said = {}
        for lag in range(1, self.config.horizon + 1) if self.content.channel else ():
            name = channel_name(self.content.channel, lag)
            said[name] = np.full((step.rows, self.layers, self.experts), -1, np.int16)
            for layer in range(lag, self.layers):
                if (layer, lag) in self.rows:
                    said[name][step.valid, layer] = np.argsort(-self.rows[layer, lag], axis=1, kind="stable")
        return said

    @hookimpl
    def report(self) -> dict[str, float]:
        """Counts of the whole run's decode passes, warm-up included."""
        return self.counts.report()


@hookimpl
def register_systems(register):
    """Register specprefetch."""
    register(
        SystemSpec(
            id="specprefetch",
            title="SpecPrefetch",
            summary="adapters predict the next layer's experts; what fits is read ahead, routing stays native",
            make=SpecPrefetch,
            paper=PAPER,
            config=SpecPrefetchConfig,
            fidelity=lambda config: "exact" if config.mode == "off" else "advisory",
            reads_ahead=True,
            needs=("adapters (live), a predicted channel or a surrogate (replay)",),
            equip=equip,
            foresight=lambda config: config.mode == "oracle",
            published=PUBLISHED,
            prepare=PREPARATION,
        )
    )
