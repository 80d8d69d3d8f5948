"""The prerouter: one small head per owner layer, which at token t chooses the next layer's experts of token t + 1.

    f = concat(h, o_t, o_{t-1}),   logits = W_lin f + W_2 GELU(W_1 f)

h [H] is the owner's MoE input, o the multi-hot [E] of the experts it executed; no biases, exact (erf) GELU, hidden
width 512 (Edge0, arXiv 2609.18063 and its code). At the start W_2 is zero and W_lin is the next layer's router on h, so
an untrained head is that router applied one layer and one token early. Knows shapes and formulas; arithmetic is done by
the backend's ``Ops``.
"""

from __future__ import annotations

from dataclasses import dataclass

from moebench.errors import UsageError

HIDDEN = 512
PARTS = ("fc1", "fc2", "linear_init")
FIRST_TOKENS = ("gate", "heads")


@dataclass(frozen=True)
class Plan:
    """Which layers predict for which, how many experts run, and what routes the first decoded token.

    Layers before ``consumers`` and the others outside keep their own router. Owner n feeds consumer n + 1.
    """

    layers: int
    top_k: int
    consumers: tuple[int, ...]
    first_token: str = "gate"

    def __post_init__(self) -> None:
        object.__setattr__(self, "consumers", tuple(self.consumers))
        if self.first_token not in FIRST_TOKENS:
            raise UsageError(f"edge0: first_token {self.first_token!r} is not one of {', '.join(FIRST_TOKENS)}")
        if not self.consumers or list(self.consumers) != sorted(set(self.consumers)):
            raise UsageError(f"edge0: consumers {self.consumers} must be ascending layers, at least one")
        if not 1 <= self.consumers[0] <= self.consumers[-1] < self.layers:
            raise UsageError(f"edge0: consumers {self.consumers} are not within 1..{self.layers - 1}")
        if self.top_k < 1:
            raise UsageError(f"edge0: top_k must be at least 1, got {self.top_k}")

    @property
    def owners(self) -> tuple[int, ...]:
        """Layers that carry a head."""
        return tuple(layer - 1 for layer in self.consumers)


def consumers_from(first: int, layers: int, last: bool = False) -> tuple[int, ...]:
    """Consumer layers from ``first`` on; the last layer keeps its router unless ``last``."""
    return tuple(range(first, layers if last else layers - 1))


def head_shapes(hidden: int, experts: int) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of one head's three matrices."""
    width = hidden + 2 * experts
    return {"fc1": (HIDDEN, width), "fc2": (experts, HIDDEN), "linear_init": (experts, width)}


def head_parameters(hidden: int, experts: int) -> int:
    """Parameters of one head."""
    return sum(rows * columns for rows, columns in head_shapes(hidden, experts).values())
