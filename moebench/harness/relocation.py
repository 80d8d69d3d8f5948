"""What a run needs whose system re-organises storage: a private overlay beneath the engine, and who writes the swaps.

Knows where overlays live; knows nothing of why experts move.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moebench.config import RunConfig
from moebench.engine.relayout import ModeledMover, Relayout
from moebench.errors import UsageError
from moebench.plugins import home
from moebench.store.engines import ReadEngine
from moebench.store.extents import WHOLE
from moebench.store.overlay import Overlay
from moebench.store.pack import Pack
from moebench.store.relocate import RelocatingEngine


def require_movable(config: RunConfig) -> None:
    """Raise where experts of this run could not change places: they need one place of one size each."""
    if config.device != "cpu":
        raise UsageError(
            f"{config.system} re-organises storage, which writes experts from the host's memory, and device="
            f"{config.device} keeps them in its own; its own options switch re-organisation off"
        )
    if config.layout not in WHOLE or config.codec != "none":
        raise UsageError(
            f"{config.system} re-organises storage, which needs layout={' or layout='.join(WHOLE)} and codec=none, "
            f"not layout={config.layout} with codec={config.codec}; its own options switch re-organisation off"
        )


def overlays() -> Path:
    """Where the overlays of all runs live."""
    return home() / "overlays"


def open_engine(factory: Callable[..., ReadEngine], pack: Pack, **options: Any) -> RelocatingEngine:
    """Open a read engine on a new overlay of ``pack``, in ``overlays()``; its ``close`` removes it."""
    overlay = Overlay.create(pack, overlays())
    try:
        return RelocatingEngine(factory(overlay, **options), overlay)
    except BaseException:
        overlay.remove()
        raise


def make_relayout(timeline: Any, engine: Any, expert_bytes: int, budget_bytes: int, warmup_tokens: int) -> Relayout:
    """Who asks for swaps and counts them; on a modeled clock (no relocating engine) they take modeled time alone."""
    if isinstance(engine, RelocatingEngine):
        return Relayout(engine, engine.overlay.expert_bytes, budget_bytes, warmup_tokens)
    mover = ModeledMover(timeline, expert_bytes)
    return Relayout(mover, expert_bytes, budget_bytes, warmup_tokens)
