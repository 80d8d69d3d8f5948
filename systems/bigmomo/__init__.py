"""BigMoMo: the verification window of speculative decoding as one I/O window.

``admission.py`` says what of a window is worth moving, ``reading.py`` how it is read, ``anchor.py`` who should stand
beside whom on flash, ``schedule.py`` what is computed next, ``acceptance.py`` how deep drafts hold. See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from moebench.draft import Draft, lookup
from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.residency.policies import make_policy
from moebench.step import VERIFY, Routing, Step
from moebench.systems.bigmomo.admission import kept_nodes, node_values, pruned_experts
from moebench.systems.bigmomo.anchor import Rounds, best_swap, slots_of
from moebench.systems.bigmomo.counts import Counts
from moebench.systems.bigmomo.equipment import PUBLISHED, Content, equip, ladder
from moebench.systems.bigmomo.prepare import PREPARATION
from moebench.systems.bigmomo.reading import NEVER, Reader
from moebench.systems.bigmomo.schedule import Schedule
from moebench.systemspec import Handling, RunContext, SystemSpec
from moebench.units import MIB

PAPER = "arXiv 2609.14643, BigMoMo"
GAPS = ("auto", "none")
LAYERS_A_STEP = 8  # layers whose places are looked at after a step, until one has a swap: looking takes time


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


MOST_NODES = 512  # of a draft: its whole tree is a window of that many rows


def _nodes(depth: int, branching: int) -> int:
    """Nodes of a full tree, counted no further than the limit."""
    total, level = 0, 1
    for _ in range(depth):
        level *= branching
        total += level
        if total > MOST_NODES:
            break
    return total


@dataclass(frozen=True)
class BigMoMoConfig:
    """Options of bigmomo."""

    draft: str = _option(
        "auto", "who drafts: auto (tinymoe's own draft, else lookup), lookup, the folder of a dense model, or none"
    )
    depth: int = _option(2, "levels of a draft")
    branching: int = _option(
        0, "continuations of each node; 0: 2, or 1 where layers carry state and verify chains only"
    )
    acceptance: float = _option(
        0.0, "in a replay: chance that the first guess at a level is right; 0: as published for a phone"
    )
    artefact: str = _option("", "folder of counted acceptance; empty: found by the weights of model and draft")
    rho: float = _option(0.9, "share of a draft's value whose nodes are verified; 1: all nodes")
    tau: float = _option(0.0, "share of a window's routing impact whose experts are dropped: alters answers; 0: none")
    reads: Literal["window", "one"] = _option(
        "window", "a window's missing experts are read together, or one after the other as a demand loader does"
    )
    gap: str = _option(
        "auto", "unwanted experts that one request may read along: auto (by the read curve), a number, or none: no runs"
    )
    request_mib: float = _option(64.0, "size of one request at most; a single expert may be larger")
    reorganise: bool = _option(
        True, "experts that are read together move next to each other on storage, where requests are joined"
    )
    history: int = _option(64, "windows of a layer by which a move is judged")
    relocation_mib: float = _option(1024.0, "bytes that moves may write in a run")
    schedule: Literal["stages", "arrival", "wait_all"] = _option(
        "stages", "experts are computed in groups across stages, each as it arrives, or when all are there"
    )

    def __post_init__(self) -> None:
        if self.branching >= 0 and self.depth >= 1 and _nodes(self.depth, self.branching or 2) > MOST_NODES:
            raise UsageError(
                f"system.depth={self.depth} with branching {self.branching or 2} drafts more than {MOST_NODES} nodes; "
                "lower one of them"
            )
        if self.depth < 1 or self.branching < 0:
            raise UsageError(f"system.depth starts at 1, branching at 0, got {self.depth} and {self.branching}")
        for name, low, high in (("acceptance", 0, 1), ("tau", 0, 1)):
            if not low <= getattr(self, name) < high:
                raise UsageError(
                    f"system.{name} must be at least {low} and less than {high}, got {getattr(self, name)}"
                )
        if not 0 < self.rho <= 1:
            raise UsageError(f"system.rho must be more than 0 and at most 1, got {self.rho}")
        if self.history < 1:
            raise UsageError(f"system.history must be at least 1, got {self.history}")
        for name in ("request_mib", "relocation_mib"):
            if not getattr(self, name) > 0:
                raise UsageError(f"system.{name} must be more than 0, got {getattr(self, name)}")
        if self.gap not in GAPS and not self.gap.isdecimal():
            raise UsageError(f"system.gap={self.gap} is not one of {', '.join(GAPS)}, or a number of experts from 0 up")
        if self.draft == "none":
            for name in ("depth", "branching", "acceptance", "artefact", "rho", "tau"):
                self._idle(name, "a draft")
        if self.reads == "one":
            for name in ("gap", "request_mib"):
                self._idle(name, "system.reads=window")
        if self.gap == "none":
            self._idle("request_mib", "a system.gap that joins requests")
        if not self.moves:
            for name in ("history", "relocation_mib"):
                self._idle(name, "system.reorganise where requests are joined")
        if self.rho == 1 and not self.tau:
            self._idle("artefact", "system.rho below 1 or a system.tau")

    @property
    def moves(self) -> bool:
        """Whether experts change places."""
        return self.reorganise and self.reads == "window" and self.gap != "none"

    def _idle(self, name: str, where: str) -> None:
        """Refuse an option that was set and changes nothing."""
        default = next(f.default for f in fields(self) if f.name == name)
        if getattr(self, name) != default:
            raise UsageError(f"system.{name} has an effect with {where} only")


def handling(config: BigMoMoConfig) -> Handling:
    """How the loop moves experts."""
    return Handling(
        pool=1 if config.reads == "one" else 0,
        relocation_bytes=int(config.relocation_mib * MIB) if config.moves else 0,
    )


class BigMoMo:
    """The hooks of one run; those of mechanisms that are off are no functions, so that they are never called."""

    def __init__(self, config: BigMoMoConfig, run: RunContext) -> None:
        geometry = run.geometry
        self.config, self.ops, self.experts, self.drafter = config, run.ops, geometry.experts, run.drafter
        self.content: Content | None = run.equipment.content
        self.policy = make_policy(
            "lru", geometry.keys, run.slots, geometry.layers, pools=geometry.layers if run.scope == "per_layer" else 1
        )
        self.schedule = Schedule(config.schedule, geometry.experts)
        self.reader = _reader(config, run)
        self.counts = Counts(self.content.depth if self.content else 0)
        self.values = np.zeros(0)  # of the rows of the window under way
        if self.content is None:
            self.draft = None
        if self.content is None or config.rho == 1:
            self.prune = None
        if config.reads == "one":
            self.plan_reads = None
        self.rounds = Rounds(geometry.layers, geometry.experts, config.history)
        self.looked_at = 0  # layer whose places were looked at last
        if not config.moves or self.reader.gap == NEVER:
            self.relayout = None

    @hookimpl
    def draft(self, sequence: int, tokens: np.ndarray, view: Any) -> Draft:
        """Guess ``depth`` levels; each is one pass of the draft model, whose result the host waits for."""
        content = self.content
        if self.drafter is None:
            return lookup(tokens, content.depth, content.branching)
        view.account(nbytes=content.depth * self.drafter.bytes_per_level, syncs=content.depth)
        return self.drafter.propose(tokens, content.depth, content.branching)

    @hookimpl
    def prune(self, draft: Draft) -> np.ndarray:
        """Keep the smallest set of nodes that holds ``rho`` of the value."""
        self.counts.drafted(len(draft))
        return kept_nodes(node_values(draft, self.content.by_depth), self.config.rho)

    @hookimpl
    def begin_step(self, step: Step, view: Any) -> None:
        """A window's rows get the values of their nodes; the last accepted token has 1."""
        self.counts.begin(step)
        if step.phase != VERIFY:
            return
        if self.content.assumed_bytes:  # a replay drafts nothing: what its draft model would have streamed is told here
            passes = self.content.depth * sum(len(draft) > 0 for draft in step.drafts)
            view.account(nbytes=passes * self.content.assumed_bytes, syncs=passes)
        if self.config.tau:
            self.values = np.ones(step.rows)
            for draft, rows in zip(step.drafts, step.node_rows(), strict=True):
                self.values[rows] = node_values(draft, self.content.by_depth)

    @hookimpl
    def route(self, step: Step, layer: int, native: Routing, view: Any) -> Routing | None:
        """The router's choice or, in a window under ``tau``, what of it is worth its movement."""
        routing = self._pruned(step, layer, native, view) if self.config.tau and step.phase == VERIFY else None
        self.schedule.window((routing or native).experts[step.valid])
        return routing

    def _pruned(self, step: Step, layer: int, native: Routing, view: Any) -> Routing:
        valid = step.valid
        weights = self.ops.numpy(native.weights) if self.ops else np.asarray(native.weights, np.float32)
        experts, weights = np.array(native.experts, np.int64), np.array(weights)
        cost_s = view.cost(layer * self.experts + np.unique(experts[valid]))
        found = pruned_experts(experts[valid], weights[valid], self.values[valid], cost_s, self.config.tau)
        self.counts.dropped(len(found.dropped), found.impact)
        experts[valid], weights[valid] = found.experts, found.weights
        return Routing(experts, weights)

    @hookimpl
    def acquired(self, keys: list[int], ready: list[bool]) -> None:
        """A window's demand is one event."""
        self.counts.demand(keys)
        self.policy.access(keys, ready)

    @hookimpl
    def evict(self, need: int, candidates: np.ndarray) -> np.ndarray:
        """The least recently used."""
        return self.policy.victims(candidates, need)

    @hookimpl
    def plan_reads(self, keys: list[int], view: Any) -> list[tuple[int, ...]]:
        """A window's missing experts in order of their place, neighbours in one request."""
        wanted = np.asarray(keys, np.int64)
        runs, between = self.reader.plan(wanted, view.position(wanted))
        self.counts.read(len(keys), len(runs), between)
        if self.relayout is not None and self.counts.counting:
            self.rounds.add(keys[0] // self.experts, wanted % self.experts)
        return runs

    @hookimpl
    def relayout(self, view: Any) -> tuple[int, int] | None:
        """The best swap of the next layer that has one, of a few layers."""
        for _ in range(min(LAYERS_A_STEP, view.geometry.layers)):
            self.looked_at = (self.looked_at + 1) % view.geometry.layers
            first = self.looked_at * self.experts
            keys = first + np.arange(self.experts)
            there = np.logical_or.reduce([view.resident(keys, tier) for tier in view.tiers])
            swap = best_swap(self.rounds.of(self.looked_at), slots_of(view.position(keys)), there)
            if swap is not None:
                return first + swap.needed, first + swap.idle
        return None

    @hookimpl
    def order_compute(self, ready: list[int], pending: list[int], view: Any) -> list[int]:
        """The next group."""
        return self.schedule.next(ready, pending, view)

    @hookimpl
    def end_step(self, step: Step) -> None:
        """Count what the window brought."""
        self.counts.end(step)

    @hookimpl
    def report(self) -> dict[str, float]:
        """Counts of the run's passes after the prompts, and the schedule's of all."""
        return {**self.counts.report(), **self.schedule.counted}


def _reader(config: BigMoMoConfig, run: RunContext) -> Reader:
    """How reads are joined where one request can read several experts; elsewhere not at all."""
    if run.request_s is None:
        if config.gap.isdecimal():
            raise UsageError(
                f"system.gap={config.gap}: no request reads several experts here; it takes layout=packed or ordered, "
                "and engine=direct, uring or pread"
            )
        return Reader(NEVER, 1)
    slot_bytes = run.geometry.slot_bytes
    most = max(1, min(run.geometry.keys, int(config.request_mib * MIB) // slot_bytes))
    if config.gap == "auto":
        return Reader(None, most, lambda count, depth: run.request_s(count * slot_bytes, depth))
    return Reader(NEVER if config.gap == "none" else int(config.gap), most)


@hookimpl
def register_systems(register):
    """Register bigmomo."""
    register(
        SystemSpec(
            id="bigmomo",
            title="BigMoMo",
            summary="speculates; a verification window is one I/O window: pruned, read together, re-organised",
            make=BigMoMo,
            paper=PAPER,
            config=BigMoMoConfig,
            fidelity=lambda config: "altered" if config.tau else "exact",
            timing_dependent=True,
            needs=("counted acceptance by depth (live, with rho below 1 or tau)",),
            scope="per_layer",
            handling=handling,
            equip=equip,
            published=PUBLISHED,
            prepare=PREPARATION,
            ladder=ladder,
        )
    )
