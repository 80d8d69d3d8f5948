"""What a model folder is to whoever fits or imports an artefact for it: its shape and hash. Needs torch."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PreTrainedModel

from moebench.backends.torch_experts import expert_modules, router_module
from moebench.backends.torch_source import empty_model, folder_hash
from moebench.errors import MoebenchError, UsageError
from moebench.systems.edge0.artefact import Base


def open_base(folder: Path, name: str, quant: str) -> tuple[Base, PreTrainedModel]:
    """The base of a model folder, and the model on the meta device: names and shapes without numbers."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as error:  # transformers raises whatever a damaged file leads it to
        raise MoebenchError(f"cannot read the model at {folder}: {' '.join(str(error).split())[:300]}") from None
    model = empty_model(config, "bfloat16")
    modules = expert_modules(model)
    experts, hidden = router_module(model, next(iter(modules))).weight.shape
    native = model.config.get_text_config().num_experts_per_tok
    return Base(name, folder_hash(folder), len(modules), experts, hidden, native, quant), model


def served_top_k(base: Base, k: int) -> int:
    """Experts per token that heads are for: ``k``, or half of the model's own for 0."""
    chosen = k or max(1, base.native_top_k // 2)
    if not 1 <= chosen <= base.native_top_k:
        raise UsageError(
            f"edge0: k={k} is not within 1..{base.native_top_k}, the experts that {base.model} runs itself"
        )
    return chosen
