"""The model as Edge0 trains it: routing replaced by the heads' predictions, adapters beside the dense projections.

A whole sequence runs in one pass: what a head says at token t is known before the next layer routes token t + 1, so
layer by layer all positions route at once. ``generate`` does the same one token at a time. Needs torch; the serving
side (``predictor.py``) does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moebench.backends.torch_experts import expert_modules, expert_parameters, router_module
from moebench.backends.torch_lora import dense_projections
from moebench.backends.torch_model import cache_argument
from moebench.backends.torch_routers import selection_bias
from moebench.routing import RoutingLaw, sparsemixer
from moebench.store.layout import QuantSpec
from moebench.store.quant import dequantize, quantize
from moebench.systems.edge0.heads import HIDDEN, Plan

EXPERTS = "edge0_student"


def dequantise_experts(model: PreTrainedModel, quant: str) -> None:
    """Replace every routed expert's matrices by what their stored ``quant`` form stands for."""
    spec = QuantSpec(quant)
    for module in expert_modules(model).values():
        for name, parameter in expert_parameters(module).items():
            if parameter.dim() != 3:
                continue
            for expert in parameter.data:
                matrix = (expert.T if module.is_transposed else expert).float()
                plain = torch.from_numpy(dequantize(quantize(name, matrix.contiguous().numpy(), spec)))
                expert.copy_(plain.T if module.is_transposed else plain)


def differentiable(law: RoutingLaw, logits: torch.Tensor, k: int, bias: torch.Tensor | None):
    """``RoutingLaw.apply`` with gradients through the weights: (ids [N, k], weights [N, k])."""
    with torch.no_grad():
        ids = torch.from_numpy(law.apply(logits.float().numpy(), k, None if bias is None else bias.numpy()).experts)
    if law.name == "topk_softmax":
        return ids, logits.gather(1, ids).softmax(-1)
    if law.name == "sparsemixer":
        counted = torch.from_numpy(sparsemixer(logits.detach().float().numpy(), k, law.jitter)[1])
        shares = logits[:, None].masked_fill(~counted, float("-inf")).softmax(-1)
        return ids, shares.gather(2, ids[..., None])[..., 0]
    scores = logits.sigmoid() if law.name == "sigmoid_group" else logits.softmax(-1)
    weights = scores.gather(1, ids)
    if law.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + law.epsilon)
    return ids, weights * law.scale


class Head(nn.Module):
    """logits = W_lin f + W_2 GELU(W_1 f), the heads of ``heads.py`` as parameters."""

    def __init__(self, router: torch.Tensor) -> None:
        super().__init__()
        experts, hidden = router.shape
        width = hidden + 2 * experts
        self.fc1 = nn.Parameter(torch.randn(HIDDEN, width) / width**0.5)
        self.fc2 = nn.Parameter(torch.zeros(experts, HIDDEN))
        self.linear_init = nn.Parameter(torch.cat([router.float(), torch.zeros(experts, 2 * experts)], 1))

    def forward(self, f: torch.Tensor) -> torch.Tensor:
        """[..., H + 2E] -> [..., E]."""
        return F.linear(f, self.linear_init) + F.linear(F.gelu(F.linear(f, self.fc1)), self.fc2)


class Adapter(nn.Module):
    """One unmerged low-rank branch: adds scale * B A x to a projection's output."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale, self.on = scale, True
        linear.register_forward_hook(self._beside)

    def _beside(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output + self.scale * F.linear(F.linear(inputs[0], self.a), self.b) if self.on else None


class Student(nn.Module):
    """A frozen base with trainable heads and adapters. ``mode`` is ``native`` (router, top-k of the plan) or
    ``predicted``.
    """

    def __init__(self, model: PreTrainedModel, law: RoutingLaw, plan: Plan, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = [model.requires_grad_(False)]  # in a list: no parameter of ours
        self.law, self.plan, self.mode, self.first_token = law, plan, "predicted", plan.first_token
        modules = expert_modules(model)
        self.routers = [router_module(model, name) for name in modules]
        self.biases = [selection_bias(model, name) for name in modules]
        self.experts = next(iter(modules.values())).num_experts
        self.heads = nn.ModuleDict({str(n): Head(self.routers[n + 1].weight) for n in plan.owners})
        self.scale = alpha / rank
        adapted = dense_projections(model)
        self.adapted = list(adapted)
        self.adapters = nn.ModuleList([Adapter(linear, rank, self.scale) for linear in adapted.values()])
        self.features: dict[int, torch.Tensor] = {}
        self.router_logits: dict[int, torch.Tensor] = {}
        for index, router in enumerate(self.routers):
            router.register_forward_hook(lambda m, i, o, index=index: self._seen(index, o))
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
        for index, module in enumerate(modules.values()):
            module.edge0 = (self, index)
        model.set_experts_implementation(EXPERTS)
        self._incremental = False

    def _seen(self, layer: int, output: Any) -> None:
        self.router_logits[layer] = output[0] if isinstance(output, tuple) else output

    @property
    def model(self) -> PreTrainedModel:
        """The base."""
        return self.base[0]

    def use_adapters(self, on: bool) -> None:
        """Serve the adapters or leave them out."""
        for adapter in self.adapters:
            adapter.on = on

    # --- routing ---------------------------------------------------------------------------------------------------

    def route(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
        """Executed (ids, weights) [N, k] of one layer; rows are the flattened [B, S] of the pass."""
        k, plan = self.plan.top_k, self.plan
        total = weights.sum(-1, keepdim=True)
        kept, best = weights.topk(k, dim=-1)  # some routers leave their choice unsorted
        ids = ids.gather(1, best)
        weights = kept * (total / kept.sum(-1, keepdim=True)) if self.law.renormalise else kept
        if self.mode == "predicted" and layer in plan.consumers:
            logits, used = self._prediction(layer)
            if logits is not None:
                own, own_weights = differentiable(self.law, logits.reshape(-1, self.experts), k, self.biases[layer])
                used = used.reshape(-1, 1)
                ids, weights = torch.where(used, own, ids), torch.where(used, own_weights, weights)
        if layer in plan.owners:
            self._capture(layer, hidden, ids)
        return ids, weights

    def _prediction(self, layer: int):
        if self._incremental:
            logits = self._now.get(layer)
            return logits, torch.ones(self._batch, 1, dtype=torch.bool)
        logits = self.heads[str(layer - 1)](self.features[layer - 1])
        return F.pad(logits[:, :-1], (0, 0, 1, 0)), self.predicted

    def _capture(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor) -> None:
        rows = hidden.reshape(self._batch, -1, hidden.shape[-1])
        executed = F.one_hot(ids, self.experts).sum(1).to(hidden.dtype).reshape(*rows.shape[:2], self.experts)
        if not self._incremental:
            before = F.pad(executed[:, :-1], (0, 0, 1, 0)) * self._had_before
            self.features[layer] = torch.cat([rows, executed, before], -1)
            return
        if self._prefill:
            if self.first_token == "heads":
                before = executed[:, -2] * self._read if rows.shape[1] > 1 else torch.zeros_like(executed[:, -1])
                f = torch.cat([rows[:, -1], executed[:, -1], before], -1)
                self._next[layer + 1] = self.heads[str(layer)](f)
                self._last[layer] = executed[:, -1]
            return
        before = self._last.get(layer, torch.zeros_like(executed[:, 0]))
        f = torch.cat([rows[:, 0], executed[:, 0], before], -1)
        self._next[layer + 1] = self.heads[str(layer)](f)
        self._last[layer] = executed[:, 0]

    # --- passes ----------------------------------------------------------------------------------------------------

    def forward(self, ids: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of right-padded ids [B, S] whose first ``prompt`` [B] tokens are read by the true router.

        Leaves ``features`` and ``router_logits`` of the pass behind.
        """
        self._incremental, self._batch = False, len(ids)
        position = torch.arange(ids.shape[1])[None, :]
        late = 1 if self.first_token == "gate" else 0
        self.predicted = position >= prompt[:, None] + late
        # "heads" looks back into the prompt; "gate" has seen nothing before the first decoded token
        self._had_before = (position > prompt[:, None] if late else position > 0).float()[..., None]
        return self.model(input_ids=ids, use_cache=False).logits

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: int, pad: int) -> list[list[int]]:
        """Greedy continuations of prompts, routed as served."""
        width, batch = max(map(len, prompts)), len(prompts)
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        position = (mask.cumsum(1) - 1).clamp(min=0)
        self._read = mask[:, -2:-1] if width > 1 else mask  # whether the token before the last is no padding
        self._incremental, self._batch, self._prefill = True, batch, True
        self._now, self._next, self._last = {}, {}, {}
        cache, alive = DynamicCache(config=self.model.config), [True] * batch
        cache_name = cache_argument(self.model)
        out: list[list[int]] = [[] for _ in prompts]
        for _ in range(new_tokens):
            logits = self.model(
                input_ids=ids, attention_mask=mask, position_ids=position, logits_to_keep=1, **{cache_name: cache}
            ).logits[:, -1]
            self._prefill, self._now, self._next = False, self._next, {}
            chosen = logits.argmax(-1)
            for row, token in enumerate(chosen.tolist()):
                if alive[row]:
                    out[row].append(token)
                    alive[row] = token != stop
            if not any(alive):
                break
            ids, position = chosen[:, None], position[:, -1:] + 1
            mask = torch.cat([mask, torch.ones(batch, 1, dtype=mask.dtype)], 1)
        return out


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts function ``edge0_student``: route, then its own grouped kernels."""
    student, layer = module.edge0
    ids, weights = student.route(layer, hidden_states, top_k_index, top_k_weights)
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, ids, weights.to(top_k_weights.dtype))
