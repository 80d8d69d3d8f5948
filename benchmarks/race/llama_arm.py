"""One arm of the race in this process: llama.cpp decodes given tokens from a GGUF file, memory-mapped.

    python llama_arm.py '{"gguf": ..., "threads": 2, "warmup": ..., "tokens": [...]}'

For a Python that has llama-cpp-python. The last line is one JSON document. Bytes read are those that the kernel charged
to this process, page faults and what it read ahead for them included.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any


def read_bytes() -> int:
    """Bytes that storage was asked for on behalf of this process."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Decode the tokens one by one; time and bytes after the first ``warmup``."""
    import llama_cpp as llama

    quiet = llama.llama_log_callback(lambda level, text, data: None)
    if not task.get("verbose"):
        llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    options = llama.llama_model_default_params()
    options.n_gpu_layers = 0
    options.load_mode = llama.LLAMA_LOAD_MODE_MMAP
    options.use_extra_bufts = False  # no copy of the weights in another order
    started = time.perf_counter()
    model = llama.llama_model_load_from_file(task["gguf"].encode(), options)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {task['gguf']}")
    tokens, warmup = task["tokens"], task["warmup"]
    sizes = llama.llama_context_default_params()
    sizes.n_ctx, sizes.n_batch, sizes.n_ubatch = 256 * -(-len(tokens) // 256), 32, 32
    sizes.n_threads = sizes.n_threads_batch = task["threads"]
    context = llama.llama_init_from_model(model, sizes)
    loaded = time.perf_counter() - started
    begun, before, times = 0.0, 0, []
    for i, token in enumerate(tokens[:-1]):  # the last one is an answer's, never an input
        if i == warmup + 1:
            begun, before = time.perf_counter(), read_bytes()
        at = time.perf_counter()
        batch = llama.llama_batch_get_one((ctypes.c_int32 * 1)(token), 1)
        if (code := llama.llama_decode(context, batch)) != 0:
            raise SystemExit(f"llama_decode ended with {code}")
        llama.llama_synchronize(context)
        times.append(round((time.perf_counter() - at) * 1e3, 1))
    spent, count = time.perf_counter() - begun, len(tokens) - 2 - warmup
    return {
        "tok_s": count / spent,
        "tokens": count,
        "mb_token": (read_bytes() - before) / count / 1e6,
        "threads": task["threads"],
        "load_s": loaded,
        "version": llama.__version__,
        "system": llama.llama_print_system_info().decode(),
        "steps_ms": times[warmup + 1 :],
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
