"""The adapters' shapes: one low-rank pair (A, B) for each pair of MoE layers, or one for all layers.

    z = B A x + W x,   p = softmax(z)

x [D] is the input of layer l's router, W [n, D] the frozen router of layer l + lag (base ``next_gate``; without it for
base ``none``), A [r, D], B [n, r]. The paper's formula (SpecPrefetch, arXiv 2607.24787, method) has no W; its code adds
it, and starts with B zero and A random over r, so that training starts from the replayed router. Knows shapes; does no
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from moebench.errors import UsageError

KINDS = ("pairs", "shared")
BASES = ("next_gate", "none")
MOST = 2  # layers ahead


@dataclass(frozen=True)
class Shape:
    """Which adapters there are: ``horizon`` lags for each of ``layers`` MoE layers, of rank ``rank``."""

    layers: int
    experts: int
    hidden: int
    rank: int
    horizon: int = 1
    kind: str = "pairs"
    base: str = "next_gate"

    def __post_init__(self) -> None:
        for name, value, valid in (("adapters", self.kind, KINDS), ("base", self.base, BASES)):
            if value not in valid:
                raise UsageError(f"specprefetch: {name} {value!r} is not one of {', '.join(valid)}")
        if not 1 <= self.horizon <= MOST or self.layers <= self.horizon:
            raise UsageError(
                f"specprefetch: horizon {self.horizon} must be 1 or {MOST}, and less than {self.layers} layers"
            )
        if self.rank < 1:
            raise UsageError(f"specprefetch: rank must be at least 1, got {self.rank}")

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(layer, lag) of every prediction, in order of lag, then layer."""
        return tuple((layer, lag) for lag in range(1, self.horizon + 1) for layer in range(self.layers - lag))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters: ``layers.L.hLAG``, or ``shared.hLAG``."""
        return tuple(dict.fromkeys(self.name(layer, lag) for layer, lag in self.pairs))

    def name(self, layer: int, lag: int) -> str:
        """The adapter that predicts layer ``layer + lag`` from ``layer``."""
        return f"layers.{layer}.h{lag}" if self.kind == "pairs" else f"shared.h{lag}"

    @property
    def sides(self) -> dict[str, tuple[int, int]]:
        """Shapes of A and B."""
        return {"A": (self.rank, self.hidden), "B": (self.experts, self.rank)}

    @property
    def parameters(self) -> int:
        """Trained numbers: adapters * r * (D + n)."""
        return len(self.names) * self.rank * (self.hidden + self.experts)

    def streamed(self, layer: int, horizon: int, adapter: bool, gate: bool) -> int:
        """Numbers that predicting from ``layer`` up to ``horizon`` layers ahead goes through."""
        lags = min(horizon, self.layers - 1 - layer)
        return lags * (adapter * self.rank * (self.hidden + self.experts) + gate * self.experts * self.hidden)
