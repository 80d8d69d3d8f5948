"""Routing laws: how router logits become expert ids and weights, one pure function per law.

A predictor's logits go through the family's own law, so that what is staged is what would be executed. Knows numpy
and model configurations; knows no model in memory and no expert bytes. Ties go to the lower expert index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.step import Routing

LAWS = ("softmax_topk", "topk_softmax", "sigmoid_group")


class RoutingError(ValueError):
    """A routing law that is not known, or that cannot be applied to these logits."""


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the ``k`` largest of fp32 [N, E], best first, ties by lower index; int64 [N, k]."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in fp32."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def softmax_topk(logits: np.ndarray, k: int, renormalise: bool) -> Routing:
    """Softmax over all experts, then the ``k`` likeliest; weights sum to 1 if renormalised."""
    probabilities = softmax(logits)
    ids = top_k(probabilities, k)
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    if renormalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routing(ids, weights)


def topk_softmax(logits: np.ndarray, k: int) -> Routing:
    """The ``k`` largest logits, then a softmax over those alone."""
    ids = top_k(logits, k)
    return Routing(ids, softmax(np.take_along_axis(logits, ids, axis=-1)))


def sigmoid_group(
    logits: np.ndarray,
    k: int,
    bias: np.ndarray | None,
    *,
    n_group: int,
    topk_group: int,
    scale: float,
    renormalise: bool,
) -> Routing:
    """Sigmoid scores; the ``topk_group`` groups whose two best biased scores sum highest, then the ``k`` best there.

    ``bias`` (fp32 [E]) changes which experts are chosen, never their weights: scores (renormalised) times ``scale``.
    """
    rows, experts = logits.shape
    scores = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    choice = scores if bias is None else scores + bias
    if n_group > 1:
        grouped = choice.reshape(rows, n_group, experts // n_group)
        best_two = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        kept = np.zeros((rows, n_group), bool)
        np.put_along_axis(kept, top_k(best_two, topk_group), True, axis=-1)
        choice = np.where(kept[..., None], grouped, -np.inf).reshape(rows, experts)
    ids = top_k(choice, k)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if renormalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    return Routing(ids, weights * np.float32(scale))


@dataclass(frozen=True)
class RoutingLaw:
    """A law by name with its parameters; ``n_group``, ``topk_group``, ``scale`` belong to ``sigmoid_group`` alone."""

    name: str
    renormalise: bool = True
    n_group: int = 1
    topk_group: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in LAWS:
            raise RoutingError(f"unknown routing law {self.name!r}; valid: {', '.join(LAWS)}")
        if self.name != "sigmoid_group" and (self.n_group, self.topk_group, self.scale) != (1, 1, 1.0):
            raise RoutingError(f"routing law {self.name}: n_group, topk_group and scale belong to sigmoid_group")
        if self.name == "topk_softmax" and not self.renormalise:
            raise RoutingError("routing law topk_softmax: weights always sum to 1, renormalise cannot be off")
        if not 1 <= self.topk_group <= self.n_group:
            raise RoutingError(
                f"routing law {self.name}: topk_group {self.topk_group} is not in 1..{self.n_group} (n_group)"
            )

    def apply(self, logits: np.ndarray, k: int, bias: np.ndarray | None = None) -> Routing:
        """Route fp32 logits [N, E] to ``k`` experts a row; ids int64 and weights fp32 [N, k], best first."""
        experts = logits.shape[1]
        if not 1 <= k <= experts:
            raise RoutingError(f"routing law {self.name}: top-k {k} is not in 1..{experts} (experts)")
        logits = np.asarray(logits, np.float32)
        if self.name == "sigmoid_group":
            if experts % self.n_group or experts // self.n_group < 2 <= self.n_group:
                raise RoutingError(
                    f"routing law {self.name}: {experts} experts do not form {self.n_group} groups of two or more"
                )
            if k > self.topk_group * (experts // self.n_group):
                raise RoutingError(
                    f"routing law {self.name}: top-k {k} exceeds the experts of {self.topk_group} groups"
                )
            return sigmoid_group(
                logits,
                k,
                bias,
                n_group=self.n_group,
                topk_group=self.topk_group,
                scale=self.scale,
                renormalise=self.renormalise,
            )
        if bias is not None:
            raise RoutingError(f"routing law {self.name} takes no bias; only sigmoid_group does")
        if self.name == "topk_softmax":
            return topk_softmax(logits, k)
        return softmax_topk(logits, k, self.renormalise)

    def narrow(self, weights: np.ndarray, k: int) -> np.ndarray:
        """Weights fp32 [N, n] of a router's choice, best first, cut to its best ``k``: what the law makes sum to a
        constant still sums to it.
        """
        kept = weights[:, :k]
        return kept * (weights.sum(-1, keepdims=True) / kept.sum(-1, keepdims=True)) if self.renormalise else kept


def _softmax_of_config(config: Mapping[str, Any]) -> RoutingLaw:
    return RoutingLaw("softmax_topk", renormalise=bool(config.get("norm_topk_prob", False)))


def _group_of_config(config: Mapping[str, Any]) -> RoutingLaw:
    return RoutingLaw(
        "sigmoid_group",
        renormalise=bool(config["norm_topk_prob"]),
        n_group=config["n_group"],
        topk_group=config["topk_group"],
        scale=float(config["routed_scaling_factor"]),
    )


LAW_OF_MODEL = {
    "qwen3_moe": _softmax_of_config,
    "qwen2_moe": _softmax_of_config,
    "olmoe": _softmax_of_config,
    "mixtral": lambda config: RoutingLaw("softmax_topk", renormalise=True),
    "deepseek_v3": _group_of_config,
    "gpt_oss": lambda config: RoutingLaw("topk_softmax"),
    "granitemoe": lambda config: RoutingLaw("topk_softmax"),
}


def law_of_config(config: Mapping[str, Any]) -> RoutingLaw:
    """The routing law of a transformers configuration, by its ``model_type``."""
    kind = config.get("model_type")
    if kind not in LAW_OF_MODEL:
        raise RoutingError(f"no routing law known for model type {kind!r}; known: {', '.join(LAW_OF_MODEL)}")
    return LAW_OF_MODEL[kind](config)
