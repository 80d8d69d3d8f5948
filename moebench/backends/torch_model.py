"""Transformers models behind the backend contract: one fed by an expert server, and one left as it is.

Knows attention masks, KV caches and dense weights; knows no disk beyond the dense file and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from moebench.backends.base import Adapters, Backend, Drafter, ExpertServer
from moebench.backends.probe import plain_kernels, probe_kernels, require_row_invariance
from moebench.backends.torch_experts import BackendError, Live, expert_modules, install, router_module
from moebench.backends.torch_lora import Installed
from moebench.backends.torch_ops import TorchOps
from moebench.backends.torch_routers import selection_biases, settle_routers
from moebench.backends.torch_source import empty_model, expert_names, float_type, load_model
from moebench.backends.torch_state import Memory, cache_argument, held_bytes
from moebench.backends.torch_window import always_apart, attention_by_path, path_mask, short_context
from moebench.step import VERIFY, Step
from moebench.store.layout import TensorSpec
from moebench.store.pack import file_hash

ATTENTIONS = ("eager", "sdpa")
NUMERICS = ("row_invariant", "fast")


class TransformersBackend(Backend):
    """The part that both backends share: inputs from a step, the KV cache, the logits.

    A pass that raises leaves the cache undefined: ``reset`` before the next one.
    """

    def __init__(self, model: PreTrainedModel, threads: int, numerics: str) -> None:
        torch.set_num_threads(threads)
        self._at = model.get_input_embeddings().weight.device
        self.model, self.numerics, self._ops = model, numerics, TorchOps()
        self._cache_name = cache_argument(model)
        self._memory = Memory(model, self._cache_name, numerics == "row_invariant")
        self._short, self._apart = short_context(model), always_apart(model)
        self.reset(1)

    def reset(self, batch: int) -> None:
        """Start an empty KV cache for ``batch`` sequences."""
        self.cache = DynamicCache(config=self.model.config)
        self.batch, self._seen = batch, torch.ones(batch, 0, dtype=torch.bool)
        self._torn = False  # whether columns between a sequence's tokens are masked

    @property
    def length(self) -> int:
        """Positions in the cache, padding included."""
        return self._seen.shape[1]

    def forward(
        self, step: Step, tokens: np.ndarray, server: ExpertServer | None, all_rows: bool = False
    ) -> np.ndarray:
        """Run one step of ``tokens`` int64 [B, W]; fp32 logits [B, V] of the last rows, [B*W, V] with ``all_rows``."""
        if tokens.shape[0] != self.batch or tokens.size != step.rows:
            raise BackendError(f"tokens {tokens.shape} do not fit {step.rows} rows of {self.batch} sequences")
        full = bool(step.valid.all())
        verifies = step.phase == VERIFY
        if verifies:
            self._memory.require(self.cache, self.batch, self.length + tokens.shape[1])
        seen = torch.cat([self._seen, torch.from_numpy(step.valid.reshape(tokens.shape))], dim=1)
        windows = [layer.sliding_window for layer in self.cache.layers if getattr(layer, "is_sliding", False)]
        if windows and seen.shape[1] > min(windows) and _goes_on_behind_a_gap(seen, tokens.shape[1]):
            raise BackendError("padding between a sequence's tokens would shift a sliding attention window")
        self._seen = seen
        by_path = self._torn or (verifies and not all(draft.is_chain for draft in step.drafts))
        if by_path:
            mask = path_mask(step, self._seen, tokens.shape, self.model.dtype)
        else:
            mask = None if self._seen.all() else self._seen.long()
        mask = None if mask is None else mask.to(self._at)
        positions = np.maximum(step.position, 0).reshape(tokens.shape)
        exact = self.numerics == "row_invariant"
        begins = self.length - tokens.shape[1] < self._short  # the context is short for the first row at least
        apart = exact and (by_path or (tokens.shape[1] > 1 and (self._apart or begins)))
        self._begin(server, None if full else ~step.valid)
        self._memory.valid = None if full else torch.from_numpy(step.valid.reshape(tokens.shape)).to(self._at)
        try:
            with (
                torch.inference_mode(),
                plain_kernels(exact),
                attention_by_path(self.model, apart, None if by_path or self._apart else self._short),
                self._memory.window(self.cache) if verifies else nullcontext(),
            ):
                output = self.model(
                    input_ids=torch.from_numpy(np.ascontiguousarray(tokens)).to(self._at),
                    attention_mask=mask,
                    position_ids=torch.from_numpy(positions.astype(np.int64)).to(self._at),
                    use_cache=True,
                    logits_to_keep=0 if all_rows else 1,
                    **{self._cache_name: self.cache},
                )
        finally:
            self._begin(None, None)
        logits = output.logits.float().cpu().numpy()
        return logits.reshape(-1, logits.shape[-1]) if all_rows else logits[:, -1]

    def _begin(self, server: ExpertServer | None, padded: np.ndarray | None) -> None:
        """Tell the experts who serves the coming pass and which rows are padding."""

    @property
    def trees(self) -> bool:
        """Whether every layer is attention."""
        return self._memory.trees

    def retain(self, kept: np.ndarray) -> None:
        """Of the pass that verified last keep the rows ``kept`` (bool [B, W]); what no sequence keeps leaves the cache,
        what some keep is masked for the others.
        """
        start = self.length - kept.shape[1]
        self._seen = torch.cat([self._seen[:, :start], torch.from_numpy(kept)], dim=1)
        stay = kept.any(0)
        live = kept[kept.any(1)][:, stay]
        self._torn |= bool((live != live[:1]).any())
        if stay.all():
            self._memory.forget()
            return
        columns = np.concatenate([np.arange(start), start + np.flatnonzero(stay)])
        self._memory.keep(self.cache, columns, int(stay.sum()))
        self._seen = self._seen[:, columns]

    def kv_bytes(self) -> int:
        """Bytes of all keys, values and states held."""
        return held_bytes(self.cache)

    @property
    def ops(self) -> TorchOps:
        """Row-invariant float32 arithmetic."""
        return self._ops

    @property
    def dense_bytes(self) -> int:
        """Bytes of all parameters and buffers that are held, tied ones once; adapters are none of them."""
        held = {t.data_ptr(): t.nbytes for t in (*self.model.parameters(), *self.model.buffers()) if not t.is_meta}
        return sum(held.values())

    def selection_bias(self) -> dict[int, np.ndarray]:
        """The routers' correction bias, by layer."""
        return selection_biases(self.model)

    def drafter(self, folder: str | Path) -> Drafter:
        """The dense model of ``folder``, in this model's dtype and threads."""
        from moebench.backends.torch_draft import TorchDrafter

        dtype = str(self.model.dtype).removeprefix("torch.")
        return TorchDrafter(folder, dtype, self.model.config.get_text_config().vocab_size)

    def observe_router_logits(self, callback: Callable[[int, torch.Tensor], None]) -> Callable[[], None]:
        """Call ``callback(layer, logits [N, E])`` at every MoE layer of each pass; returns a function that stops it."""
        handles = []
        for layer, name in enumerate(expert_modules(self.model)):
            router = router_module(self.model, name)

            def hook(module: nn.Module, inputs: Any, output: Any, layer: int = layer) -> None:
                callback(layer, output[0] if isinstance(output, tuple) else output)

            handles.append(router.register_forward_hook(hook))
        return lambda: [handle.remove() for handle in handles] and None

    def probe_row_invariance(self) -> dict[str, Any]:
        """Per kernel: whether 2 to 33 rows at once give the bits of one by one, and the largest difference."""
        exact = self.numerics == "row_invariant"
        with plain_kernels(exact):
            return probe_kernels(self.model, self._memory.modules, self._cache_name, exact)


class TorchBackend(TransformersBackend):
    """A model of which only the dense weights are loaded; experts come from the server, laid out as ``pack`` says.

    ``numerics`` is ``row_invariant`` (torch's plain kernels, each probed at start: it must give the same bits for any
    number of rows) or ``fast`` (whatever kernels are quickest here).
    """

    def __init__(
        self,
        pack: Any,
        dense_path: str | Path,
        config: dict[str, Any],
        *,
        attention: str = "eager",
        dtype: str = "bfloat16",
        threads: int = 1,
        numerics: str = "row_invariant",
    ) -> None:
        for what, given, valid in (("attention", attention, ATTENTIONS), ("numerics", numerics, NUMERICS)):
            if given not in valid:
                raise BackendError(f"{what} {given!r} is not one of {', '.join(valid)}")
        self._check_layout(pack.manifest)
        model = empty_model(config, dtype, attention)
        if (found := file_hash(Path(dense_path))) != pack.manifest.dense_hash:
            folder = Path(dense_path).parent
            raise BackendError(f"{dense_path} is damaged (hash {found}): remove {folder} and pack again")
        load_dense(model, dense_path)
        self._live = self._install(model, pack.manifest.tensors, float_type(dtype))
        with plain_kernels(exact := numerics == "row_invariant"):
            settle_routers(model, exact)
        self._adapters: Installed | None = None
        super().__init__(model, threads, numerics)
        if numerics == "row_invariant":
            require_row_invariance(self.probe_row_invariance())

    def _check_layout(self, manifest: Any) -> None:
        """Raise ``BackendError`` where the pack's bytes are not those that the kernels read here."""
        if manifest.byte_layout != "torch_cpu" and not (
            manifest.byte_layout == "plain" and manifest.quant.kind == "none"
        ):
            raise BackendError(
                f"the pack's byte layout is {manifest.byte_layout}; torch reads torch_cpu, or plain without quant"
            )
        here = torch.backends.cpu.get_cpu_capability()
        if manifest.quant.kind == "int4" and manifest.isa != here:
            raise BackendError(
                f"the pack's int4 bytes are for {manifest.isa}, this machine runs {here}: pack again here"
            )

    def _install(self, model: PreTrainedModel, tensors: Sequence[TensorSpec], dtype: torch.dtype) -> Live:
        """Send the experts of a model whose dense weights are loaded through the server."""
        return install(model, tensors, dtype)

    def adapt(self, adapters: Adapters | None) -> None:
        """Serve ``adapters`` in the model's dtype; row-invariant numerics probes every kernel again with them.

        What does not fit leaves the adapters served before; what is not row-invariant leaves none.
        """
        installed = None if adapters is None else Installed(self.model, adapters)
        if self._adapters is not None:
            self._adapters.remove()
        self._adapters = installed
        if installed is not None and self.numerics == "row_invariant":
            try:
                require_row_invariance(self.probe_row_invariance())
            except BackendError:
                self.adapt(None)
                raise

    def _begin(self, server: ExpertServer | None, padded: np.ndarray | None) -> None:
        self._live.server, self._live.padded = server, padded


class NativeTorchBackend(TransformersBackend):
    """The unmodified transformers model with its own experts, for reference quality; no server is asked."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        attention: str = "eager",
        dtype: str = "bfloat16",
        threads: int = 1,
    ) -> None:
        whole = model if isinstance(model, PreTrainedModel) else load_model(model, dtype, attention)
        super().__init__(whole, threads, "fast")

    def adapt(self, adapters: Adapters | None) -> None:
        """Refuse adapters: this model stays as it is."""
        if adapters is not None:
            raise BackendError("the native backend serves the unmodified model, without adapters")


def _goes_on_behind_a_gap(seen: torch.Tensor, rows: int) -> bool:
    """Whether one of the last ``rows`` columns of ``seen`` [B, T] holds a token behind padding that others precede."""
    gaps = (seen.cumsum(1) > 0) & ~seen
    return bool(((gaps.cumsum(1) > 0) & seen)[:, -rows:].any())


def load_dense(model: PreTrainedModel, path: str | Path) -> None:
    """Fill a model on the meta device with the dense weights; expert parameters stay on meta.

    Raises ``BackendError`` naming tensors that are left without a value, or that the model does not have.
    """
    wanted = dict(model.state_dict())
    state = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name not in wanted:
                raise BackendError(f"{path}: tensor {name} does not belong to {type(model).__name__}")
            # a copy in memory of our own, so that dense weights never page in from the file during a run
            state[name] = file.get_tensor(name).to(wanted[name].dtype, copy=True)
    model.load_state_dict(state, strict=False, assign=True)
    model.requires_grad_(False)
    model.tie_weights()
    _restore_buffers(model)
    routed = expert_names(model)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta and n not in routed]
    if left:
        raise BackendError(f"{path}: no values for {', '.join(left[:5])}")


def _restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds (rotary frequencies) with the model's own initialisation."""
    for module in model.modules():
        module._is_hf_initialized = not module._non_persistent_buffers_set
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor._is_hf_initialized = True
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
