"""Peak memory and time of ``moebench pack`` on a large sharded checkpoint of random weights, in a fresh process.

    python benchmarks/pack_memory.py [gib=4] [quant=int4] [cgroup_mib=0] [folder=/tmp/...]

Writes a Qwen3-MoE checkpoint of about that size (repeated random blocks, so that it is written at disk speed), packs it
and reports the peak of the process (VmHWM) above that of one which only imports torch, beside the bytes of one layer's
experts, which the peak may reach and 512 MiB more. With ``cgroup_mib`` the packing runs under that limit of a memory
cgroup (v1, needs root), which counts the page cache too. The last line is one JSON document.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

GIB, MIB = 1 << 30, 1 << 20
HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY = 2048, 768, 64, 32000
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": EXPERTS, "num_experts_per_tok": 4,
    "moe_intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
}  # fmt: skip
CHILD = """
import sys, resource, torch
if sys.argv[1:]:
    from moebench.cli import main
    code = main(sys.argv[1:])
    assert code == 0, code
peak = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'))
print(int(peak.split()[1]) * 1024, file=sys.stderr)
"""


def shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer, in the hub's names."""
    at = f"model.layers.{layer}"
    found: dict[str, tuple[int, ...]] = {
        f"{at}.self_attn.q_proj.weight": (2048, HIDDEN),
        f"{at}.self_attn.k_proj.weight": (512, HIDDEN),
        f"{at}.self_attn.v_proj.weight": (512, HIDDEN),
        f"{at}.self_attn.o_proj.weight": (HIDDEN, 2048),
        f"{at}.self_attn.q_norm.weight": (128,),
        f"{at}.self_attn.k_norm.weight": (128,),
        f"{at}.input_layernorm.weight": (HIDDEN,),
        f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        f"{at}.mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for e in range(EXPERTS):
        for name, shape in (
            ("gate", (INTERMEDIATE, HIDDEN)),
            ("up", (INTERMEDIATE, HIDDEN)),
            ("down", (HIDDEN, INTERMEDIATE)),
        ):
            found[f"{at}.mlp.experts.{e}.{name}_proj.weight"] = shape
    return found


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], block: np.ndarray) -> None:
    """A safetensors file of bf16 tensors whose bytes are the block over and over."""
    header, end = {}, 0
    for name, shape in tensors.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end:
            file.write(block[: min(end, block.nbytes)].data)
            end -= min(end, block.nbytes)


def write_checkpoint(folder: Path, gib: float) -> int:
    """A checkpoint of about that size, a shard for each layer; returns its layers."""
    layer_bytes = 2 * sum(int(np.prod(s)) for s in shapes(0).values())
    layers = max(1, round(gib * GIB / layer_bytes))
    weights = np.random.default_rng(0).standard_normal(8 * MIB, np.float32) * 0.02
    block = (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    ends = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    files = {f"model-{i + 1:05}-of-{layers + 1:05}.safetensors": shapes(i) for i in range(layers)}
    files[f"model-{layers + 1:05}-of-{layers + 1:05}.safetensors"] = ends
    for name, tensors in files.items():
        write_shard(folder / name, tensors, block)
    index = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return layers


def peak(words: list[str], limit: int = 0) -> tuple[int, float]:
    """Peak resident bytes and seconds of a fresh interpreter with torch that runs ``moebench WORDS``."""
    group = Path("/sys/fs/cgroup/memory") / f"moebench-pack-{os.getpid()}"
    if limit:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    try:
        start = time.perf_counter()
        enter = (lambda: (group / "cgroup.procs").write_text(str(os.getpid()))) if limit else None
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, preexec_fn=enter, check=False
        )
        seconds = time.perf_counter() - start
    finally:
        if limit:
            group.rmdir()
    if done.returncode:
        raise SystemExit(f"packing ended with {done.returncode}: {done.stderr[-500:]}")
    return int(done.stderr.splitlines()[-1]), seconds


def main() -> None:
    """Write, pack, report, remove."""
    words = {"gib": "4", "quant": "int4", "cgroup_mib": "0", "folder": tempfile.gettempdir()}
    words |= dict(word.split("=", 1) for word in sys.argv[1:])
    scratch = Path(tempfile.mkdtemp(prefix="moebench-pack-", dir=words["folder"]))
    try:
        (scratch / "model").mkdir()
        start = time.perf_counter()
        layers = write_checkpoint(scratch / "model", float(words["gib"]))
        written = time.perf_counter() - start
        nbytes = sum(f.stat().st_size for f in (scratch / "model").iterdir())
        print(f"checkpoint of {nbytes / GIB:.2f} GiB, {layers} layers, written in {written:.0f} s")
        base, _ = peak([])
        pack = ["pack", f"model={scratch / 'model'}", f"out={scratch / 'pack'}", f"quant={words['quant']}"]
        top, seconds = peak(pack, int(words["cgroup_mib"]) * MIB)
        layer = EXPERTS * 6 * HIDDEN * INTERMEDIATE
        limit = layer + 512 * MIB
        print(f"packed in {seconds:.0f} s, {nbytes / seconds / 1e6:.0f} MB/s of checkpoint, quant {words['quant']}")
        print(
            f"peak {top / MIB:.0f} MiB, {(top - base) / MIB:.0f} above torch alone; one layer's experts are "
            f"{layer / MIB:.0f} MiB, the bound is {limit / MIB:.0f}: {'kept' if top - base <= limit else 'BROKEN'}"
        )
        facts = {"checkpoint_bytes": nbytes, "layers": layers, "quant": words["quant"], "pack_s": round(seconds, 1)}
        print(json.dumps({**facts, "peak_bytes": top, "above_torch_bytes": top - base, "bound_bytes": limit}))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
