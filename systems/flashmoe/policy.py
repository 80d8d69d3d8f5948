"""The learned eviction policy: what a net sees of each expert, and who leaves by what it says.

A policy as those of ``moebench.residency.policies``: the loop and the cache replay drive the same object. Knows keys
and events; knows no bytes, no clock and no training.
"""

from __future__ import annotations

import numpy as np

from moebench.residency.policies import Policy, PolicyError
from moebench.systems.flashmoe.nets import GRID, Nets


class Learned(Policy):
    """The expert with the largest predicted next-use distance leaves first (FlashMoE, eviction rule).

    Features of an expert, both in 0..1: recency 1 / r, r its layer's events since it was used (1: in the last one), 0
    if it never was; frequency c / max c, c its uses in this request.
    """

    def __init__(self, keys: int, slots: int, layers: int, *, seed: int, pools: int, nets: Nets) -> None:
        if pools != layers:
            raise PolicyError("learned eviction ranks the experts of one layer: it needs scope per_layer")
        if (nets.layers, nets.layers * nets.experts) != (layers, keys):
            raise PolicyError(
                f"nets of {nets.layers} layers of {nets.experts} experts do not fit {layers}, {keys} keys"
            )
        self.nets, self.experts = nets, nets.experts
        super().__init__(keys, slots, layers, seed=seed, pools=pools)

    def reset(self):
        super().reset()
        shape = (self.layers, self.experts)
        self.now = [0] * self.layers  # events of each layer so far
        self.used = np.full(shape, -1)  # the event that last used an expert, -1 for never
        self.count = np.zeros(shape, np.int64)

    def begin_request(self):
        self.count[:] = 0

    def _access(self, keys, hits):
        layer = int(keys[0]) // self.experts
        experts = keys - layer * self.experts
        self.used[layer, experts] = self.now[layer]
        self.count[layer, experts] += 1
        self.now[layer] += 1

    def features(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Recency and frequency (float64 [E] each) of the experts of a layer."""
        used, count = self.used[layer], self.count[layer]
        return (used >= 0) / (self.now[layer] - used), count / max(1, int(count.max()))

    def _ranks(self, candidates):
        if not len(candidates):
            return np.empty(0, np.int64)
        layer = int(candidates[0]) // self.experts
        scores = self.nets.scores(layer, *self.features(layer), candidates - layer * self.experts)
        return np.rint(scores * -(GRID * GRID)).astype(np.int64) * self.keys + candidates

    def check_integrity(self):
        for layer in range(self.layers):
            keys = np.arange(self.experts) + layer * self.experts
            if len(np.unique(self._ranks(keys))) != self.experts:
                raise PolicyError("learned: two keys share a rank")
        if self.used.max(initial=-1) >= max(self.now) or (self.count > np.array(self.now)[:, None]).any():
            raise PolicyError("learned: an expert was used more often, or later, than its layer asked")
