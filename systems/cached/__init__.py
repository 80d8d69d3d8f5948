"""The classic caches as systems: lru, lfu, decayed_lfu, slru, random, and Belady's optimum as the oracle.

Each is a policy of ``moebench.residency.policies`` wrapped by two hooks; the cache replay runs the very same objects.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.residency.policies import make_policy
from moebench.systemspec import NoKnobs, RunContext, SystemSpec


@dataclass(frozen=True)
class DecayedLfuConfig:
    """Options of decayed_lfu."""

    half_life: float = field(default=16.0, metadata={"help": "steps after which an access counts half"})

    def __post_init__(self) -> None:
        if not 0.01 <= self.half_life <= 1e9:
            raise UsageError(f"system.half_life must lie between 0.01 and 1e9 steps, got {self.half_life}")


@dataclass(frozen=True)
class SlruConfig:
    """Options of slru."""

    protected: float = field(default=0.8, metadata={"help": "share of the slots that only experts with a hit may hold"})

    def __post_init__(self) -> None:
        if not 0.0 < self.protected < 1.0:
            raise UsageError(f"system.protected must lie between 0 and 1, got {self.protected}")


class Cached:
    """Keeps what a policy keeps; every miss is admitted."""

    def __init__(self, policy: str, config: object, run: RunContext) -> None:
        geometry = run.geometry
        options = asdict(config)
        if run.future is not None:
            options["future"] = [np.asarray(keys, np.int64) for _, keys in run.future]
        pools = geometry.layers if run.scope == "per_layer" else 1
        self.policy = make_policy(
            policy, geometry.keys, run.slots, layers=geometry.layers, seed=run.seed, pools=pools, **options
        )

    @hookimpl
    def acquired(self, keys, ready):
        """The policy sees every demand, hit or miss."""
        self.policy.access(keys, ready)

    @hookimpl
    def evict(self, need, candidates):
        """The policy's worst candidates leave."""
        return self.policy.victims(candidates, need)


SYSTEMS = {
    "lru": ("Least recently used", NoKnobs, "evicts the expert that was used longest ago"),
    "lfu": ("Least frequently used", NoKnobs, "evicts the expert that was used least often in this run"),
    "decayed_lfu": ("Decayed LFU", DecayedLfuConfig, "evicts by use counts that halve every half_life steps"),
    "slru": ("Segmented LRU", SlruConfig, "LRU with a protected segment for experts that were hit again"),
    "random": ("Random", NoKnobs, "evicts any expert, drawn from the seed"),
    "belady": ("Belady's optimum", NoKnobs, "evicts the expert whose next use is farthest: knows the future"),
}


@hookimpl
def register_systems(register):
    """Register one system per policy."""
    for name, (title, config, summary) in SYSTEMS.items():
        register(
            SystemSpec(
                id=name,
                title=title,
                summary=summary,
                config=config,
                make=lambda knobs, run, policy=name: Cached(policy, knobs, run),
                oracle=name == "belady",
                baseline=name in ("lru", "decayed_lfu", "slru"),
            )
        )
