"""transformers models: their configurations, empty ones, whole ones, and a pack's source over one in memory.

Knows transformers and canonical expert tensors; knows no quantisation of packs and no byte layout. Folders are packed
by ``moebench.checkpoint``, which never holds a whole model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from moebench.backends.torch_experts import BackendError, expert_modules, expert_parameters
from moebench.hashes import kept_file_hash

# stderr carries moebench's own progress and one line per mistake
logging.disable_progress_bar()
logging.set_verbosity_error()

# Model types of the hub whose own code computes what a class of transformers does.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}
MOST_LAYERS = 2048  # beyond any model; even an empty one of more takes memory
LABELS = ("num_labels", "id2label", "label2id")  # of classifiers, which nothing here is; a table of them takes memory
FLOATS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def float_type(dtype: str) -> torch.dtype:
    """The torch dtype of a model dtype by name; an error lists the valid ones."""
    if dtype not in FLOATS:
        raise BackendError(f"dtype {dtype!r} is not one of {', '.join(FLOATS)}")
    return FLOATS[dtype]


QUANTISATION = ("quantization", "quantization_config")  # how a checkpoint is quantised, in MLX's word and in the hub's


def load_model(folder: str | Path, dtype: str, attention: str = "eager") -> PreTrainedModel:
    """Load a local model folder with transformers, quantised weights as the numbers they stand for.

    Never from the network, and never running the folder's code. A family without sdpa gets eager attention for it.
    """
    config = load_config(folder)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config(config),
            dtype=float_type(dtype),
            attn_implementation=_attention(model_config(config), attention),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **_plain_weights(config),
        )
    except Exception as error:  # transformers raises whatever a damaged file leads it to
        raise BackendError(f"cannot load the model at {folder}: {_said(error)}") from None
    if missing := sorted(found["missing_keys"]):  # transformers would leave random numbers in their place
        raise BackendError(f"the model at {folder} lacks {len(missing)} tensors: {', '.join(missing[:3])}")
    return model.eval()


def load_config(folder: str | Path) -> dict[str, Any]:
    """The configuration of a model folder as it stands in its config.json."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise BackendError(f"no transformers model at {folder}: it has no config.json")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BackendError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BackendError(f"{path} is not a JSON object")
    return config


def model_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """A configuration dict as transformers' own class has it; what says where remote code lies is left out."""
    kind = config.get("model_type")
    kind = SAME_MODEL.get(kind, kind) if isinstance(kind, str) else None
    if kind not in CONFIG_MAPPING:
        raise BackendError(
            f"model type {str(config.get('model_type'))[:60]!r} is not one that this transformers version knows"
        )
    settings = {k: v for k, v in config.items() if k not in ("auto_map", "model_type", *LABELS)}
    try:
        _require_few_layers(settings)  # before lists of so many entries are made
        made = CONFIG_MAPPING[kind].from_dict(settings)
        if not 1 <= made.get_text_config().num_hidden_layers <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is not within 1 to {MOST_LAYERS}")
        return made
    except Exception as error:  # transformers raises whatever a wrong value leads it to
        raise BackendError(f"config.json of {kind}: {_said(error)}") from None


def _require_few_layers(settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where a count of layers, here or in a nested configuration, is that of no model."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _require_few_layers(value)
        elif str(name).endswith(("layer", "layers")) and isinstance(value, int | float) and value > MOST_LAYERS:
            raise ValueError(f"{name} is above {MOST_LAYERS}")


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _attention(config: PreTrainedConfig, attention: str) -> str:
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    lacks = attention == "sdpa" and family is not None and not family._supports_sdpa
    return "eager" if lacks else attention


def empty_model(config: Mapping[str, Any], dtype: str, attention: str = "eager") -> PreTrainedModel:
    """The model of a configuration dict with every tensor on the meta device: shapes and no memory.

    A family without sdpa gets eager attention for it.
    """
    plain = {k: v for k, v in config.items() if k not in QUANTISATION}  # it has the plain weights
    settings = model_config(plain)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                settings,
                dtype=float_type(dtype),
                attn_implementation=_attention(settings, attention),
                trust_remote_code=False,
            ).eval()
    except Exception as error:  # as above, and of model types that generate no text
        raise BackendError(f"no model of this {settings.model_type} configuration: {_said(error)}") from None


def _plain_weights(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes transformers decode the quantised weights that moebench decodes too."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    plain = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
    return {"quantization_config": plain[method](dequantize=True)} if method in plain else {}


def expert_names(model: nn.Module) -> set[str]:
    """Full names of all parameters that belong to routed experts."""
    return {f"{name}.{part}" for name, m in expert_modules(model).items() for part in expert_parameters(m)}


class TransformersSource:
    """An ``ExpertSource`` over a model that is in memory, with the canonical tensors of ``CheckpointSource``."""

    def __init__(self, model: PreTrainedModel, dtype: str = "bfloat16") -> None:
        self._model, self._modules = model, list(expert_modules(model).values())
        self.layers, self.experts = len(self._modules), int(self._modules[0].num_experts)  # type: ignore[arg-type]
        config = model.config.to_dict()
        config.pop("_name_or_path", None)
        facts = {"name": type(model).__name__, "config": config, "weights_hash": _parameters_hash(model)}
        self._dtype, self.model = dtype, {**facts, "dtype": dtype}

    def expert(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Canonical tensors of one expert, fp32 [out, in] or [out]."""
        module, tensors = self._modules[layer], {}
        for name, parameter in expert_parameters(module).items():
            value = parameter.detach()[expert].to(float_type(self._dtype)).float()
            turned = value.T if module.is_transposed and value.dim() == 2 else value
            tensors[name] = turned.contiguous().numpy()
        return tensors

    def write_dense(self, path: Path) -> int:
        """Write all other parameters and persistent buffers, tied ones once; returns the file's bytes.

        Each tensor has the dtype that the family gives it in a model of this dtype: some keep float32.
        """
        routed, wanted = expert_names(self._model), empty_model(self.model["config"], self._dtype).state_dict()
        tensors, seen = {}, set()
        for name, tensor in self._model.state_dict().items():
            if name not in routed and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensors[name] = tensor.detach().to(wanted[name].dtype).contiguous()
        save_file(tensors, path)
        return Path(path).stat().st_size


def folder_hash(folder: Path) -> str:
    """The ``weights_hash`` of a model folder: names and contents of its safetensors files."""
    digest = xxhash.xxh3_128()
    for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        digest.update(f"{path.name}\0{kept_file_hash(path)}\0".encode())
    return digest.hexdigest()


def _parameters_hash(model: nn.Module) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
