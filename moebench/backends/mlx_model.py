"""mlx-lm models behind the backend contract, fed by an expert server.

Knows the dense weights and the order of a pass; knows no disk beyond the dense file and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU

from moebench.backends.base import Adapters, Backend, BackendError, Drafter, ExpertServer
from moebench.backends.mlx_experts import Arithmetic, Live, StreamedExperts, Views, buffer_of
from moebench.backends.mlx_head import wrap_head
from moebench.backends.mlx_load import empty_model, load_dense, on_gpu, owner, plain_config, switches
from moebench.backends.mlx_lora import Projections
from moebench.backends.mlx_ops import MlxOps
from moebench.backends.mlx_probe import kernels, require_row_invariance
from moebench.backends.mlx_state import Memory, wrap
from moebench.step import ABSENT, PREFILL, Routing, Step
from moebench.store.layout import INTERLEAVED
from moebench.store.pack import file_hash

NUMERICS = ("row_invariant", "fast")
BIASES = ("e_score_correction_bias", "expert_bias")
KEPT_BYTES = 256 << 20  # freed memory that mlx may keep for itself


class MlxBackend(Backend):
    """A model of which only the dense weights are loaded; experts come from the server, laid out as ``pack`` says.

    Activations are float32 on a CPU, where mlx's bf16 products are slow and rounded twice, and in the checkpoint's own
    dtype on a GPU. ``converted``: the checkpoint is one that MLX wrote, not a hub's. ``numerics`` is ``row_invariant``
    (each kernel is probed at start, and where it does not give the same bits for any number of rows its rows run one by
    one) or ``fast``.
    """

    def __init__(
        self,
        pack: Any,
        dense_path: str | Path,
        config: Mapping[str, Any],
        *,
        converted: bool = False,
        numerics: str = "row_invariant",
    ) -> None:
        if numerics not in NUMERICS:
            raise BackendError(f"numerics {numerics!r} is not one of {', '.join(NUMERICS)}")
        manifest = pack.manifest
        if manifest.byte_layout != "mlx":
            raise BackendError(f"the pack's byte layout is {manifest.byte_layout}; mlx reads mlx: pack again")
        if (found := file_hash(Path(dense_path))) != manifest.dense_hash:
            folder = Path(dense_path).parent
            raise BackendError(f"{dense_path} is damaged (hash {found}): remove {folder} and pack again")
        _bound_memory()
        self.config, self.numerics = plain_config(config), numerics
        self.model = empty_model(self.config)
        self._live, self._ops = Live(), MlxOps()
        self._take_out(switches(self.model), pack)
        self._stored_bytes = load_dense(self.model, self._removed, self.config, converted, Path(dense_path))
        self._projections = Projections(self.model, self._routers())
        self._dtype = _float_dtype(self.model)
        self._memory = Memory(self.model, self.model.model_type)
        wrap(self.model, self._memory, self._width)
        self._asked = wrap_head(self.model)
        self._adapted: dict[str, nn.Module] = {}
        self._alone: tuple[str, ...] = ()
        self.reset(1)
        self._dry_run()
        self._separate()
        _forget_peak()

    def _separate(self) -> None:
        """Row-invariant numerics: probe every kernel, and let those that need it run row by row from now on."""
        if self.numerics == "row_invariant":
            report = require_row_invariance(self._kernels(), self._dtype)
            self._alone += tuple(name for name, entry in report.items() if not entry["equal"])

    def _dry_run(self) -> None:
        """One pass in which no expert runs, so that every attention knows which masks its model asks for."""
        two = np.arange(2, dtype=np.int32)
        self.forward(Step(0, PREFILL, 0 * two, two, two >= 0), np.zeros((1, 2), np.int64), _Nobody())
        self.reset(1)

    def _take_out(self, found: Mapping[str, nn.Module], pack: Any) -> None:
        """Put streamed experts where the switches are."""
        if len(found) != pack.layers:
            raise BackendError(f"mlx-lm's {self.model.model_type} has {len(found)} MoE layers, the pack {pack.layers}")
        weights = {spec.name: spec for spec in pack.manifest.weights}
        self._removed, self._arithmetic = dict(found), {}
        self._width = weights["down_proj"].shape[0]
        interleaved = self.model.model_type in INTERLEAVED
        for index, (path, switch) in enumerate(found.items()):
            gated = isinstance(switch, SwitchGLU)
            up = "gate_up_proj" if gated else "up_proj"
            if up not in self._arithmetic:
                gate = _gate(switch.activation, interleaved) if gated else switch.activation
                self._arithmetic[up] = Arithmetic(Views(pack.manifest.tensors, up), weights, up, gate)
            parent, name = owner(self.model, path)
            parent[name] = StreamedExperts(index, self._arithmetic[up], self._live)
        self._experts = pack.experts

    def _routers(self) -> list[str]:
        """Paths of the layers in MoE blocks with one output for each expert."""
        blocks = tuple(path.rpartition(".")[0] + "." for path in self._removed)
        linear = {path: m for path, m in self.model.named_modules() if path.startswith(blocks) and "weight" in m}
        return [path for path, module in linear.items() if module.weight.shape[0] == self._experts]

    def reset(self, batch: int) -> None:
        """Start empty caches for ``batch`` sequences."""
        self._memory.reset(batch)
        for arithmetic in self._arithmetic.values():
            arithmetic.views.clear()

    def forward(self, step: Step, tokens: np.ndarray, server: ExpertServer, all_rows: bool = False) -> np.ndarray:
        """Run one step of ``tokens`` int64 [B, W]; fp32 logits [B, V] of the last rows, [B*W, V] with ``all_rows``."""
        memory, live = self._memory, self._live
        if tokens.shape[0] != len(memory.caches) or tokens.size != step.rows:
            raise BackendError(f"tokens {tokens.shape} do not fit {step.rows} rows of {len(memory.caches)} sequences")
        memory.begin(step, tokens.shape[1])
        live.server, live.padded = server, None if step.valid.all() else ~step.valid
        self._asked.all_rows = all_rows
        try:
            logits = np.array(self.model(mx.array(tokens), cache=memory.layers).astype(mx.float32))
        finally:
            live.server = live.padded = None
        return logits.reshape(-1, logits.shape[-1]) if all_rows else logits[:, -1]

    @property
    def trees(self) -> bool:
        """Whether every layer is plain attention."""
        return self._memory.trees

    def retain(self, kept: np.ndarray) -> None:
        """Of the pass that verified last keep the rows ``kept`` (bool [B, W]); forget the others."""
        self._memory.retain(kept)

    def drafter(self, folder: str | Path) -> Drafter:
        """The dense model of ``folder``."""
        from moebench.backends.mlx_draft import MlxDrafter

        drafter = MlxDrafter(folder, _vocabulary(self.config))
        _forget_peak()
        return drafter

    def probe_row_invariance(self) -> dict[str, Any]:
        """Per kernel as it runs now: whether 2 to 33 rows at once give the bits of one by one, and the largest
        difference.
        """
        return {kernel.name: kernel.verdict(self._dtype) for kernel in self._kernels()}

    def _kernels(self) -> list[Any]:
        return kernels(self.model, self._memory, list(self._arithmetic.values()), _top_k(self.config))

    def selection_bias(self) -> dict[int, np.ndarray]:
        """The bias that routers add to their scores for choosing, by layer."""
        parameters = dict(tree_flatten(self.model.parameters()))
        found = {}
        for index, path in enumerate(self._removed):
            block = path.rpartition(".")[0] + "."
            for name, value in parameters.items():
                if name.startswith(block) and name.rpartition(".")[2] in BIASES and value.shape == (self._experts,):
                    found[index] = np.array(value.astype(mx.float32))
        return found

    @property
    def ops(self) -> MlxOps:
        """Row-invariant float32 arithmetic."""
        return self._ops

    def adapt(self, adapters: Adapters | None) -> None:
        """Serve ``adapters`` in the activations' dtype; row-invariant numerics probes every kernel again with them."""
        before, self._adapted = self._adapted, {}
        self._projections.restore(before)
        if adapters is not None:
            self._adapted = self._projections.install(adapters)
            self._separate()
            _forget_peak()

    @property
    def dense_bytes(self) -> int:
        """Bytes of all parameters that are held, tied ones once; adapters are none of them."""
        return sum(value.nbytes for _, value in tree_flatten(self.model.parameters()))

    @property
    def stored_dense_bytes(self) -> int:
        """The same before floats became float32."""
        return self._stored_bytes

    def kv_bytes(self) -> int:
        """Bytes of all keys, values and states held."""
        return self._memory.nbytes

    def buffer(self, nbytes: int) -> np.ndarray:
        """Memory of mlx's own: experts are computed on where they were read to."""
        return buffer_of(nbytes)

    def allocator_peak_bytes(self) -> int:
        """``mlx.core.get_peak_memory`` since all weights were loaded and their kernels probed."""
        return int(mx.get_peak_memory())

    @property
    def notes(self) -> tuple[str, ...]:
        """Library, device and dtype of activations; which kernels run row by row."""
        device = mx.default_device().type.name
        line = f"computed with mlx on {device}, activations in {str(self._dtype).rpartition('.')[2]}"
        return (line, *(f"row by row, for numerics=row_invariant: {name}" for name in self._alone))


class _Nobody:
    """A server that lets no expert run."""

    def serve(self, layer: int, hidden: Any, native: Routing) -> tuple[Routing, Any]:
        """No expert for any row."""
        return Routing(np.full_like(native.experts, ABSENT), np.zeros_like(native.weights)), ()


def _gate(activation: Any, interleaved: bool) -> Callable[[mx.array], mx.array]:
    """[n, 2I] of gate and up, halves or alternating, to [n, I]."""

    def apply(y: mx.array) -> mx.array:
        half = y.shape[-1] // 2
        gate, up = (y[..., ::2], y[..., 1::2]) if interleaved else (y[..., :half], y[..., half:])
        return activation(up, gate)

    return apply


def _float_dtype(model: nn.Module) -> mx.Dtype:
    """What activations are: the dtype of norms."""
    if not on_gpu():
        return mx.float32
    return next(
        v.dtype for n, v in tree_flatten(model.parameters()) if v.ndim == 1 and mx.issubdtype(v.dtype, mx.floating)
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or config


def _vocabulary(config: Mapping[str, Any]) -> int:
    return int(_text(config)["vocab_size"])


def _top_k(config: Mapping[str, Any]) -> int:
    text = _text(config)
    return int(
        next(text[name] for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts") if name in text)
    )


def _forget_peak() -> None:
    """What loading and probing took is no part of a run."""
    mx.clear_cache()
    mx.reset_peak_memory()


def _bound_memory() -> None:
    """Keep mlx from hoarding what it frees and, on a Mac, its weights from being paged out."""
    mx.set_cache_limit(KEPT_BYTES)
    if mx.metal.is_available() and on_gpu():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
