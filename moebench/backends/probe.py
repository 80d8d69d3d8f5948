"""Whether each kernel a model uses is row-invariant: do many rows at once give the bits that each row gives alone?

Only then are windows, chunks and batches bit-identical to single steps. It depends on machine, dtype, shape and
library, so it is tried, never assumed. oneDNN picks bf16 kernels by the number of rows where the machine has
AVX512-BF16, and a few elements in ten thousand differ; torch's own kernels do not, so ``plain_kernels`` leaves oneDNN
out. Knows tensors; knows no server and no pack.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moebench.backends.torch_experts import DTYPES, BackendError, ExpertLayer, combine, expert_modules, router_module
from moebench.backends.torch_geometry import alike, attention_modules, head_shape
from moebench.backends.torch_lora import branch_of
from moebench.backends.torch_routers import outer_router, routed
from moebench.backends.torch_window import always_apart, attend_paths, short_context
from moebench.store.layout import TensorSpec

ROWS = (1, 2, 3, 4, 8, 16, 33)
SEQUENCES = (2, 3, 20)  # batches of layers that carry a state; the last is what quality asks in
OUTPUTS = 50_000  # numbers compared per kernel, since a kernel that differs may do so rarely
PADDING = 13  # cached positions that are masked in front in a padded attention probe

PADDED, SHORT = ", padded", ", short context"

Kernel = Callable[[torch.Tensor], torch.Tensor]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (rows at once, the same rows alone)


@contextmanager
def plain_kernels(on: bool) -> Iterator[None]:
    """Keep oneDNN out of matrix products while the block runs, if ``on``: slower for many rows, faster for one."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = before and not on
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def probe_kernels(
    model: PreTrainedModel, stateful: Mapping[int, nn.Module], cache_name: str, exact: bool
) -> dict[str, Any]:
    """Report by kernel name: ``{"equal": bool, "max_abs_diff": float, "first_unequal_rows": int or None}``.

    ``exact``: rows attend by themselves where ``torch_window`` says so, as they do in row-invariant numerics.
    ``stateful`` are the modules with a recurrent or convolution state, by layer. A layer that is neither of these nor
    attention is an error: nothing would be known of it.
    """
    attention = attention_modules(model)
    known, layers = {*stateful, *(m.layer_idx for m in attention)}, model.config.get_text_config().num_hidden_layers
    if unknown := set(range(layers)) - known:
        raise BackendError(f"layer {min(unknown)} of {type(model).__name__} is of a kind that cannot be probed")
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        rowwise = _row_kernels(model, random)
        at = model.get_input_embeddings().weight.device
        report = {name: _compare(kernel, width, dtype, random, at) for name, kernel, width, dtype in rowwise}
        distinct = {(*head_shape(m), bool(getattr(m, "sliding_window", None))): m for m in attention}
        short, apart = short_context(model), always_apart(model)
        begun = attend_paths if apart else partial(attend_paths, short=short)
        for module in distinct.values():
            draws = [
                {
                    **_attention(module, random, short, attend_paths if exact and apart else None),
                    **_attention(module, random, 0, begun if exact else None, SHORT),
                }
                for _ in range(4)
            ]
            report |= {name: _verdict([p for draw in draws for p in draw[name]]) for name in draws[0]}
        for module, _ in alike(stateful):
            report |= _state(module, model, cache_name, random)
    return report


def require_row_invariance(report: dict[str, Any]) -> None:
    """Raise ``BackendError`` naming the first kernel of ``report`` that is not row-invariant.

    Padded attention is reported and not required: padding in front moves the terms of each row's sums, which no number
    of rows does. So a batch of unequal prompts may differ from each alone in the last bit.
    """
    for name, entry in report.items():
        if not entry["equal"] and not name.endswith(PADDED):
            rows = entry["first_unequal_rows"]
            raise BackendError(
                f"numerics=row_invariant: here kernel {name} gives other bits for {rows} rows than "
                f"one by one (by up to {entry['max_abs_diff']:.2g}); use numerics=fast, or another attention or dtype"
            )


def _compare(
    kernel: Kernel, width: int, dtype: torch.dtype, random: torch.Generator, at: torch.device
) -> dict[str, Any]:
    pairs: Pairs = []
    while sum(single.numel() for _, single in pairs) < OUTPUTS:
        x = torch.randn(max(ROWS), width, generator=random).to(at, dtype)
        single = torch.cat([kernel(x[i : i + 1]) for i in range(len(x))])
        pairs += [(kernel(x[:n]), single[:n]) for n in ROWS]
    return _verdict(pairs)


def _verdict(pairs: Pairs) -> dict[str, Any]:
    unequal = [len(many) for many, single in pairs if not torch.equal(many, single)]
    largest = max((many.float() - single.float()).abs().max().item() for many, single in pairs)
    return {"equal": not unequal, "max_abs_diff": largest, "first_unequal_rows": min(unequal, default=None)}


def _row_kernels(model: nn.Module, random: torch.Generator) -> Iterator[tuple[str, Kernel, int, torch.dtype]]:
    """Every distinct dense layer (alone or with an adapter), router, norm and expert kernel: (name, kernel, input
    width, dtype).
    """
    kernels: dict[str, tuple[str, Kernel, int, torch.dtype]] = {}
    dtype = model.get_input_embeddings().weight.dtype
    routers = {router_module(model, name): outer_router(model, name) for name in expert_modules(model)}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and not weight.is_meta and weight.dim() <= 2 and not isinstance(module, nn.Embedding):
            called = routers.get(module, module)
            name = f"{type(called).__name__} {_shape(weight)} {str(weight.dtype)[6:]}"
            if branch := branch_of(module):
                name += f" with adapter of rank {len(branch.a)}"
            kernel = routed(called) if module in routers else _first_output(module)
            kernels.setdefault(name, (name, kernel, weight.shape[-1], dtype))
    yield from kernels.values()
    if any(getattr(module, "out_features", 0) == 1 for module in model.modules()):  # gates of shared experts
        yield "sigmoid of a gate", torch.sigmoid, 1, dtype
    layers = [m.moebench for m in expert_modules(model).values() if hasattr(m, "moebench")]
    if layers:
        top_k, at = model.config.get_text_config().num_experts_per_tok, model.get_input_embeddings().weight.device
        yield from _expert_kernels(layers[0], top_k, dtype, random, at)


def _expert_kernels(layer: ExpertLayer, top_k: int, dtype: torch.dtype, random: torch.Generator, at: torch.device):
    up, up_scales, _, down, down_scales, _ = layer.views.specs
    for linear, weight, scales in ((layer.up, up, up_scales), (layer.down, down, down_scales)):
        w, s = _random_part(weight, random, at), scales and _random_part(scales, random, at)
        width = weight.shape[1] * (2 if weight.dtype == "U8" else 1)
        name = f"expert {weight.name} {_shape(weight)} {weight.dtype}"
        yield name, lambda x, linear=linear, w=w, s=s: linear(x, w, s), width, dtype
    yield "expert gate", layer.gate, up.shape[0], dtype
    hidden, weights = down.shape[0], torch.rand(1, top_k, generator=random).to(at, dtype)
    total = f"weighted sum of {top_k}"
    yield total, lambda x: combine(x.view(len(x), top_k, hidden), weights, dtype), top_k * hidden, dtype


def _random_part(spec: Any, random: torch.Generator, at: torch.device) -> Any:
    if isinstance(spec, tuple):  # scales and biases
        return tuple(_random_part(one, random, at) for one in spec)
    if spec.dtype == "BF16":
        return torch.randn(spec.shape, generator=random).bfloat16().to(at)
    return torch.randint(-128, 128, spec.shape, generator=random, dtype=torch.int8).view(DTYPES[spec.dtype]).to(at)


def _first_output(module: nn.Module) -> Kernel:
    """The module as a function of rows: a gated norm gates rows by themselves."""
    gated = "gate" in inspect.signature(module.forward).parameters

    def kernel(x: torch.Tensor) -> torch.Tensor:
        output = module(x, **({"gate": x} if gated else {}))
        return output[0] if isinstance(output, tuple) else output

    return kernel


def _attention(
    module: nn.Module, random: torch.Generator, past: int, several: Any, context: str = ""
) -> dict[str, Pairs]:
    """Causal windows against rows one by one, over ``past`` cached positions; then with masked padding against none.

    ``several`` is what more rows than one attend by, None for the family's own function.
    """
    kind = module.config._attn_implementation
    function = sys.modules[type(module).__module__].eager_attention_forward
    if kind != "eager":
        function = ALL_ATTENTION_FUNCTIONS[kind]
    heads, kv_heads, key_size, value_size = head_shape(module)
    like, most = next(module.parameters()), getattr(module, "sliding_window", None) or past + max(ROWS)
    length = past + max(ROWS)
    shapes = ((heads, max(ROWS), key_size), (kv_heads, length, key_size), (kv_heads, length, value_size))
    q, k, v = (torch.randn(1, *shape, generator=random).to(like) for shape in shapes)

    def one(row: int, start: int = 0) -> torch.Tensor:
        """A step: over what a cache that forgets beyond a sliding window holds."""
        end = past + row + 1
        cached = slice(max(start, end - most), end)
        return function(module, q[:, :, row : row + 1], k[:, :, cached], v[:, :, cached], None, scaling=module.scaling)[
            0
        ][0]

    def window(n: int, padding: int = 0) -> torch.Tensor:
        """A pass over the first ``n`` rows."""
        end, first = past + n, max(0, past + 1 - most)
        low = torch.finfo(like.dtype).min
        full = like.new_full((n, end), low)
        mask = full.triu(past + 1) + full.tril(past - most)
        mask[:, :padding] = low
        attend = several or function
        keys, values = k[:, :, first:end], v[:, :, first:end]
        return attend(module, q[:, :, :n], keys, values, mask[None, None, :, first:], scaling=module.scaling)[0][0]

    name = f"{kind} attention, {heads} heads of {key_size}{context}"
    alone = torch.cat([one(i) for i in range(max(ROWS))])
    pairs = {name: [(window(n), alone[:n]) for n in ROWS[1:]]}
    if past > PADDING:
        alone = torch.cat([one(i, start=PADDING) for i in range(max(ROWS))])
        pairs[name + PADDED] = [(window(n, padding=PADDING), alone[:n]) for n in ROWS[1:]]
    return pairs


def _state(
    module: nn.Module, model: PreTrainedModel, cache_name: str, random: torch.Generator
) -> dict[str, dict[str, Any]]:
    """Windows of one sequence against its positions one by one, and many sequences against each alone."""
    name = f"{type(module).__name__} of {sum(p.numel() for p in module.parameters())} parameters"
    parameter = next(p for p in module.parameters() if p.dim() == 2)
    hidden = model.config.get_text_config().hidden_size
    x = torch.randn(max(SEQUENCES), 5, hidden, generator=random).to(parameter)

    def run(x: torch.Tensor, *ends: int) -> torch.Tensor:
        """The passes over [B, S, H] that end at ``ends``, as rows [B * S, H]."""
        cache = DynamicCache(config=model.config)
        cuts = zip((0, *ends), ends, strict=False)
        return torch.cat([module(x[:, first:last], **{cache_name: cache}) for first, last in cuts], 1).flatten(0, 1)

    needed = -(-OUTPUTS // x[0].numel())  # sequences, and those at the ends of batches
    alone = {i: run(x[i : i + 1], 1, 2, 3, 4, 5) for i in {*range(min(needed, len(x))), *(n - 1 for n in SEQUENCES)}}
    together = [(n, run(x[:n], 1, 2, 3, 4, 5).view(n, 5, -1)) for n in SEQUENCES]
    return {
        f"{name}, windows": _verdict([(run(x[:1], *ends), alone[0]) for ends in ((5,), (1, 5), (2, 4, 5))]),
        f"{name}, batches": _verdict(
            [(out, torch.stack([alone[i] if i in alone else out[i] for i in range(n)])) for n, out in together]
        ),
    }


def _shape(tensor: torch.Tensor | TensorSpec) -> str:
    return "x".join(map(str, tensor.shape))
