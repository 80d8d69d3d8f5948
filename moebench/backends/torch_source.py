"""Where a pack's weights come from: a local transformers model, read expert by expert.

Loads the whole model into memory once, to pack it. Knows transformers and canonical expert tensors; knows no
quantisation and no byte layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from moebench.backends.torch_experts import BackendError, expert_modules, expert_parameters
from moebench.store.pack import file_hash

# stderr carries moebench's own progress and one line per mistake
logging.disable_progress_bar()
logging.set_verbosity_error()

FLOATS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def float_type(dtype: str) -> torch.dtype:
    """The torch dtype of a model dtype by name; an error lists the valid ones."""
    if dtype not in FLOATS:
        raise BackendError(f"dtype {dtype!r} is not one of {', '.join(FLOATS)}")
    return FLOATS[dtype]


def load_model(folder: str | Path, dtype: str, attention: str = "eager") -> PreTrainedModel:
    """Load a local model folder with transformers as it is, never from the network and never running its code."""
    if not (Path(folder) / "config.json").is_file():
        raise BackendError(f"no transformers model at {folder}: it has no config.json")
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=float_type(dtype),
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever a damaged file leads it to
        raise BackendError(f"cannot load the model at {folder}: {' '.join(str(error).split())[:300]}") from None
    if missing := sorted(found["missing_keys"]):  # transformers would leave random numbers in their place
        raise BackendError(f"the model at {folder} lacks {len(missing)} tensors: {', '.join(missing[:3])}")
    return model.eval()


def empty_model(config: Mapping[str, Any], dtype: str, attention: str = "eager") -> PreTrainedModel:
    """The model of a configuration dict with every tensor on the meta device: shapes and no memory."""
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise BackendError(f"model type {kind!r} is not one that this transformers version knows")
    settings = {k: v for k, v in config.items() if k != "quantization_config"}  # packs hold the plain weights
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[kind].from_dict(settings),
            dtype=float_type(dtype),
            attn_implementation=attention,
            trust_remote_code=False,
        ).eval()


def expert_names(model: nn.Module) -> set[str]:
    """Full names of all parameters that belong to routed experts."""
    return {f"{name}.{part}" for name, m in expert_modules(model).items() for part in expert_parameters(m)}


class TransformersSource:
    """An ``ExpertSource`` over a model folder, or over a model that is in memory already.

    Canonical tensors per expert: ``gate_up_proj`` [2I, H] (rows as the family orders them) or ``up_proj`` [I, H],
    ``down_proj`` [H, I], and their ``_bias`` vectors; families that store them transposed are turned.
    """

    def __init__(self, model: str | Path | PreTrainedModel, dtype: str = "bfloat16") -> None:
        if isinstance(model, PreTrainedModel):
            name, digest, self._model = type(model).__name__, _parameters_hash(model), model
        else:
            self._model = load_model(model, dtype)
            name, digest = Path(model).resolve().name, folder_hash(Path(model))
        self._modules = list(expert_modules(self._model).values())
        self.layers, self.experts = len(self._modules), int(self._modules[0].num_experts)  # type: ignore[arg-type]
        config = self._model.config.to_dict()
        config.pop("_name_or_path", None)
        self._dtype, self.model = dtype, {"name": name, "config": config, "weights_hash": digest, "dtype": dtype}

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
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}\0{file_hash(path)}\0".encode())
    return digest.hexdigest()


def _parameters_hash(model: nn.Module) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
