"""Adapters as others published them, turned into this package's artefact. Needs torch.

Reads the safetensors files of one folder, keeping ``lora_A.layerN_hLAG`` [r, D] and ``lora_B.layerN_hLAG`` [n, r],
with any prefix: the names of SpecPrefetch's code (github.com/wei390/SpecPrefetch, fusion mode lora). N counts all
layers of the model, dense ones included. Routers are the model's own, read from its folder alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from moebench.artefact import sha256
from moebench.backends.torch_experts import expert_modules, router_module
from moebench.backends.torch_source import empty_model, folder_hash
from moebench.errors import UsageError
from moebench.systems.specprefetch.adapters import Shape
from moebench.systems.specprefetch.artefact import Artefact, save
from moebench.systems.specprefetch.prepare import PrepareOptions, given, place

KEY = re.compile(r"(?:.+\.)?lora_([AB])\.layer(\d+)_h([12])")
LAYER = re.compile(r"layers\.(\d+)\.")
TAKEN = ("base", "horizon")  # options that mean something to an import
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def convert(options: PrepareOptions, source: Path, folder: Path, name: str, out: Path) -> Path:
    """Write the artefact of a published folder; whatever does not fit the model at ``folder`` is one line."""
    if idle := [option for option in given(options) if option not in TAKEN]:
        raise UsageError(f"import takes {', '.join(TAKEN)}; {', '.join(idle)} would change nothing")
    found, files = _published(source)
    gates, layer_of, top_k = routers(folder)
    sides: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    for (side, number, lag), matrix in found.items():
        if number not in layer_of:
            raise UsageError(f"{source}: layer {number} of {name} has no experts; those that have: {sorted(layer_of)}")
        sides.setdefault((layer_of[number], lag), {})[side] = matrix
    whole = [pair for pair in sides.values() if len(pair) == 2]
    if len(whole) < len(sides):
        raise UsageError(f"{source}: an adapter lacks its A or its B")
    experts, hidden = gates[0].shape
    horizon = min(options.horizon, max(lag for _, lag in sides))
    shape = Shape(len(gates), experts, hidden, whole[0]["A"].shape[0], horizon, base=options.base)
    if missing := [shape.name(*pair) for pair in shape.pairs if pair not in sides]:
        raise UsageError(f"{source} lacks the adapters {', '.join(missing[:3])} of {len(shape.pairs)} for {name}")
    if beyond := [pair for pair in sides if pair[0] + pair[1] >= shape.layers]:
        raise UsageError(f"{source} predicts layer {sum(beyond[0])} of {name}, which has {shape.layers} MoE layers")
    adapters = {shape.name(*pair): (sides[pair]["A"], sides[pair]["B"]) for pair in shape.pairs}
    try:
        made = Artefact(name, folder_hash(folder), top_k, shape, adapters, gates, {"imported": files})
    except UsageError as error:
        raise UsageError(f"{source} does not fit {name}: {error}") from None
    return save(made, place(out, name, shape.kind, shape.base))


def routers(folder: Path) -> tuple[tuple[np.ndarray, ...], dict[int, int], int]:
    """Router weights fp16 [n, D] by MoE layer, MoE layer by model layer, and experts per token, of a model folder."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:  # transformers raises whatever a damaged file leads it to
        raise UsageError(f"cannot read the model at {folder}: {' '.join(str(error).split())[:200]}") from None
    model = empty_model(config, "bfloat16")
    names = {id(module): name for name, module in model.named_modules()}
    experts = list(expert_modules(model))
    wanted = [f"{names[id(router_module(model, name))]}.weight" for name in experts]
    held = _tensors(folder, set(wanted))
    if missing := [name for name in wanted if name not in held]:
        raise UsageError(f"{folder} has no tensor {missing[0]}, the router that adapters correct")
    layer_of = {int(LAYER.search(name)[1]): layer for layer, name in enumerate(experts)}
    return tuple(held[name] for name in wanted), layer_of, model.config.get_text_config().num_experts_per_tok


def _published(source: Path) -> tuple[dict[tuple[str, int, int], np.ndarray], dict[str, str]]:
    """(side, model layer, lag) to matrix, and the files' hashes."""
    found: dict[tuple[str, int, int], np.ndarray] = {}
    for key, matrix in _tensors(source, None).items():
        if matched := KEY.fullmatch(key):
            at = (matched[1], int(matched[2]), int(matched[3]))
            if at in found:
                raise UsageError(f"{source}: {matched[0]} is there twice")
            found[at] = matrix
    if not found:
        raise UsageError(f"{source} holds no adapters: tensors named lora_A.layerN_h1 and lora_B.layerN_h1")
    return found, {file.name: sha256(file) for file in sorted(source.glob("*.safetensors"))}


def _tensors(folder: Path, names: set[str] | None) -> Mapping[str, np.ndarray]:
    """Tensors of a folder's safetensors files as fp16: those named, or all that look like adapters."""
    made = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as opened:
                keys = [k for k in opened.keys() if (KEY.fullmatch(k) if names is None else k in names)]  # noqa: SIM118
                tensors = {key: opened.get_tensor(key) for key in keys}
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} is unreadable: {' '.join(str(error).split())}") from None
        for key, tensor in tensors.items():
            if tensor.dtype not in FLOATS:
                raise UsageError(f"{file}: {key} is {tensor.dtype}, not one of fp16, bf16, fp32")
            made[key] = tensor.to(torch.float16).contiguous().numpy()
    return made
