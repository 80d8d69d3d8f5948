"""What FlashMoE brings to a run: the fitted nets of this model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from moebench.errors import UsageError
from moebench.systems.flashmoe import artefact as artefacts
from moebench.systemspec import Equipment, Target

if TYPE_CHECKING:
    from moebench.systems.flashmoe import FlashMoeConfig

FLOAT64 = 8  # what one number takes where the nets run in numpy; a modeled machine holds them as they are stored


def equip(config: FlashMoeConfig, target: Target) -> Equipment:
    """The nets for this model and these options; raises one line that says what is missing."""
    if config.net == "none":
        return Equipment()
    folder = Path(config.artefact).expanduser() if config.artefact else artefacts.find(target)
    fitted = artefacts.load(folder)
    artefacts.check(fitted, target)
    kind = fitted.preferred if config.net == "auto" else config.net
    if kind not in fitted.nets:
        have, how = ", ".join(fitted.nets), artefacts.command(target)
        raise UsageError(f"flashmoe: {folder} has {have} nets only; fit {kind} ones: {how} nets={kind}")
    nets = fitted.nets[kind]
    notes = []
    if target.trace is not None:
        source = fitted.provenance.get("source", "routing of unknown origin")
        notes.append(f"assumed: {kind} eviction nets fitted on another trace ({source}, hash {fitted.trace[:8]})")
    held = nets.weights.size * FLOAT64 if target.number_bytes else nets.weights.nbytes
    files = {f"{kind} nets": xxhash.xxh3_128((folder / artefacts.FILE).read_bytes()).hexdigest()}
    return Equipment({"predictor": held}, assumptions=tuple(notes), files=files, content=nets)
