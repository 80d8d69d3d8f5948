"""The dense model with split feed-forward layers, as torch computes it while it is made.

Experts are computed all at once and weighed by zero where they do not run: on a batch of text that is faster than
gathering, and equals what qwen2_moe computes. Knows tensors; knows no text and no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moebench.errors import UsageError


@dataclass(frozen=True)
class Shape:
    """How the neurons of a feed-forward layer are split.

    ``shared`` neurons run for every token. The others form ``experts`` of ``width`` rows, of which ``top_k`` run;
    rows beyond an expert's own neurons are filled with copies of others.
    """

    neurons: int = 1536
    hidden: int = 576
    shared: int = 384
    experts: int = 24
    top_k: int = 12
    width: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.experts:
            raise UsageError(f"top_k={self.top_k} is not in 1..{self.experts} (experts)")
        if not 0 < self.shared < self.neurons or (self.neurons - self.shared) % self.experts:
            raise UsageError(f"{self.neurons - self.shared} neurons do not form {self.experts} experts of equal size")
        if self.width < self.own:
            raise UsageError(f"experts of {self.own} neurons do not fit a width of {self.width}")

    @property
    def own(self) -> int:
        """Neurons that an expert has for itself."""
        return (self.neurons - self.shared) // self.experts


class SplitFeedForward(nn.Module):
    """shared(x) + sum over the chosen experts of w_e(x) expert_e(x), where w is a softmax over all experts' logits.

    Weights: ``router`` [E, H]; ``gate``, ``up`` [S + E W, H], shared rows first; ``down`` [H, S + E W].
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        rows = shape.shared + shape.experts * shape.width
        self.shape = shape
        self.router = nn.Parameter(torch.zeros(shape.experts, shape.hidden))
        self.gate = nn.Parameter(torch.zeros(rows, shape.hidden))
        self.up = nn.Parameter(torch.zeros(rows, shape.hidden))
        self.down = nn.Parameter(torch.zeros(shape.hidden, rows))

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """What each expert counts for each row of x [..., H]: [..., E], zero where it does not run."""
        share = F.linear(x, self.router).float().softmax(-1)
        best = share.topk(self.shape.top_k, dim=-1).indices
        return share * torch.zeros_like(share).scatter_(-1, best, 1.0)

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """Weighed inner activations [..., S + E W] of x [..., H]: the output is linear in them."""
        inner = F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)
        shared, routed = inner.split([self.shape.shared, inner.shape[-1] - self.shape.shared], dim=-1)
        weighed = routed.unflatten(-1, (self.shape.experts, self.shape.width)) * self.weights(x)[..., None]
        return torch.cat([shared, weighed.flatten(-2)], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] of x [..., H]."""
        return F.linear(self.activations(x), self.down)


def copy_of(dense: Any) -> Any:
    """A LlamaForCausalLM of the same configuration, dtype and weights, which shares nothing with ``dense``."""
    from transformers import LlamaForCausalLM

    fresh = LlamaForCausalLM(dense.config).to(dense.dtype)
    fresh.load_state_dict(dense.state_dict())
    return fresh.eval()


def install(dense: Any, layers: list[SplitFeedForward]) -> Any:
    """``dense`` (LlamaForCausalLM) with its feed-forward layers replaced; changed in place and returned."""
    for block, layer in zip(dense.model.layers, layers, strict=True):
        block.mlp = layer
    return dense


def to_qwen2_moe(student: Any, dtype: torch.dtype) -> Any:
    """The same model as transformers' Qwen2MoeForCausalLM in ``dtype``.

    Its attention has biases, here zero; its shared expert stands behind a sigmoid gate, here of zeros and so 1/2, which
    a doubled down projection undoes. Input and output embeddings are written apart, since mlx-lm ties them in no
    qwen2_moe.
    """
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    old, shape = student.config, student.model.layers[0].mlp.shape
    config = Qwen2MoeConfig(
        vocab_size=old.vocab_size, hidden_size=old.hidden_size, intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers, num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads, max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=old.rms_norm_eps, rope_parameters=dict(old.rope_parameters), tie_word_embeddings=False,
        moe_intermediate_size=shape.width, shared_expert_intermediate_size=shape.shared, num_experts=shape.experts,
        num_experts_per_tok=shape.top_k, norm_topk_prob=False, decoder_sparse_step=1, use_sliding_window=False,
        bos_token_id=old.bos_token_id, eos_token_id=old.eos_token_id, pad_token_id=old.pad_token_id,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config).to(dtype)
    state = {name: value for name, value in student.state_dict().items() if ".mlp." not in name}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for at, block in enumerate(student.model.layers):
        state |= {f"model.layers.{at}.mlp.{name}": value for name, value in _feed_forward(block.mlp).items()}
    for name, value in model.state_dict().items():
        value.copy_(state[name] if name in state else torch.zeros_like(value))
    return model.eval()


def _feed_forward(layer: SplitFeedForward) -> dict[str, torch.Tensor]:
    """A split layer in the names of transformers' qwen2_moe."""
    s, e, w = layer.shape.shared, layer.shape.experts, layer.shape.width
    gate, up = (matrix[s:].unflatten(0, (e, w)) for matrix in (layer.gate, layer.up))
    return {
        "gate.weight": layer.router,
        "experts.gate_up_proj": torch.cat([gate, up], dim=1),
        "experts.down_proj": layer.down[:, s:].unflatten(1, (e, w)).transpose(0, 1),
        "shared_expert.gate_proj.weight": layer.gate[:s],
        "shared_expert.up_proj.weight": layer.up[:s],
        "shared_expert.down_proj.weight": 2 * layer.down[:, :s],
        "shared_expert_gate.weight": torch.zeros(1, layer.shape.hidden),
    }
