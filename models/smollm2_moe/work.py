"""What an interrupted conversion goes on from: a folder with the results of finished stages.

Knows files; knows no stage by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moebench.errors import UsageError
from moebench.models.smollm2_moe.split import LayerReport
from moebench.models.smollm2_moe.student import Shape, SplitFeedForward


class Work:
    """Results of one recipe on weights of one hash; a folder of another is refused."""

    def __init__(self, folder: Path, weights: str, recipe: Mapping[str, Any]) -> None:
        self.folder = folder
        self.key = hashlib.sha256(json.dumps([weights, dict(recipe)], sort_keys=True).encode()).hexdigest()[:16]
        claim = folder / "key"
        if claim.is_file() and claim.read_text() != self.key:
            raise UsageError(f"{folder} holds work of another recipe or other weights; remove it to begin anew")
        claim.write_text(self.key)
        kept = folder / "seconds.json"
        self.seconds: dict[str, float] = json.loads(kept.read_text()) if kept.is_file() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block, also of one that is interrupted, to ``seconds``."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - begun, 1)
            (self.folder / "seconds.json").write_text(json.dumps(self.seconds))

    def arrays(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Named arrays as they were kept, or made now."""
        file = self.folder / f"{name}.npz"
        if not file.is_file():
            with open(part := file.with_suffix(".part"), "wb") as out:
                np.savez(out, allow_pickle=False, **make())
            os.replace(part, file)
        with np.load(file, allow_pickle=False) as opened:
            return dict(opened)

    def layers(
        self, shape: Shape, make: Callable[[], tuple[list[SplitFeedForward], list[LayerReport]]]
    ) -> tuple[list[SplitFeedForward], list[LayerReport]]:
        """Split layers and their reports as they were kept, or made now."""
        file = self.folder / "split.pt"
        if not file.is_file():
            layers, reports = make()
            state = {
                "layers": [layer.state_dict() for layer in layers],
                "reports": [dataclasses.asdict(report) for report in reports],
            }
            torch.save(state, part := file.with_suffix(".part"))
            os.replace(part, file)
        state = torch.load(file, weights_only=True)
        layers = [SplitFeedForward(shape) for _ in state["layers"]]
        for layer, values in zip(layers, state["layers"], strict=True):
            layer.load_state_dict(values)
        return layers, [LayerReport(**report) for report in state["reports"]]

    def remove(self) -> None:
        """Take the folder away: what it was for is done."""
        shutil.rmtree(self.folder)
