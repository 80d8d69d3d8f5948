"""From a configuration and a file of dense weights to a model of mlx-lm whose experts are not there.

The file holds a checkpoint's own keys, so that mlx-lm's own ``sanitize`` takes them. Knows names and shapes; knows no
expert's bytes and no pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.utils import _get_classes, infer_quant_config

from moebench.backends.base import BackendError

SCALES = ".weight_scale_inv"
SELECTION = "e_score_correction_bias"
# what mlx-lm's model does, whatever a configuration says
IGNORED: dict[str, dict[str, Any]] = {"qwen2_moe": {"norm_topk_prob": False}, "olmoe": {"clip_qkv": None}}
ROUTED = (".experts.", ".switch_mlp.", ".input_linear.", ".output_linear.")


def on_gpu() -> bool:
    """Whether mlx computes on a GPU here."""
    return mx.default_device().type == mx.gpu


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the names of older transformers beside the newer ones, since mlx-lm reads those."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = dict(config)
    if config.get("model_type") in CONFIG_MAPPING:
        for names in (CONFIG_MAPPING[config["model_type"]].attribute_map or {}).items():
            for one, other in (names, names[::-1]):
                if one in config and other not in config:
                    found[other] = config[one]
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and "rope_type" in rope:
        found |= {k: v for k, v in rope.items() if k in ("rope_theta", "partial_rotary_factor") and k not in config}
        if rope["rope_type"] != "default":
            found.setdefault("rope_scaling", {**rope, "type": rope["rope_type"]})
    found.setdefault("rope_scaling", None)
    kinds = config.get("layer_types") or ()
    if "linear_attention" in kinds and "full_attention" in kinds:
        found["full_attention_interval"] = every = kinds.index("full_attention") + 1
        if any((kind == "full_attention") != ((i + 1) % every == 0) for i, kind in enumerate(kinds)):
            raise BackendError(f"mlx-lm wants full attention in every {every}th layer, this model's are {kinds}")
    if isinstance(config.get("text_config"), Mapping):
        found["text_config"] = plain_config(config["text_config"])
    return found


def empty_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration; mlx makes its random weights only when they are used, so none take memory."""
    kind = str(config.get("model_type"))
    try:
        try:
            model_class, arguments = _get_classes(dict(config))
        except ValueError:
            model_class, arguments = _get_classes({**config, "model_type": kind.removesuffix("_text")})
    except ValueError as error:
        raise BackendError(f"mlx-lm has no model type {kind!r}; use backend=torch") from error
    for name, fixed in IGNORED.get(kind, {}).items():
        if config.get(name, fixed) != fixed:
            raise BackendError(
                f"mlx-lm's {kind} runs with {name}={fixed}, the model has {config[name]}; use backend=torch"
            )
    try:
        model = model_class(arguments.from_dict(dict(config)))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise BackendError(f"mlx-lm does not read this {kind!r} configuration: {error}; use backend=torch") from None
    if unread := _unread(model, config.get("text_config") or config):
        raise BackendError(f"mlx-lm's {kind} {unread}; use backend=torch")
    return model


def _unread(model: nn.Module, config: Mapping[str, Any]) -> str:
    """What a configuration says of positions and windows and the model of it does not do; empty where all is done."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):  # mrope is the default's for text
        if (found := _ropes(model)) and all(isinstance(module, nn.RoPE) and module.scale == 1 for module in found):
            return f"does not scale positions as the model does ({kind})"
        if rope.get("short_factor") != rope.get("long_factor"):
            return f"takes the long factors of {kind} at every length"
    window = config.get("sliding_window") if config.get("use_sliding_window") is not False else None
    slides = "sliding_attention" in (config.get("layer_types") or ("sliding_attention",))
    matters = type(window) is int and slides and window < config.get("max_position_embeddings", 0)
    if matters and not any(isinstance(cache, RotatingKVCache) for cache in make_prompt_cache(model)):
        return f"attends to everything, the model to a window of {window}"
    return ""


def _ropes(model: nn.Module) -> list[nn.Module]:
    return [module for path, module in model.named_modules() if path.rpartition(".")[2] == "rope"]


def switches(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold routed experts, by path, in layer order."""
    found = {path: m for path, m in model.named_modules() if isinstance(m, SwitchGLU | SwitchMLP)}
    if not found:
        raise BackendError(f"{model.model_type} has no SwitchGLU or SwitchMLP in mlx-lm; use backend=torch")
    if odd := {type(m).__name__ for m in found.values()} - {"SwitchGLU", "SwitchMLP"}:
        raise BackendError(f"{model.model_type} has switches of its own ({', '.join(odd)}); use backend=torch")
    return dict(sorted(found.items(), key=lambda item: [int(p) if p.isdigit() else -1 for p in item[0].split(".")]))


def owner(model: nn.Module, path: str) -> tuple[Any, Any]:
    """What holds the module at ``path``, a module or a list, and its key there."""
    *above, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in above:
        model = model[part]
    return model, last


def load_dense(
    model: nn.Module, paths: Mapping[str, nn.Module], config: Mapping[str, Any], converted: bool, *files: Path
) -> int:
    """Fill a model, whose switches at ``paths`` were taken out, from ``files``; floats are float32 on a CPU. Returns
    the bytes of its parameters as they were stored.

    Raises ``BackendError`` naming tensors that are left without a value, or that the model does not have.
    """
    weights = _plain({name: value for file in files for name, value in mx.load(str(file)).items()})
    blocks = [path.rpartition(".")[0] for path in paths]
    biases = [value for name, value in weights.items() if name.endswith(SELECTION)]
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights if converted else {**weights, **_stand_ins(paths, config)})
    if any(value.any() for value in biases) and not any(name.endswith(SELECTION) for name in weights):
        raise BackendError(f"mlx-lm's {model.model_type} leaves out {SELECTION}; use backend=torch")
    inside = tuple(block + part for block in blocks for part in ROUTED) + tuple(f"{path}." for path in paths)
    weights = {name: value for name, value in weights.items() if not name.startswith(inside)}
    if (quantization := config.get("quantization")) is not None:
        _quantize(model, quantization, weights)
    wanted = dict(tree_flatten(model.parameters()))
    for what, names in (("no values for", wanted.keys() - weights.keys()), ("unknown", weights.keys() - wanted.keys())):
        if names:
            raise BackendError(f"{files[0]}: {what} {', '.join(sorted(names)[:5])} in mlx-lm's {model.model_type}")
    if odd := [name for name, value in weights.items() if value.shape != wanted[name].shape]:
        raise BackendError(f"{files[0]}: {odd[0]} is {weights[odd[0]].shape}, mlx-lm's is {wanted[odd[0]].shape}")
    model.load_weights(list(weights.items()), strict=False)
    if not on_gpu():
        model.set_dtype(mx.float32)
    model.eval()
    mx.eval(model.parameters())
    return sum(value.nbytes for value in weights.values())


def _plain(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """``weights`` without FP8: values in blocks with one scale each (``weight_scale_inv``) as bfloat16."""
    found = {name: value for name, value in weights.items() if not name.endswith(SCALES)}
    for name in weights.keys() - found.keys():
        value, scale = weights[name.removesuffix("_scale_inv")], weights[name]
        rows, columns = (-(-size // count) for size, count in zip(value.shape, scale.shape, strict=True))
        scale = mx.repeat(mx.repeat(scale, rows, 0), columns, 1)[: value.shape[0], : value.shape[1]]
        wide = mx.from_fp8(value, dtype=mx.float32) * scale
        found[name.removesuffix("_scale_inv")] = wide.astype(mx.bfloat16)
    return found


def _stand_ins(paths: Mapping[str, nn.Module], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Names under which a hub checkpoint would hold its experts, with next to nothing in them.

    Several ``sanitize`` tell by those whether a checkpoint is a hub's, whose norms and convolutions they must convert.
    """
    found: dict[str, mx.array] = {}
    for path, switch in paths.items():
        block, fused = path.rpartition(".")[0], mx.zeros((1, 2, 1))
        if config["model_type"] == "granitemoe":
            found |= {f"{block}.input_linear.weight": fused, f"{block}.output_linear.weight": fused}
            continue
        names = (
            ("w1", "w2", "w3")
            if config["model_type"] in ("mixtral", "phimoe")
            else ("gate_proj", "up_proj", "down_proj")
        )
        experts = (switch.gate_proj if isinstance(switch, SwitchGLU) else switch.fc1).num_experts
        found |= {f"{block}.experts.{e}.{n}.weight": fused[0] for e in range(experts) for n in names}
    return found


def _quantize(model: nn.Module, quantization: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Give every layer whose weights are quantised the module for it, as the checkpoint says."""

    def form(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        named = quantization.get(path)
        return dict(named) if isinstance(named, Mapping) else infer_quant_config(path, module, weights)

    nn.quantize(model, quantization["group_size"], quantization["bits"], class_predicate=form)
