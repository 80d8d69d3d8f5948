"""Tiny checkpoints as mlx-lm writes them, quantised or not, from the tiny hub checkpoints of ``family_checkpoints``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from family_checkpoints import make_checkpoint
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from moebench.backends.mlx_load import plain_config

Predicate = Callable[[str, Any], Any]
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip


def mlx_folder(
    family: str,
    folder: Path,
    quant: Mapping[str, Any] | None = None,
    predicate: Predicate | None = None,
    **changes: Any,
) -> Path:
    """Write ``FOLDER/hub`` and its conversion ``FOLDER/mlx``; ``quant`` has bits, group_size and mode, None: plain."""
    if family == "deepseek_v2":  # mlx-lm's cannot do without
        changes = {"rope_parameters": YARN, **changes}
    hub = make_checkpoint(family, folder / "hub", **changes)
    config = plain_config(json.loads((hub / "config.json").read_text()))
    source = hub
    if family == "glm4_moe":
        config.setdefault("partial_rotary_factor", 0.5)
    if family == "qwen3_5_moe":
        source = _multimodal(hub, folder / "multimodal")
        config = {"model_type": "qwen3_5_moe", "text_config": config}
    model, config = load_model(source, lazy=True, model_config=config)
    if quant is not None:
        model, config = quantize_model(
            model, config, quant.get("group_size", 64), quant["bits"], quant.get("mode", "affine"),
            quant_predicate=predicate,
        )  # fmt: skip
    save_model(folder / "mlx", model)
    save_config(config, folder / "mlx" / "config.json")
    for path in hub.glob("token*.json"):
        shutil.copy(path, folder / "mlx" / path.name)
    return folder / "mlx"


def _multimodal(hub: Path, folder: Path) -> Path:
    """The same checkpoint as the hub has it: inside a multimodal model, with stacked experts."""
    tensors = arrays(hub)
    for block in {name.rpartition(".experts.0.")[0] for name in tensors if ".experts.0." in name}:
        matrices = {}
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = sorted(n for n in tensors if n.startswith(f"{block}.experts.") and n.endswith(f"{part}.weight"))
            matrices[part] = mx.stack([tensors.pop(name) for name in names])
        tensors[f"{block}.experts.gate_up_proj"] = mx.concatenate([matrices["gate_proj"], matrices["up_proj"]], axis=1)
        tensors[f"{block}.experts.down_proj"] = matrices["down_proj"]
    folder.mkdir()
    found = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), found)
    shutil.copy(hub / "config.json", folder / "config.json")
    return folder


def arrays(folder: Path) -> dict[str, mx.array]:
    """All tensors of a folder, as mlx reads them."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in mx.load(str(path)).items()}


def dequantised(tensors: Mapping[str, mx.array], config: Mapping[str, Any], path: str) -> mx.array:
    """What mlx makes of ``PATH.weight``, in fp32 throughout."""
    weight = tensors[f"{path}.weight"]
    if f"{path}.scales" not in tensors:
        return weight.astype(mx.float32)
    form = config["quantization"].get(path) or config["quantization"]
    mode = form.get("mode") or "affine"
    settings = {"group_size": form["group_size"], "bits": form["bits"], "mode": mode}
    if mode != "affine":
        return mx.dequantize(weight, tensors[f"{path}.scales"], dtype=mx.float32, **settings)
    numbers = [tensors[f"{path}.{name}"].astype(mx.float32) for name in ("scales", "biases")]
    return mx.dequantize(weight, *numbers, **settings)
