"""How a cell's surroundings stood: the page cache before a run, threads that compute and how they wait, and constants
that come from another machine.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from moebench.harness.costs import DIRECT
from moebench.harness.plan import Cell
from moebench.store.pages import drop_page_cache

OMP_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # of GNU's and LLVM's libraries


def page_cache_state(cell: Cell, pack: Any) -> str:
    """Set the page cache before a run where that matters, and say in words how it stands."""
    if cell.clock == "virtual":
        return "modeled: empty at start" if cell.engine not in DIRECT else f"modeled: bypassed by engine {cell.engine}"
    if cell.engine in DIRECT:
        # F_NOCACHE adds nothing to the page cache, but takes what is there already
        cached = ", but for pages that were cached before" if sys.platform == "darwin" else ""
        return f"bypassed by engine {cell.engine}{cached}"
    dropped, reason = drop_page_cache(pack.file_path)
    return "cold: pages of the pack dropped before the run" if dropped else f"unknown: {reason}"


def transferred(cell: Cell) -> list[str]:
    """Software-stack constants that were taken on another machine than the one modeled."""
    if cell.clock == "wall":
        return []
    stack = cell.profile.constants("" if cell.config.stack == "auto" else cell.config.stack)
    return [f"transferred: {name} of stack {stack.name} was taken on {at}" for name, at in stack.transferred.items()]


def processors(cell: Cell) -> dict[str, Any]:
    """Threads that compute in a measured run, and what OpenMP's were told of how to wait for work."""
    if cell.clock == "virtual" or not cell.live or cell.config.backend != "torch":
        return {}
    told = {name.lower(): os.environ[name] for name in OMP_WAITING if name in os.environ}
    return {"threads": cell.threads, "waiting": told}
