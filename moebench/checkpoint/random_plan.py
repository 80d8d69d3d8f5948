"""Which tensors a checkpoint of random weights holds, in the key layout of its format: shapes, types, laws.

Counted on an empty model; what transformers itself initialises by a rule (norms, biases, states' decays) is taken from
there. Experts' and other matrices keep the size of what passes through them (deviation 1 / sqrt of the input's width),
and embeddings outweigh what the layers add, so that hidden states differ from token to token in every layer. Knows no
family by name and writes no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from moebench.backends.torch_experts import expert_modules, router_module
from moebench.backends.torch_source import empty_model
from moebench.checkpoint.random_bits import GROUP
from moebench.errors import UsageError

SMALL = 1 << 16  # elements up to which transformers' own rule is used
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}
SIZES = {"BF16": 2, "F32": 4, "I64": 8, "I32": 4, "BOOL": 1, "U32": 4}


@dataclass(frozen=True)
class Planned:
    """One tensor of the checkpoint.

    ``kind``: one of ``RandomBits.fill``, ``router`` of a ``layer`` with experts, ``ids`` of experts by token, or
    ``given`` with its ``value``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    std: float = 0.0
    key: str = ""  # of the random bits; tensors that belong together share it
    layer: int = 0
    value: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """All tensors in the order of the files, and the layers and experts of the model."""

    tensors: tuple[Planned, ...]
    layers: int
    experts: int
    top_k: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plan(config: Mapping[str, Any], top_k: int, quant: str, seed: int) -> Plan:
    """The tensors of a model of this configuration: the hub's keys with ``quant=none``, MLX's with ``int4``."""
    model = empty_model(config, "bfloat16")
    modules = expert_modules(model)
    routers = [router_module(model, name).weight for name in modules]
    _initialise_small(model, {id(router) for router in routers}, seed)
    kept = model.state_dict(keep_vars=True)
    found = {name: tensor.detach() for name, tensor in kept.items()}
    named = revert_weight_conversion(model, found) if quant == "none" else dict(_stacked(found, modules))

    depth = model.config.get_text_config().num_hidden_layers
    deviations = {id(model.get_input_embeddings().weight): math.sqrt(2 * depth)}
    for module in modules.values():
        if module.is_transposed:
            deviations |= {id(p): 1 / math.sqrt(p.shape[1]) for p in module.parameters(recurse=False) if p.dim() == 3}
    layers = {id(router): layer for layer, router in enumerate(routers)}
    # the same tensors under their names in the checkpoint, where conversion left them as they are
    std = {id(found[name]): deviations[id(tensor)] for name, tensor in kept.items() if id(tensor) in deviations}
    layer_of = {id(found[name]): layers[id(tensor)] for name, tensor in kept.items() if id(tensor) in layers}
    if len(layer_of.keys() & {id(tensor) for tensor in named.values()}) != len(modules):
        raise UsageError(f"{type(model).__name__}: its checkpoints keep routers in a form that is not known here")
    tensors = [_planned(name, tensor, std.get(id(tensor)), layer_of.get(id(tensor))) for name, tensor in named.items()]
    if quant == "int4":
        tensors = [part for tensor in tensors for part in _quantised(tensor)]
    experts = int(next(iter(modules.values())).num_experts)  # type: ignore[arg-type]
    return Plan(tuple(sorted(tensors, key=_place)), len(modules), experts, top_k)


def _initialise_small(model: PreTrainedModel, but: set[int], seed: int) -> None:
    """Give every small tensor memory and the value that the family's own rule gives it."""
    rules = torch.Generator().manual_seed(seed).get_state()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.random.set_rng_state(rules)
        for module in model.modules():
            kept = module._non_persistent_buffers_set
            small = {n: p for n, p in module.named_parameters(recurse=False) if p.numel() <= SMALL and id(p) not in but}
            buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.numel() <= SMALL and n not in kept}
            buffers = {n: b for n, b in buffers.items() if b.is_floating_point()}  # others say which experts to take
            for name, parameter in small.items():
                empty = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
            for name, buffer in buffers.items():
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
            if small or buffers:
                model._init_weights(module)
            for name in small:  # what no rule names is a scale or an offset that changes nothing
                module.get_parameter(name).nan_to_num_(nan=1.0 if name.endswith(("weight", "scale")) else 0.0)


def _stacked(state: Mapping[str, torch.Tensor], modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """MLX's names of a Qwen3-MoE: three stacked matrices of all experts."""
    for name, tensor in state.items():
        owner, _, part = name.rpartition(".")
        if owner not in modules:
            yield name, tensor
            continue
        switch = owner.removesuffix("experts") + "switch_mlp"
        if part == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            yield f"{switch}.gate_proj.weight", gate
            yield f"{switch}.up_proj.weight", up
        else:
            yield f"{switch}.{part}.weight", tensor


def _planned(name: str, tensor: torch.Tensor, std: float | None, layer: int | None) -> Planned:
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if layer is not None:
        return Planned(name, dtype, shape, "router", layer=layer)
    if not tensor.is_meta:
        plain = tensor.contiguous().view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor.contiguous()
        return Planned(name, dtype, shape, "given", value=plain.numpy())
    if dtype not in ("BF16", "F32"):
        return Planned(name, dtype, shape, "ids")
    return Planned(name, dtype, shape, "weights", std or 1 / math.sqrt(shape[-1]), name)


def _quantised(tensor: Planned) -> Iterator[Planned]:
    """Codes, scales and biases of a matrix as MLX stores them; what is small, and routers, stay as they are."""
    if tensor.kind != "weights":
        yield tensor
        return
    *rows, columns = tensor.shape
    if columns % GROUP:
        raise UsageError(f"{tensor.name} has {columns} columns, which is no multiple of {GROUP}; take quant=none")
    path = tensor.name.removesuffix(".weight")
    yield Planned(tensor.name, "U32", (*rows, columns // 8), "codes", tensor.std, tensor.name)
    for part in ("scales", "biases"):
        yield Planned(f"{path}.{part}", "BF16", (*rows, columns // GROUP), part, tensor.std, f"{path}.scales")


def _place(tensor: Planned) -> list[tuple[int, int | str]]:
    """By layer and expert as numbers, as checkpoints are written."""
    return [(0, int(word)) if word.isdigit() else (1, word) for word in tensor.name.split(".")]
