"""Sessions on one live model, opened one after another; an oracle's future is written down by a first pass.

Knows nothing of what runs in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moebench.harness import environment
from moebench.harness.assets import LiveModel
from moebench.harness.plan import Cell
from moebench.harness.session import Session, open_session
from moebench.hookspecs import hookimpl
from moebench.plugins import Registry
from moebench.systemspec import Equipment, SystemSpec

RECORDING = SystemSpec(id="recording", title="", summary="", make=lambda config, run: object(), sizing="minimal")


class DemandLog:
    """An observer that writes down every demand, as the first of an oracle's two passes."""

    def __init__(self) -> None:
        self.demands: list[tuple[int, list[int]]] = []

    @hookimpl
    def acquired(self, layer, keys) -> None:
        """One event."""
        self.demands.append((layer, list(keys)))


class Sessions:
    """Opens sessions on one live model and closes them all; an oracle gets a first pass that writes its future down."""

    def __init__(
        self, cell: Cell, registry: Registry, model: LiveModel, backend: Any, equipment: Equipment, context: int,
        warmup: int, batch: int,
    ) -> None:  # fmt: skip
        self.cell, self.registry, self.model, self.backend, self.equipment = cell, registry, model, backend, equipment
        self.context, self.warmup, self.batch, self.opened = context, warmup, batch, []

    def __enter__(self):
        return self.open

    def __exit__(self, *_: object) -> None:
        for session in self.opened:
            session.close()

    def open(self, work: Callable[[Session], None]) -> Session:
        """A session ready for ``work``, which is run once beforehand for an oracle."""
        cell, future = self.cell, None
        if cell.spec.foresees(cell.config.knobs):
            log = DemandLog()
            work(first := self._new(replace(cell, spec=RECORDING), [log]))
            first.close()
            environment.page_cache_state(cell, self.model.pack)  # the first pass warmed it
            future = log.demands
        return self._new(cell, [], future)

    def _new(self, cell: Cell, observers: Sequence[object], future: Any = None) -> Session:
        backend, modeled = self.backend, cell.clock == "virtual"
        wider = modeled and backend.stored_dense_bytes != backend.dense_bytes
        dense = backend.stored_dense_bytes if modeled else backend.dense_bytes
        bits = 8 * dense / max(1, self.model.geometry.dense_parameters)  # above 16 some are kept wider, and small
        session = open_session(
            cell, self.model.geometry, self.registry, pack=self.model.pack,
            dense_bytes=dense, dense_bits=min(16.0, bits), kv_bytes=None if wider else backend.kv_bytes,
            future=future, observers=observers,
            warmup_tokens=self.warmup, batch=self.batch, context=self.context,
            longest_prompt=max(1, self.context - self.cell.config.workload.new_tokens), equipment=self.equipment,
            ops=backend.ops, drafter=self.model.drafter, allocate=backend.buffer, device=backend.device,
            transient_bytes=backend.transient_bytes,
        )  # fmt: skip
        self.opened.append(session)
        return session
