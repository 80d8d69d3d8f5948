"""A small expert source and packs of it, shared by the store tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SHAPES = {
    "down_proj": (96, 64),
    "gate_up_proj": (96, 128),
    "gate_up_proj_bias": (13,),
}  # 13: leaves a gap before the next part


class SmallSource:
    """3 layers of 4 experts with Gaussian weights; ``fail_at`` raises once that many experts were asked for."""

    layers, experts = 3, 4

    def __init__(self, seed: int = 0, fail_at: int | None = None) -> None:
        self.model = {"name": "small", "weights_hash": f"seed-{seed}", "config": {"hidden": 64}}
        self.seed, self.fail_at, self.asked = seed, fail_at, []

    def expert(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        if self.fail_at is not None and len(self.asked) >= self.fail_at:
            raise KeyboardInterrupt
        self.asked.append((layer, expert))
        rng = np.random.default_rng([self.seed, layer, expert])
        names = ("gate_up_proj", "gate_up_proj_bias", "down_proj")
        return {name: rng.standard_normal(SHAPES[name], np.float32) for name in names}

    def write_dense(self, path: Path) -> int:
        path.write_bytes(b"dense" * 1000)
        return 5000
