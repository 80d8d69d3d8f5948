"""Routing laws: how router logits become expert ids and weights, one pure function per law.

A predictor's logits go through the family's own law, so that what is staged is what would be executed. Knows numpy
and model configurations; knows no model in memory and no expert bytes. Ties go to the lower expert index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.step import Routing

LAWS = ("softmax_topk", "topk_softmax", "sigmoid_group", "sparsemixer")


class RoutingError(ValueError):
    """A routing law that is not known, or that cannot be applied to these logits."""


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the ``k`` largest of fp32 [N, E], best first, ties by lower index; int64 [N, k]."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in fp32."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def topk_softmax(logits: np.ndarray, k: int) -> Routing:
    """The ``k`` largest logits, then a softmax over those alone."""
    ids = top_k(logits, k)
    return Routing(ids, softmax(np.take_along_axis(logits, ids, axis=-1)))


def within_groups(choice: np.ndarray, n_group: int, topk_group: int, best: int) -> np.ndarray:
    """fp32 [N, E] with -inf outside the ``topk_group`` groups whose ``best`` largest numbers sum highest."""
    rows, experts = choice.shape
    grouped = choice.reshape(rows, n_group, experts // n_group)
    sums = np.sort(grouped, axis=-1)[..., -best:].sum(axis=-1)
    kept = np.zeros((rows, n_group), bool)
    np.put_along_axis(kept, top_k(sums, topk_group), True, axis=-1)
    return np.where(kept[..., None], grouped, -np.inf).reshape(rows, experts)


def sparsemixer(logits: np.ndarray, k: int, jitter: float) -> tuple[np.ndarray, np.ndarray]:
    """The best experts one after another, int64 [N, k], and bool [N, k, E] over which softmax gives each its weight.

    An expert counts beside the best one left unless it lies below it by more than 2 ``jitter`` of the larger of the
    best and its own magnitude (arXiv 2409.12136, as evaluated; the model publishes k = 2).
    """
    left, ids, counted = logits.copy(), [], []
    rows = np.arange(len(logits))
    for _ in range(k):
        chosen = left.argmax(-1)
        best = left[rows, chosen][:, None]
        with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 counts as near
            far = (best - logits) / np.maximum(np.abs(logits), best) > 2 * jitter
        ids.append(chosen)
        counted.append(~far & (left > -np.inf))
        left[rows, chosen] = -np.inf
    return np.stack(ids, 1), np.stack(counted, 1)


@dataclass(frozen=True)
class RoutingLaw:
    """A law by name with its parameters.

    ``softmax_topk``: softmax over all experts, then the best; ``sigmoid_group``: a sigmoid of each, then the best.
    Of both: a ``bias`` (fp32 [E]) changes which experts are chosen, never their weights; of ``n_group`` groups only the
    ``topk_group`` best compete, by their best score (softmax) or the sum of their two best (sigmoid); ``renormalise``
    divides the weights by their sum plus ``epsilon``; then they are multiplied by ``scale``.
    ``topk_softmax``: the best logits, then a softmax over those alone. ``sparsemixer``: see there.
    """

    name: str
    renormalise: bool = True
    n_group: int = 1
    topk_group: int = 1
    scale: float = 1.0
    epsilon: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in LAWS:
            raise RoutingError(f"unknown routing law {self.name!r}; valid: {', '.join(LAWS)}")
        scored = (self.n_group, self.topk_group, self.scale, self.epsilon)
        if not self.scores and scored != (1, 1, 1.0, 0.0):
            raise RoutingError(
                f"routing law {self.name}: n_group, topk_group, scale and epsilon belong to softmax_topk and "
                "sigmoid_group"
            )
        if self.jitter and self.name != "sparsemixer":
            raise RoutingError(f"routing law {self.name}: jitter belongs to sparsemixer")
        if self.name == "topk_softmax" and not self.renormalise:
            raise RoutingError("routing law topk_softmax: weights always sum to 1, renormalise cannot be off")
        if self.name == "sparsemixer" and self.renormalise:
            raise RoutingError("routing law sparsemixer: weights do not sum to 1, renormalise must be off")
        if not 1 <= self.topk_group <= self.n_group:
            raise RoutingError(
                f"routing law {self.name}: topk_group {self.topk_group} is not in 1..{self.n_group} (n_group)"
            )

    @property
    def scores(self) -> bool:
        """Whether every expert gets a score before the best are taken."""
        return self.name in ("softmax_topk", "sigmoid_group")

    def apply(self, logits: np.ndarray, k: int, bias: np.ndarray | None = None) -> Routing:
        """Route fp32 logits [N, E] to ``k`` experts a row; ids int64 and weights fp32 [N, k], best first."""
        experts = logits.shape[1]
        if not 1 <= k <= experts:
            raise RoutingError(f"routing law {self.name}: top-k {k} is not in 1..{experts} (experts)")
        logits = np.asarray(logits, np.float32)
        if self.scores:
            return self._scored(logits, k, bias)
        if bias is not None:
            raise RoutingError(f"routing law {self.name} takes no bias; softmax_topk and sigmoid_group do")
        if self.name == "topk_softmax":
            return topk_softmax(logits, k)
        ids, counted = sparsemixer(logits, k, self.jitter)
        shares = softmax(np.where(counted, logits[:, None], -np.inf))
        return Routing(ids, np.take_along_axis(shares, ids[..., None], axis=-1)[..., 0])

    def _scored(self, logits: np.ndarray, k: int, bias: np.ndarray | None) -> Routing:
        experts, sigmoid = logits.shape[1], self.name == "sigmoid_group"
        best = 2 if sigmoid else 1
        if experts % self.n_group or experts // self.n_group < best <= self.n_group:
            raise RoutingError(
                f"routing law {self.name}: {experts} experts do not form {self.n_group} groups of {best} or more"
            )
        if k > self.topk_group * (experts // self.n_group):
            raise RoutingError(f"routing law {self.name}: top-k {k} exceeds the experts of {self.topk_group} groups")
        scores = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32) if sigmoid else softmax(logits)
        choice = scores if bias is None else scores + bias
        if self.n_group > 1:
            choice = within_groups(choice, self.n_group, self.topk_group, best)
        ids = top_k(choice, k)
        weights = np.take_along_axis(scores, ids, axis=-1)
        if self.renormalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(self.epsilon))
        return Routing(ids, weights * np.float32(self.scale))

    def narrow(self, weights: np.ndarray, k: int) -> np.ndarray:
        """Weights fp32 [N, n] of a router's choice, best first, cut to its best ``k``: what the law makes sum to a
        constant still sums to it.
        """
        kept = weights[:, :k]
        return kept * (weights.sum(-1, keepdims=True) / kept.sum(-1, keepdims=True)) if self.renormalise else kept


# Configurations below are transformers' to_dict() or a hub's config.json; what they leave out has the value that
# transformers gives it.


def _softmax(renormalise: bool | None = None, default: bool = False) -> Callable[[Mapping[str, Any]], RoutingLaw]:
    """Softmax-then-top-k; ``renormalise`` None: the configuration says, or ``default``."""
    return lambda c: RoutingLaw(
        "softmax_topk", bool(c.get("norm_topk_prob", default) if renormalise is None else renormalise)
    )


def _deepseek_v2(config: Mapping[str, Any]) -> RoutingLaw:
    limited = config.get("topk_method", "greedy") == "group_limited_greedy"
    groups, kept = (config["n_group"], config["topk_group"]) if limited else (1, 1)
    return RoutingLaw("softmax_topk", False, groups, kept, float(config.get("routed_scaling_factor", 1.0)))


def _sigmoid(groups: tuple[int, int], norm: bool, scale: float, epsilon: float = 1e-20):
    """Sigmoid with groups: what the configuration leaves out is given here."""

    def law(c: Mapping[str, Any]) -> RoutingLaw:
        return RoutingLaw(
            "sigmoid_group",
            renormalise=bool(c.get("norm_topk_prob", c.get("moe_renormalize", norm))),
            n_group=c.get("n_group", c.get("num_expert_group", groups[0])) or 1,
            topk_group=c.get("topk_group", groups[1]) or 1,
            scale=float(c.get("routed_scaling_factor", scale)),
            epsilon=epsilon,
        )

    return law


_deepseek_v3 = _sigmoid((8, 4), True, 2.5)
LAW_OF_MODEL: dict[str, Callable[[Mapping[str, Any]], RoutingLaw]] = {
    "qwen2_moe": _softmax(),
    "qwen3_moe": _softmax(),
    "qwen3_next": _softmax(default=True),
    "qwen3_5_moe": _softmax(True),
    "qwen3_5_moe_text": _softmax(True),
    "olmoe": _softmax(),
    "flex_olmo": _softmax(),
    "mixtral": _softmax(True),
    "hunyuan_v1_moe": _softmax(True),
    # its sum is held above moe_norm_min instead, which is the same wherever the sum is not almost zero
    "ernie4_5_moe": lambda c: RoutingLaw("softmax_topk", epsilon=float(c.get("moe_norm_min", 1e-12))),
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "bailing_hybrid": _deepseek_v3,
    "glm4_moe": _sigmoid((1, 1), True, 1.0),
    "dots1": _sigmoid((1, 1), False, 1.0),
    "lfm2_moe": _sigmoid((1, 1), True, 1.0, 1e-6),
    "minimax_m2": lambda c: RoutingLaw("sigmoid_group"),
    "gpt_oss": lambda c: RoutingLaw("topk_softmax"),
    "granitemoe": lambda c: RoutingLaw("topk_softmax"),
    "phimoe": lambda c: RoutingLaw("sparsemixer", False, jitter=float(c.get("router_jitter_noise", 0.01))),
}


def law_of_config(config: Mapping[str, Any]) -> RoutingLaw:
    """The routing law of a transformers configuration, by its ``model_type``, or that of its ``text_config``."""
    text = config.get("text_config") or config
    kind = text.get("model_type")
    if kind not in LAW_OF_MODEL:
        raise RoutingError(f"no routing law known for model type {kind!r}; known: {', '.join(LAW_OF_MODEL)}")
    return LAW_OF_MODEL[kind](text)
