"""From a dense feed-forward layer to a shared part and routed experts, layer by layer, in closed form.

For each layer: neurons that fire together become an expert; a router is regressed on how much each expert gives; then
the down projections are refitted by least squares so that what runs stands in for what does not. Layers are split in
order, each on what the layers before it give once split. Needs torch; knows no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moebench.models.smollm2_moe.clusters import balanced, borrowed, profiles, shared_neurons
from moebench.models.smollm2_moe.student import Shape, SplitFeedForward

CLUSTERED = 8192  # tokens on which neurons are compared
# Ridges are in units of a Gram matrix's mean diagonal; what is refitted has 2000 inputs, and text is short.
ROUTER_RIDGE, REFIT_RIDGE = 1e-2, 0.3
# Standard deviation of the router's logits. An expert's neurons should count the same wherever it runs, so weights are
# kept nearly equal; 0 would be nearest to the dense model, and would leave nothing to those who predict logits.
SPREAD = 0.2
ROWS = 4096  # tokens computed at once, where what is between is large


@dataclass(frozen=True)
class LayerReport:
    """How a layer fared on the text it was fitted on.

    ``captured``: share of the routed contributions' squared norms that falls on chosen experts; ``best`` the same if
    the largest were chosen; ``error``: squared error over the squared norm of the dense layer's output, ``unfitted``
    the same before the refit.
    """

    layer: int
    captured: float
    best: float
    unfitted: float
    error: float


def inner(dense: Any, x: torch.Tensor) -> torch.Tensor:
    """Inner activations [N, F] of a dense gated layer."""
    return F.silu(dense.gate_proj(x)) * dense.up_proj(x)


def partition(contribution: np.ndarray, shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shared neurons int64 [S] and the experts' own int64 [E, n], from what each neuron adds to a row, fp32 [N, F]."""
    shared = shared_neurons((contribution**2).mean(0), shape.shared)
    rest = np.setdiff1d(np.arange(shape.neurons), shared)
    return shared, rest[balanced(profiles(contribution[:, rest]), shape.experts, seed)]


def expert_norms(dense: Any, activations: torch.Tensor, members: np.ndarray) -> torch.Tensor:
    """Norm [N, E] of what each expert adds to a row, from inner activations [N, F]."""
    norms = []
    for group in torch.from_numpy(members):
        down, part = dense.down_proj.weight[:, group], activations[:, group]
        norms.append(((part @ (down.T @ down)) * part).sum(-1).clamp_min(0).sqrt())
    return torch.stack(norms, -1)


def solve(gram: torch.Tensor, moments: torch.Tensor, ridge: float) -> torch.Tensor:
    """[D, K] that maps features to targets with the least squared error, from F^T F [D, D] and F^T Y [D, K]."""
    damped = gram.double() + torch.eye(len(gram), dtype=torch.double) * (ridge * gram.diagonal().mean())
    return torch.linalg.solve(damped, moments.double()).float()


def route(squares: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Router [E, H] whose logits of x [N, H] follow the logarithm of the squared norms [N, E]."""
    logs = squares.clamp_min(1e-12).log()
    router = solve(x.T @ x, x.T @ (logs - logs.mean(-1, keepdim=True)), ROUTER_RIDGE).T
    return router * (SPREAD / F.linear(x, router).std())


def split_layer(
    dense: Any, x: torch.Tensor, due: torch.Tensor, pull: float, shape: Shape, seed: int, layer: int
) -> tuple[SplitFeedForward, torch.Tensor, LayerReport]:
    """A split layer for inputs x [N, H], and what it gives there [N, H]: about the dense layer's output, drawn by
    ``pull`` towards ``due`` [N, H].
    """
    activations = inner(dense, x)
    target = F.linear(activations, dense.down_proj.weight)
    some = slice(None, None, max(1, len(x) // CLUSTERED))
    contribution = (activations[some].abs() * dense.down_proj.weight.norm(dim=0)).numpy()
    shared, members = partition(contribution, shape, seed)
    norms = expert_norms(dense, activations, members).square()
    split = SplitFeedForward(shape)
    split.router.data = route(norms, x)
    weights = split.weights(x)
    chosen = weights > 0
    squared = contribution**2
    squared[:, shared] = 0.0
    extra = borrowed(squared, members, chosen[some].numpy(), shape.width - shape.own)
    order = fill(split, dense, shared, members, extra)

    def features(at: int) -> torch.Tensor:  # weights around 1, so that a ridge weighs all rows alike
        rows = activations[at : at + ROWS, order]
        routed = rows[:, shape.shared :].unflatten(-1, (shape.experts, shape.width))
        routed.mul_(shape.experts * weights[at : at + ROWS, :, None])
        return rows

    begins = range(0, len(x), ROWS)
    start = split.down.data.T.clone()
    start[shape.shared :] /= shape.experts * weights[chosen].mean()
    wanted = target.lerp(due, pull)
    gram, moments, unfitted = torch.zeros(len(start), len(start)), torch.zeros_like(start), torch.zeros(())
    for at in begins:
        rows = features(at)
        plain = rows @ start
        gram += rows.T @ rows
        moments += rows.T @ (wanted[at : at + ROWS] - plain)
        unfitted += (plain - target[at : at + ROWS]).square().sum()
    fitted = start + solve(gram, moments, REFIT_RIDGE)
    given = torch.cat([features(at) @ fitted for at in begins])
    fitted[shape.shared :] *= shape.experts
    split.down.data = fitted.T.contiguous()
    total, scale = norms.sum(), target.square().sum()
    shares = (norms * chosen).sum() / total, norms.topk(shape.top_k, dim=-1).values.sum() / total
    errors = unfitted / scale, (given - target).square().sum() / scale
    return split, given, LayerReport(layer, *map(float, (*shares, *errors)))


def fill(
    split: SplitFeedForward, dense: Any, shared: np.ndarray, members: np.ndarray, extra: np.ndarray
) -> torch.Tensor:
    """Put a dense layer's neurons in their places; copies (``extra`` [E, W - n]) add nothing until they are fitted.

    With weights of 1 for all experts the split layer then computes what the dense one does. Returns the dense layer's
    neuron in each place, int64 [S + E W].
    """
    order = torch.from_numpy(np.concatenate([shared, np.concatenate([members, extra], 1).ravel()]))
    copy = torch.arange(split.shape.width).repeat(split.shape.experts) >= split.shape.own
    split.gate.data = dense.gate_proj.weight.data[order]
    split.up.data = dense.up_proj.weight.data[order]
    split.down.data = dense.down_proj.weight.data[:, order]
    split.down.data[:, split.shape.shared :][:, copy] = 0.0
    return order


@torch.inference_mode()
def split_model(
    dense: Any, ids: np.ndarray, shape: Shape, seed: int, told: Callable[[int, int], None], pull: float = 0.5
) -> tuple[list[SplitFeedForward], list[LayerReport]]:
    """All layers of a LlamaForCausalLM, fitted on windows int64 [N, S].

    A layer's target is what the dense layer says to the split model's state, plus ``pull`` times what it then takes to
    bring that state to the dense model's.
    """
    body = dense.model
    truth = body.embed_tokens(torch.from_numpy(ids))
    state, found, reports = truth.clone(), [], []
    for at, block in enumerate(body.layers):
        truth_mid, mid = _attended(body, block, truth), _attended(body, block, state)
        norm = block.post_attention_layernorm
        truth = truth_mid + block.mlp(norm(truth_mid))
        flat = norm(mid).flatten(0, 1)
        due = (truth - mid).flatten(0, 1)
        split, given, report = split_layer(block.mlp, flat, due, pull, shape, seed + at, at)
        state = mid + given.view_as(mid)
        found.append(split)
        reports.append(report)
        told(at + 1, len(body.layers))
    return found, reports


def _attended(body: Any, block: Any, state: torch.Tensor) -> torch.Tensor:
    """State [N, S, H] after a block's attention, a few windows at a time."""
    places = torch.arange(state.shape[1])[None]
    turned = body.rotary_emb(state, places)
    size = max(1, ROWS // state.shape[1])
    out = []
    for part in state.split(size):
        added, _ = block.self_attn(block.input_layernorm(part), position_embeddings=turned, attention_mask=None)
        out.append(part + added)
    return torch.cat(out)
