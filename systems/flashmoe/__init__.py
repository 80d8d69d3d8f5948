"""FlashMoE (KAIST): slots per layer, and a tiny net that imitates Belady's optimum chooses who leaves them.

``policy.py`` ranks by what the nets of ``nets.py`` say; ``labels.py`` and ``training.py`` fit them. The choice is made
late, while the read that needs the slot is under way. See README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.residency.policies import Policy, make_policy
from moebench.step import Step
from moebench.systems.flashmoe.equipment import equip
from moebench.systems.flashmoe.policy import Learned
from moebench.systemspec import Handling, RunContext, SystemSpec

PAPER = "arXiv 2601.17063, FlashMoE: Reducing SSD I/O Bottlenecks via ML-Based Cache Replacement for Mixture-of-Experts"
REFETCH_STEPS = 5


@dataclass(frozen=True)
class FlashMoeConfig:
    """Options of flashmoe."""

    net: Literal["auto", "joint", "shared", "none"] = field(
        default="auto",
        metadata={
            "help": "joint: sees all of a layer at once; shared: one expert; none: LRU; auto: what hit more when fitted"
        },
    )
    late: bool = field(
        default=True, metadata={"help": "choose victims while the reads are under way; false: before them"}
    )
    artefact: str = field(default="", metadata={"help": "folder of fitted nets; empty: found by the model"})

    def __post_init__(self) -> None:
        if self.net == "none" and (self.artefact or not self.late):
            raise UsageError("system.artefact and system.late have an effect with a net only, not with system.net=none")


class FlashMoe:
    """The hooks of one run."""

    def __init__(self, config: FlashMoeConfig, run: RunContext) -> None:
        geometry = run.geometry
        if run.scope != "per_layer":
            raise UsageError("flashmoe gives each layer slots of its own: scope=per_layer or scope=auto")
        shape = (geometry.keys, run.slots, geometry.layers)
        self.nets = run.equipment.content
        self.below = make_policy("lru", *shape, pools=geometry.layers)  # of a host tier, which the paper does not have
        self.policy: Policy = self.below
        if self.nets is not None:
            self.policy = Learned(*shape, seed=run.seed, pools=geometry.layers, nets=self.nets)
        self.step = 0
        self.left = np.full(geometry.keys, -REFETCH_STEPS - 1)  # the step in which a key last left the device
        self.evictions = self.refetched = self.choices = 0
        self.seconds = 0.0

    @hookimpl
    def begin_request(self) -> None:
        """Frequencies are counted within requests; what is resident stays."""
        self.policy.begin_request()

    @hookimpl
    def acquired(self, step: Step, keys: list[int], ready: list[bool]) -> None:
        """A demand: features of its layer move on, and what left too early is noticed."""
        self.step = step.index
        self.policy.access(keys, ready)
        if self.policy is not self.below:
            self.below.access(keys, ready)
        missing = [key for key, hit in zip(keys, ready, strict=True) if not hit]
        if missing:
            self.refetched += int((step.index - self.left[missing] <= REFETCH_STEPS).sum())

    @hookimpl
    def evict(self, tier: str, need: int, candidates: np.ndarray, view: Any) -> np.ndarray:
        """The largest predicted next-use distances leave the device; the least recently used a host tier."""
        if tier != view.tiers[0]:
            return self.below.victims(candidates, need)
        started = view.now
        victims = self.policy.victims(candidates, need)
        if self.nets is not None:  # the layer's net is read once, and the host waits once for what it says
            view.account(nbytes=self.nets.layer_bytes, syncs=1)
        self.seconds += view.now - started
        self.choices += 1
        self.evictions += need
        self.left[victims] = self.step
        return victims

    @hookimpl
    def report(self) -> dict[str, float]:
        """Counts of the whole run, warm-up included; seconds are those of the run's clock."""
        return {
            "evictions": self.evictions,
            "refetched_within_5": self.refetched,
            "choices": self.choices,
            "policy_seconds": round(self.seconds, 9),
        }


@hookimpl
def register_systems(register):
    """Register flashmoe."""
    from moebench.systems.flashmoe.prepare import PREPARATION

    register(
        SystemSpec(
            id="flashmoe",
            title="FlashMoE",
            summary="slots per layer; a tiny net fitted to Belady's choices evicts, while the read is under way",
            make=FlashMoe,
            paper=PAPER,
            config=FlashMoeConfig,
            needs=("fitted eviction nets",),
            scope="per_layer",
            handling=lambda config: Handling(late_eviction=config.late and config.net != "none"),
            equip=equip,
            prepare=PREPARATION,
        )
    )
