"""The read-only view that every decision hook gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moebench.geometry import Geometry

if TYPE_CHECKING:
    from moebench.engine.movement import Movement


class View:
    """What a plugin may know of a run: residency, transfers, costs and time; never the future, never a mutable array.

    The one thing a plugin says through it is ``account``.
    """

    def __init__(self, experts: Movement) -> None:
        self._experts = experts

    @property
    def geometry(self) -> Geometry:
        """Layers, experts, top-k and sizes of the model."""
        return self._experts.geometry

    @property
    def now(self) -> float:
        """Seconds on the run's clock."""
        return self._experts.timeline.now()

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, fastest first."""
        return tuple(t.name for t in self._experts.tiers)

    def budget(self, tier: str) -> int:
        """Capacity of a tier in bytes."""
        return self._experts.tier(tier).capacity_bytes

    def slots(self, tier: str) -> int:
        """Capacity of a tier in experts."""
        return self._experts.tier(tier).slots

    def account(self, nbytes: int = 0, syncs: int = 0) -> None:
        """Tell of work the system did itself: bytes it streamed from the fastest memory, and how often the host waited
        for a result. A modeled clock advances by it; a real one has already.
        """
        self._experts.timeline.system_work(nbytes, syncs)

    @property
    def reading_ahead(self) -> bool:
        """Whether room is being made for a prefetch rather than for a demand."""
        return self._experts._reading_ahead

    def position(self, keys) -> np.ndarray:
        """Place of each key on storage (int64), counted in whole experts: neighbours differ by one."""
        return self._experts.places(keys)

    def resident(self, keys, tier: str | None = None) -> np.ndarray:
        """Per key (bool): complete in ``tier`` (the fastest when None)."""
        return self._experts.tier(tier).resident(keys)

    def in_flight(self, keys) -> np.ndarray:
        """Per key (bool): a transfer into the fastest tier is under way."""
        pending = self._experts.in_flight
        return np.fromiter((k in pending for k in np.asarray(keys).tolist()), bool, len(keys))

    def cost(self, keys) -> np.ndarray:
        """Estimated seconds until each key could be computed on, by the tier that holds it; 0 where it is resident."""
        experts = self._experts
        keys = np.asarray(keys, np.int64)
        cost = np.full(len(keys), experts.read_estimate_s + experts.copy_estimate_s)
        for tier in experts.tiers[1:]:
            cost[tier.resident(keys)] = experts.copy_estimate_s
        cost[experts.tiers[0].resident(keys)] = 0.0
        return cost

    def remaining(self, keys) -> np.ndarray:
        """Seconds until each key can be computed on: 0 if it is resident, the clock's own word for one in flight where
        it knows, else an estimate from reads so far.
        """
        experts, found = self._experts, []
        for key in np.asarray(keys, np.int64).tolist():
            ticket = experts.in_flight.get(key)
            left = None if ticket is None else experts.timeline.remaining_s(ticket)
            if ticket is not None and left is None:
                left = max(0.0, experts.read_estimate_s - (experts.timeline.now() - ticket.issued_s))
            found.append(left)
        cost = self.cost(keys)
        return np.array([c if left is None else left for c, left in zip(cost.tolist(), found, strict=True)])

    @property
    def busy_s(self) -> float:
        """Seconds for which the experts handed over last go on computing."""
        return self._experts.timeline.busy_s()

    def stages(self, count: int, rows: int) -> tuple[float, float]:
        """Seconds to copy ``count`` experts into the chip and to compute them over ``rows`` (row, expert) pairs; a
        measured run says what an expert took so far.
        """
        copy, compute = self._experts.timeline.stage_s(count, rows)
        return copy, compute or count * self._experts.compute_estimate_s

    def window(self, layer: int) -> float:
        """Running mean (weight 0.2 on the newest) of the seconds between the routing of ``layer`` and of the next one,
        over passes of the present one's phase: a prompt's chunk takes far longer than a token. 0 before the first.
        """
        experts = self._experts
        return experts.windows[experts.step.phase][layer]


class RecordingView:
    """What a system sees while its routing is recorded: one tier that holds every expert, and no time passes."""

    now = busy_s = 0.0
    tiers = ("device",)
    reading_ahead = False

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def budget(self, tier: str) -> int:
        """Bytes of all experts."""
        return self.geometry.keys * self.geometry.slot_bytes

    def slots(self, tier: str) -> int:
        """All experts."""
        return self.geometry.keys

    def account(self, nbytes: int = 0, syncs: int = 0) -> None:
        """Work of the system's own costs nothing here."""

    def position(self, keys) -> np.ndarray:
        """Storage is not asked: in order."""
        return np.array(keys, np.int64)

    def resident(self, keys, tier: str | None = None) -> np.ndarray:
        """All of them."""
        return np.ones(len(keys), bool)

    def in_flight(self, keys) -> np.ndarray:
        """None."""
        return np.zeros(len(keys), bool)

    def cost(self, keys) -> np.ndarray:
        """Seconds per key: none."""
        return np.zeros(len(keys))

    remaining = cost

    def stages(self, count: int, rows: int) -> tuple[float, float]:
        """Nothing is copied or computed apart."""
        return 0.0, 0.0

    def window(self, layer: int) -> float:
        """Seconds from one layer's routing to the next: none."""
        return 0.0
