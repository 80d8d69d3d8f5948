"""Reading before a demand: prefetches that never block, stages that do, and taking back what nobody has begun.

Knows hooks, tickets and tiers; knows no layer's demand, no system, no device and no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moebench.engine.answers import keys_of
from moebench.engine.movement import Movement
from moebench.errors import PluginError
from moebench.timeline.base import DEMAND, PREFETCH


class ReadAhead(Movement):
    """What systems read for layers to come."""

    def _prefetch(self, point: int | str) -> None:
        """Ask the system what to read ahead at ``point`` and start as much of it as slots allow, never blocking."""
        if self.hooks.prefetch is None:
            return
        wanted = self.hooks.prefetch(self.step, point, self.view)
        if wanted is None:
            return
        keys = [k for k in dict.fromkeys(keys_of("prefetch", wanted, self.geometry.keys)) if k not in self.device]
        if self.rules.pool:  # advice gets no buffer that a demand would have to wait for
            keys = keys[: max(0, self.rules.pool - len(self.in_flight))]
        self._reading_ahead = True
        if self.host is None:
            chosen: list[int] = []
            taken: Counter[int] = Counter()  # slots spoken for, by layer where layers do not share
            for key in keys:
                layer = key // self.geometry.experts
                group = layer if self.device.scope == "per_layer" else 0
                if self._make_room(layer, taken[group] + 1, wait=False) > taken[group]:
                    taken[group] += 1
                    chosen.append(key)
            self._fetch(chosen, PREFETCH)
        else:
            chosen = [k for k in keys if self._ahead_through_host(k)]
        self.record.prefetch_reads += len(chosen)
        self._reading_ahead = False

    def _stage(self) -> None:
        """Load what the system wants staged, one expert after another, the loop waiting for each."""
        if self.hooks.stage is None or (wanted := self.hooks.stage(self.step, self.view)) is None:
            return
        for key in keys_of("stage", wanted, self.geometry.keys):
            if key not in self.device:
                if not self._make_room(key // self.geometry.experts, 1, wait=True):
                    raise PluginError(f"stage wants expert {key}, and no slot may be reused for it; raise budget=")
                self._fetch([key], DEMAND)
                self.record.prefetch_reads += 1
            if key in self.in_flight:
                self._promote(key)
                self._await(key)

    def _ahead_through_host(self, key: int) -> bool:
        """Start one prefetch by way of a host slot, if both tiers have room."""
        room = key in self.host or self._host_room(key)
        if room and self._make_room(key // self.geometry.experts, 1, wait=False):
            self._fetch([key], PREFETCH)
            return True
        return False

    def preload(self) -> None:
        """Make every expert resident before the first request: on the device as far as it reaches, else on the host."""
        for key in range(self.geometry.keys):
            if self.device.free_slots(key // self.geometry.experts):
                self._fetch([key], DEMAND)
            elif self._host_room(key):
                (self.loading[key],) = self.timeline.read([key], [self.host.take(key)], self.host.name, DEMAND)
        self.drain()

    def _cancel(self, keys: Sequence[int]) -> None:
        """Take back the prefetches of ``keys`` that have not begun: their slots are free, their bytes never read."""
        for key in keys:
            if (ticket := self.in_flight.get(key)) is None:
                continue
            read = self.loading.get(key)
            if self.timeline.cancel(read or ticket, ticket if read else None):
                self._forget(key)
                self.record.cancelled += 1
                self.record.copies -= read is not None
                self.record.read_bytes -= (read or ticket).nbytes
