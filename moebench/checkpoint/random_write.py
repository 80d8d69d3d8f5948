"""Writes a planned checkpoint of random weights: shards of safetensors, one stretch at a time, and what a model folder
needs besides. A folder is there whole or not at all.

Memory: a few tables and one stretch, whatever the size. Knows bytes and files; the laws of the weights stand elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from moebench.checkpoint.files import INDEX, SINGLE
from moebench.checkpoint.random_bits import GROUP, STRETCH, RandomBits
from moebench.checkpoint.random_plan import Plan, Planned
from moebench.checkpoint.random_router import by_rank, chosen_by_token, router_rows, shares
from moebench.errors import MoebenchError, UsageError
from moebench.scratch import beside, own_folder
from moebench.store.quant import to_bf16
from moebench.units import GIB

SHARD_BYTES = 4 * GIB
RESERVE_BYTES = GIB // 2  # disk space left free
ORIGIN = "random.json"
SPECIAL = ("<pad>", "<unk>")


def write_random(
    folder: Path,
    plan: Plan,
    config: Mapping[str, Any],
    law: str,
    seed: int,
    origin: Mapping[str, Any],
    progress: Callable[[int], None],
) -> list[str]:
    """Write the model as ``folder``, which must not exist; returns the names of its files of weights.

    ``progress`` gets bytes as they are written. Raises one line where the disk is too small, or turns out to be.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already; nothing was written")
    free = shutil.disk_usage(folder.parent).free
    if plan.nbytes + RESERVE_BYTES > free:
        need = f"{plan.nbytes / GIB:.1f} GiB"
        raise UsageError(
            f"the model takes {need}, {folder.parent} has {free / GIB:.1f} GiB free; gib=X makes it smaller"
        )
    try:
        with own_folder(beside(folder)) as whole:
            form = {"format": "mlx" if "quantization" in config else "pt"}
            names = _write_shards(whole, plan, law, seed, progress, form)
            _write_tokenizer(whole)
            share = shares(plan.experts, plan.top_k, law)
            ranked = [by_rank(plan.experts, seed, layer).tolist() for layer in range(plan.layers)]
            known = {**origin, "share_by_rank": [round(float(p), 6) for p in share], "experts_by_rank": ranked}
            (whole / ORIGIN).write_text(json.dumps(known) + "\n")
            (whole / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            os.rename(whole, folder)
    except OSError as error:
        raise MoebenchError(f"{folder} cannot be written: {error.strerror}; what was written is removed") from None
    return names


def quantization() -> dict[str, Any]:
    """What config.json says of the int4 that is written, as MLX says it."""
    return {"group_size": GROUP, "bits": 4, "mode": "affine"}


def _shards(tensors: Sequence[Planned]) -> list[list[Planned]]:
    """Tensors of each file, in order: at most SHARD_BYTES in each, but one tensor at least."""
    found: list[list[Planned]] = [[]]
    held = 0
    for tensor in tensors:
        if found[-1] and held + tensor.nbytes > SHARD_BYTES:
            found.append([])
            held = 0
        found[-1].append(tensor)
        held += tensor.nbytes
    return found


def _write_shards(
    folder: Path, plan: Plan, law: str, seed: int, progress: Callable[[int], None], metadata: dict[str, str]
) -> list[str]:
    shards, maker = _shards(plan.tensors), _Maker(plan, law, seed)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    with ThreadPoolExecutor(1) as flusher:  # the disk goes on with one file while the next one is made
        pending: list[Future[None]] = []
        for name, tensors in zip(names, shards, strict=True):
            file = (folder / name).open("wb", buffering=STRETCH)
            try:
                file.write(_header(tensors, metadata))
                for tensor in tensors:
                    for piece in maker.pieces(tensor):
                        file.write(piece.data)
                        progress(piece.nbytes)
                file.flush()
            except BaseException:
                file.close()
                raise
            if pending:
                pending.pop().result()
            pending.append(flusher.submit(_flush, file))
        pending.pop().result()
    if count > 1:
        where = {tensor.name: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return names


def _flush(file: Any) -> None:
    """Bring a file to the disk and out of the page cache, where its bytes would hide what reading them costs."""
    with file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _header(tensors: Sequence[Planned], metadata: dict[str, str]) -> bytes:
    """Length and JSON, padded to 8 bytes (safetensors' format)."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Maker:
    """The bytes of planned tensors, in pieces that are valid until the next one."""

    def __init__(self, plan: Plan, law: str, seed: int) -> None:
        self.plan, self.seed, self.bits = plan, seed, RandomBits(seed)
        self.shares = shares(plan.experts, plan.top_k, law)
        self.buffer = np.empty(STRETCH, np.uint16)

    def pieces(self, tensor: Planned) -> Iterator[np.ndarray]:
        """Little-endian arrays that make up the tensor."""
        if tensor.kind == "given":
            assert tensor.value is not None
            yield np.ascontiguousarray(tensor.value).reshape(-1)
        elif tensor.kind == "router":
            rows = router_rows(self.shares, tensor.shape[1], self.seed, tensor.layer)
            yield to_bf16(rows).reshape(-1) if tensor.dtype == "BF16" else rows.reshape(-1)
        elif tensor.kind == "ids":
            yield chosen_by_token(tensor.shape[0], tensor.shape[1], self.plan.experts, self.seed).astype(
                f"<{_INTEGERS[tensor.dtype]}"
            )
        else:
            widened = tensor.dtype == "F32"
            elements = tensor.nbytes // (4 if widened else 2)
            for start in range(0, elements, STRETCH):
                out = self.buffer[: min(STRETCH, elements - start)]
                self.bits.fill(out, tensor.kind, tensor.key, start, tensor.std)
                yield out.astype(np.uint32) << np.uint32(16) if widened else out


_INTEGERS = {"I64": "i8", "I32": "i4"}


def _write_tokenizer(folder: Path) -> None:
    """One token for each byte, and two special ones: any text is a prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], unk_token=SPECIAL[1])
    fast.save_pretrained(folder)
