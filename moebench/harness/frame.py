"""What a session is built from, and what follows from it before anything is opened. Opens and books nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moebench.geometry import Geometry
from moebench.harness.memory import require_tiers, size
from moebench.harness.plan import Cell
from moebench.harness.relocation import require_movable
from moebench.systemspec import Equipment, Handling

ACTIVATION_BYTES = 2  # bf16


@dataclass(frozen=True, eq=False)
class Frame:
    """A cell with its model and what its system brings. ``geometry`` has the top-k that runs; ``pack`` is None on runs
    that move no bytes; ``batch`` sequences run together, the longest of ``context`` tokens, after a prompt of
    ``longest_prompt`` at most.
    """

    cell: Cell
    geometry: Geometry
    pack: Any
    equipment: Equipment
    batch: int
    context: int
    longest_prompt: int

    def __post_init__(self) -> None:
        require_tiers(self.cell.spec.id, self.handling, self.two_tiers, self.cell.config.codec)
        if self.handling.relocation_bytes:
            require_movable(self.cell.config)

    @property
    def handling(self) -> Handling:
        """How the loop moves experts for this configuration."""
        return self.cell.spec.handling(self.cell.config.knobs)

    @property
    def two_tiers(self) -> bool:
        """A CPU box has one memory: it has two tiers only where the run splits it."""
        cell, config = self.cell, self.cell.config
        split = config.device != "cpu" or config.device_budget != "auto"
        return split or not (cell.profile.unified or cell.clock == "wall")

    @property
    def state_bytes(self) -> int:
        """What KV cache and recurrent state grow to."""
        return self.batch * (self.context * self.geometry.kv_bytes_per_token + self.geometry.fixed_state_bytes)

    @property
    def activation_bytes(self) -> int:
        """Largest transient of a pass: hidden states, routed outputs and gate/up products of a chunk, and one row of
        logits each.
        """
        if not self.longest_prompt:
            return 0
        geometry = self.geometry
        rows = min(self.cell.config.chunk, self.longest_prompt) * self.batch
        per_row = geometry.hidden * (4 + geometry.top_k) + 2 * geometry.intermediate * geometry.top_k
        return rows * per_row * ACTIVATION_BYTES + self.batch * geometry.vocabulary * 4


def require_budget(cell: Cell, geometry: Geometry, equipment: Equipment) -> None:
    """Raise, before anything is packed, what a session would raise of a budget however little its engine stages."""
    frame = Frame(cell, replace(geometry, top_k=equipment.top_k or geometry.top_k), None, equipment, 1, 0, 0)
    config = cell.config
    size(
        frame.geometry, geometry.slot_bytes, cell.spec, config.budget, config.scope, cell.profile, 0, 0,
        1 + frame.two_tiers, config.device_budget, frame.handling,
    )  # fmt: skip
