"""What FlashMoE brings to a run: fitted nets for this model, and the figures its paper reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moebench.errors import UsageError
from moebench.systems.flashmoe import artefact as artefacts
from moebench.systemspec import Equipment, Target

if TYPE_CHECKING:
    from moebench.systems.flashmoe import FlashMoeConfig


def equip(config: FlashMoeConfig, target: Target) -> Equipment:
    """The nets for this model and these options; raises one line that says what is missing."""
    if config.net == "none":
        return Equipment()
    folder = Path(config.artefact).expanduser() if config.artefact else artefacts.find(target)
    fitted = artefacts.load(folder)
    artefacts.check(fitted, target)
    kind = config.net
    if kind == "auto":
        kind = "joint" if "joint" in fitted.nets else "shared"
    if kind not in fitted.nets:
        have = ", ".join(fitted.nets)
        raise UsageError(
            f"flashmoe: {folder} has {have} nets only; fit {kind} ones: {artefacts.command(target)} nets={kind}"
        )
    nets = fitted.nets[kind]
    notes = []
    if target.trace is not None:
        source = fitted.provenance.get("source", "routing of unknown origin")
        notes.append(f"assumed: {kind} eviction nets fitted on another trace ({source}, hash {fitted.trace[:8]})")
    return Equipment({"predictor": nets.layers * nets.layer_bytes}, assumptions=tuple(notes), content=nets)
