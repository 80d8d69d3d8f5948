"""MySystem, a system for moebench: an LRU cache that knows in which order layers come. See README.md."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moebench.errors import UsageError
from moebench.hookspecs import hookimpl
from moebench.systemspec import RunContext, SystemSpec


@dataclass(frozen=True)
class Options:
    """Options of mysystem; on the command line system.NAME=VALUE."""

    order: float = field(
        default=2.0, metadata={"help": "what one layer of distance weighs against one layer of age; 0 is plain LRU"}
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.order <= 1000.0:
            raise UsageError(f"system.order must lie between 0 and 1000, got {self.order}")


class Cache:
    """One run of the system: built anew for each run, so that nothing of an earlier one is left.

    Hooks may leave out arguments that they do not need. Keys are flat: key = layer * experts + expert.
    """

    def __init__(self, config: Options, run: RunContext) -> None:
        geometry = run.geometry
        self.order, self.layers = config.order, geometry.layers
        self.layer_of = np.arange(geometry.keys) // geometry.experts
        self.last_use = np.zeros(geometry.keys, np.int64)  # in layers run so far
        self.clock = 0
        self.layer = 0

    @hookimpl
    def acquired(self, layer, keys):
        """A layer demands ``keys``: note when each was used last."""
        self.clock += 1
        self.layer = layer
        self.last_use[keys] = self.clock

    @hookimpl
    def evict(self, need, candidates):
        """The worst ``need`` of the candidates: long unused, and of a layer that is far ahead."""
        age = self.clock - self.last_use[candidates]
        ahead = (self.layer_of[candidates] - self.layer - 1) % self.layers  # layers until its own comes again
        return candidates[np.argsort(-(age + self.order * ahead), kind="stable")[:need]]


@hookimpl
def register_systems(register):
    """Tell moebench of the system."""
    register(
        SystemSpec(
            id="mysystem",
            title="MySystem",
            summary="evicts what was used long ago and belongs to a layer that is far ahead",
            make=Cache,
            config=Options,
        )
    )
