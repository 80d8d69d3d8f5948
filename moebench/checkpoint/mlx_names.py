"""An MLX checkpoint's dense weights as the hub's checkpoint has them: quantised ones as bf16, changed ones restored.

mlx-lm renames and changes tensors when it converts a model (``sanitize`` of its model modules). Only families whose
changes are known here, and can be undone exactly, are seen under the hub's names; others run on backend=mlx alone.
Knows tensors by name and by rows, as ``checkpoint.decode`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moebench.checkpoint.decode import Seen
from moebench.checkpoint.files import Checkpoint
from moebench.checkpoint.mlx_quant import MlxTensors
from moebench.store.engines import StoreError
from moebench.store.quant import from_bf16, to_bf16

# Model types whose dense tensors mlx-lm keeps as they are, or renames only.
RENAMED = (
    "qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "phimoe", "granitemoe", "deepseek_v2", "glm4_moe", "dots1", "gpt_oss",
)  # fmt: skip
LATENT = ("deepseek_v3", "kimi_k2")  # kv_b_proj is two, one of them turned
SHIFTED = ("qwen3_next", "qwen3_5_moe")  # norms have 1 added
CONVOLVED = (*SHIFTED, "lfm2_moe")  # convolutions are [channels, width, 1] instead of [channels, 1, width]
NORMS = (
    ".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight",
    ".k_norm.weight",
)  # fmt: skip
RENAMINGS = (  # model type, mlx's path, the hub's
    ("lfm2_moe", re.compile(r"(\.feed_forward)\.gate_proj$"), r"\1.w1"),
    ("lfm2_moe", re.compile(r"(\.feed_forward)\.down_proj$"), r"\1.w2"),
    ("lfm2_moe", re.compile(r"(\.feed_forward)\.up_proj$"), r"\1.w3"),
    ("qwen3_5_moe", re.compile(r"^language_model\."), ""),
)
Read = Callable[[int, int | None], np.ndarray]


class HubView:
    """What ``decode.Decoded`` is to a hub's folder: tensors by the hub's names, ``read`` in rows."""

    def __init__(self, checkpoint: Checkpoint, routed: set[str]) -> None:
        self.checkpoint, self._mlx = checkpoint, MlxTensors(checkpoint)
        self.kind = str(checkpoint.config.get("model_type"))
        if self.kind not in {*RENAMED, *LATENT, *CONVOLVED}:
            raise StoreError(
                f"{checkpoint.folder}: how mlx-lm changes the dense weights of {self.kind} is not known here, and "
                f"torch cannot take them; use backend=mlx with quality=none"
            )
        self.tensors: dict[str, Seen] = {}
        self._read: dict[str, Read] = {}
        for name in checkpoint.tensors:
            if name not in routed and not name.endswith((".scales", ".biases")):
                self._add(name)

    def add_experts(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Routed experts by transformers' own names, so that none is missed; they are read elsewhere."""
        self.tensors |= {name: Seen("BF16", shape, ()) for name, shape in shapes.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of a tensor along its first axis."""
        return self._read[name](start, stop)

    def _add(self, name: str) -> None:
        path, _, part = name.rpartition(".")
        if part == "weight" and self.kind in LATENT and path.endswith((".embed_q", ".unembed_out")):
            self._add_latent(path)
        elif part == "weight" and f"{path}.scales" in self.checkpoint.tensors:
            self._put(path, part, "BF16", self._mlx.shape(path), lambda a, b: self._mlx.plain(path, a, b))
        else:
            stored = self.checkpoint.tensors[name]
            dtype, shape, read = stored.dtype, stored.shape, self._reader(name)
            if self.kind in CONVOLVED and re.search(r"conv(1d)?\.weight$", name) and len(shape) == 3:
                (channels, width, one), plain = shape, read
                shape, read = (channels, one, width), lambda a, b: np.ascontiguousarray(plain(a, b).swapaxes(1, 2))
            if self.kind in SHIFTED and name.endswith(NORMS) and len(shape) == 1:
                read = _less_one(f"{self.checkpoint.folder}: {name}", dtype, read)
            self._put(path, part, dtype, shape, read)

    def _put(self, path: str, part: str, dtype: str, shape: tuple[int, ...], read: Read) -> None:
        for kind, pattern, replacement in RENAMINGS:
            if kind == self.kind:
                path = pattern.sub(replacement, path)
        name = f"{path}.{part}".lstrip(".")
        self.tensors[name], self._read[name] = Seen(dtype, shape, (name,)), read

    def _reader(self, name: str) -> Read:
        return lambda start, stop: self.checkpoint.read(name, start, stop)

    def _add_latent(self, path: str) -> None:
        """kv_b_proj [heads * (nope + v), rank] of embed_q [heads, rank, nope] and unembed_out [heads, v, rank]."""
        base, _, last = path.rpartition(".")
        if last != "embed_q" or f"{base}.unembed_out.weight" not in self.checkpoint.tensors:
            return
        (heads, rank, nope), (_, value, _) = self._mlx.shape(path), self._mlx.shape(f"{base}.unembed_out")

        def read(start: int, stop: int | None) -> np.ndarray:
            keys = self._mlx.plain(path).swapaxes(1, 2)
            whole = np.concatenate([keys, self._mlx.plain(f"{base}.unembed_out")], axis=1)
            return np.ascontiguousarray(whole.reshape(-1, rank)[start:stop])

        self._put(f"{base}.kv_b_proj", "weight", "BF16", (heads * (nope + value), rank), read)


def _less_one(where: str, dtype: str, read: Read) -> Read:
    """Rows of a norm's weight less the 1 that was added to it; an error where no bf16 number plus 1 makes them."""

    def less(start: int, stop: int | None) -> np.ndarray:
        stored: Any = read(start, stop)
        shifted = from_bf16(stored) if dtype == "BF16" else stored.astype(np.float32)
        weights = to_bf16(shifted - np.float32(1))
        if not np.array_equal(from_bf16(weights) + np.float32(1), shifted):
            raise StoreError(f"{where} is no bf16 number plus 1; use backend=mlx, which takes it as it is")
        return weights if dtype == "BF16" else from_bf16(weights).astype(stored.dtype)

    return less
