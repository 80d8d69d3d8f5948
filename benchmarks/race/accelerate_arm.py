"""One arm of the race in this process: transformers with accelerate's disk offload decodes given tokens.

    python accelerate_arm.py write '{"folder": ..., "layers": N}'
    python accelerate_arm.py '{"folder": ..., "memory": BYTES, "warmup": ..., "tokens": [...]}'

For a Python that has torch, transformers and accelerate. What accelerate offloads is not quantised, so its model has
experts a quarter as wide in bf16: a layer has the bytes of the race's 4-bit layer, which favours it by the decoding and
three quarters of the arithmetic. The last line is one JSON document.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

WIDTH = 216  # 768 columns of 4.5 bits are 216 of 16
CONFIG = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8192, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": WIDTH, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def empty(layers: int) -> Any:
    """The model of so many layers without memory."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**CONFIG, "num_hidden_layers": layers}
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def write(task: dict[str, Any]) -> dict[str, Any]:
    """Random weights in the names that the model itself has, a file for each layer, so that nothing is converted."""
    import torch
    from safetensors.torch import save_file

    folder, layers = Path(task["folder"]), task["layers"]
    folder.mkdir(parents=True)
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in empty(layers).state_dict().items():
        part = name.split(".")[2] if name.startswith("model.layers.") else "outer"
        parts.setdefault(part, {})[name] = tensor
    index, total, draw = {}, 0, torch.Generator().manual_seed(0)
    for part, tensors in parts.items():
        made = {}
        for name, tensor in tensors.items():
            scale = 1.0 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            values = torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(generator=draw)
            made[name] = torch.ones_like(values) if tensor.dim() == 1 else values.mul_(scale)
            total += made[name].nbytes
        save_file(made, folder / f"{part}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(made, f"{part}.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return {"bytes": total}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Decode the tokens one by one; time and bytes after the first ``warmup``."""
    import accelerate
    import torch
    import transformers
    from accelerate import infer_auto_device_map

    from race.llama_arm import read_bytes

    torch.set_num_threads(task["threads"])
    folder = Path(task["folder"])
    shape = empty(json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    alone = ["Qwen3MoeDecoderLayer"]
    where = infer_auto_device_map(
        shape, {"cpu": task["memory"], "disk": 1 << 60}, no_split_module_classes=alone, dtype=torch.bfloat16
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=where, offload_folder=folder / "offloaded"
    ).eval()
    tokens, warmup = task["tokens"], task["warmup"]
    cache, begun, before, times = None, 0.0, 0, []
    with torch.inference_mode():
        for i, token in enumerate(tokens):
            if i == warmup:
                begun, before = time.perf_counter(), read_bytes()
            at = time.perf_counter()
            cache = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).past_key_values
            times.append(round((time.perf_counter() - at) * 1e3, 1))
    spent, count = time.perf_counter() - begun, len(tokens) - warmup
    return {
        "tok_s": count / spent,
        "tokens": count,
        "mb_token": (read_bytes() - before) / count / 1e6,
        "threads": task["threads"],
        "layers": model.config.num_hidden_layers,
        "layers_on_disk": sum(layer.mlp.experts.gate_up_proj.is_meta for layer in model.model.layers),
        "version": f"accelerate {accelerate.__version__}, transformers {transformers.__version__}",
        "steps_ms": times[warmup:],
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    work = write if sys.argv[1] == "write" else run
    print(json.dumps(work(json.loads(sys.argv[-1]))))
