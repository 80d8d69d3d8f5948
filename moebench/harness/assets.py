"""Files that a live run needs: the model folder, its pack for this machine, tokenizer and prompts. Packs are made once
and kept.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from moebench.checkpoint.files import Checkpoint
from moebench.errors import MoebenchError, UsageError
from moebench.geometry import Geometry
from moebench.harness.backend import BYTE_LAYOUTS, require_model
from moebench.harness.order import read_order
from moebench.jsonl import read_jsonl
from moebench.plugins import home
from moebench.progress import progress_bar
from moebench.store.engines import StoreError
from moebench.store.layout import ByteLayout
from moebench.store.lock import alone
from moebench.store.pack import MANIFEST, Pack, file_hash
from moebench.store.partial import forget_journal


@dataclass(frozen=True)
class LiveModel:
    """A model folder with its pack: everything but loaded tensors. ``ends`` are the tokens that end an answer;
    ``drafter`` is a model that drafts for it.
    """

    folder: Path
    pack: Pack
    geometry: Geometry
    tokenizer: Any
    ends: frozenset[int]
    drafter: Any = None

    @property
    def config(self) -> dict[str, Any]:
        """The transformers configuration the pack was made from."""
        return self.pack.manifest.model["config"]

    @property
    def positions(self) -> int:
        """The longest text, in tokens, that the model was made for."""
        from moebench.backends.torch_source import model_config

        text = model_config(self.config).get_text_config()
        return getattr(text, "max_position_embeddings", None) or text.model_max_length  # as some families call it


def load_live(
    folder: Path, name: str, quant: str, layout: str, order: str = "", codec: str = "none", backend: str = "torch",
    device: str = "cpu",
) -> LiveModel:  # fmt: skip
    """Open the pack of a model folder in the bytes of ``backend`` and ``device``, making it first if this machine has
    none; raises one clear line on failure.
    """
    from moebench.backends.torch_geometry import geometry_of

    tokenizer = load_tokenizer(folder)
    ends = end_tokens(folder, tokenizer)
    geometry = geometry_of(_config(folder), name)  # what cannot run is refused before it is packed
    require_model(backend, folder)
    pack = ensure_pack(folder, name, quant, layout, order, codec, BYTE_LAYOUTS[backend, device])
    return LiveModel(folder, pack, as_packed(geometry, pack), tokenizer, ends)


def as_packed(geometry: Geometry, pack: Pack) -> Geometry:
    """``geometry`` as a pack stores it: its quantisation, and its experts' bytes where the formula has others."""
    quant, parts = pack.manifest.quant, sum(part.nbytes for part in pack.manifest.tensors)
    if quant.kind != "stored":
        geometry = replace(geometry, quant=quant.kind, group=quant.group)
        if geometry.expert_bytes == parts:
            return geometry
    return replace(geometry, quant=quant.kind, stored_bytes=pack.expert_bytes)


def folder_geometry(folder: Path, name: str, quant: str) -> Geometry:
    """The geometry of a model folder by its configuration alone: no weights are read, no pack is made."""
    from moebench.backends.torch_geometry import geometry_of

    config = _config(folder)
    if quant != "stored":
        return geometry_of(config, name, quant)
    from moebench.checkpoint.mlx_source import stored_form

    spec, nbytes = stored_form(folder)
    found = replace(geometry_of(config, name), quant=spec.kind, group=spec.group, stored_bytes=nbytes)
    return found if spec.kind == "stored" else replace(found, stored_bytes=0)


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of a model folder, of a family that transformers knows."""
    from moebench.backends.base import BackendError
    from moebench.backends.torch_source import load_config, model_config

    config = load_config(folder)
    try:
        model_config(config)
    except BackendError as error:
        raise BackendError(f"{folder / 'config.json'}: {error}") from None
    return config


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer

    try:
        _require_inside(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # of a folder without its files
            raise ValueError("it has no vocabulary; is tokenizer.json missing?")
    except Exception as error:  # transformers raises whatever a damaged file leads it to
        raise MoebenchError(f"cannot load the tokenizer at {folder}: {' '.join(str(error).split())[:200]}") from None
    return tokenizer


def end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's own, and those of the folder's ``generation_config.json``."""
    file, own = folder / "generation_config.json", tokenizer.eos_token_id
    try:
        said = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise MoebenchError(f"{file} is no JSON object: {error}") from None
    more = said if isinstance(said, list) else [] if said is None else [said]
    if not all(type(token) is int for token in more):
        raise MoebenchError(f"{file}: eos_token_id must be a token id or a list of them, got {said!r}")
    return frozenset([*more, *([] if own is None else [own])])


def _require_inside(folder: Path) -> None:
    """Raise ``ValueError`` where a tokenizer's settings name a file elsewhere: transformers would read it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if not (folder / name).is_file():
            continue
        said = json.loads((folder / name).read_text())
        for key, value in said.items() if isinstance(said, dict) else ():
            if isinstance(value, str) and os.path.isfile(value) and Path(value).absolute().parent != folder.absolute():
                raise ValueError(f"{name} says {key}={value}, a file outside the folder")


def with_drafter(model: LiveModel, backend: Any, folder: str | Path | None) -> LiveModel:
    """``model`` with the dense model of ``folder`` (None: without) to draft for it; both must name tokens alike."""
    if folder is None:
        return model
    Checkpoint(folder)  # every header is checked before a library reads it
    own, other = model.tokenizer.get_vocab(), load_tokenizer(Path(folder)).get_vocab()
    if own != other:
        token = next((t for t in own if other.get(t) != own[t]), None) or next(t for t in other if t not in own)
        raise UsageError(
            f"draft model {folder} has another vocabulary than {model.folder}: token {token!r} is {other.get(token)} "
            f"there and {own.get(token)} here"
        )
    return replace(model, drafter=backend.drafter(folder))


def byte_layout_named(name: str) -> ByteLayout:
    """The byte layout ``torch_cpu``, ``mlx``, ``plain``, or what of ``plain`` a torch device has kernels for."""
    if name == "torch_cpu":
        from moebench.backends.torch_bytes import TorchCpuLayout

        return TorchCpuLayout()
    if name == "device":
        from moebench.backends.torch_device_model import DeviceLayout

        return DeviceLayout()
    if name == "mlx":
        from moebench.store.mlx_bytes import MlxLayout

        return MlxLayout()
    from moebench.store.plain import PlainLayout

    return PlainLayout()


def ensure_pack(
    folder: Path,
    name: str,
    quant: str,
    layout: str,
    order: str = "",
    codec: str = "none",
    byte_layout: str = "torch_cpu",
) -> Pack:
    """The pack of a folder's files as they are now, kept under ``$MOEBENCH_HOME/packs``.

    ``order`` is the trace of an ordered pack; the embedded model has one of its own. A pack in ``mlx`` bytes keeps the
    checkpoint's own dense weights.
    """
    from moebench.backends.torch_threads import torch_threads
    from moebench.checkpoint.open import open_source
    from moebench.store.layout import QuantSpec
    from moebench.store.writer import write_pack

    trace = ""
    if layout == "ordered":
        own = folder.parent / "traces" / "held_out.safetensors"
        trace = order or (str(own) if own.is_file() else "")
        if not trace:
            raise UsageError("layout=ordered needs order=TRACE, a trace of this model ('moebench trace record')")
        if not Path(trace).is_file():
            raise UsageError(f"order={trace}: no such trace file")
        layout_id = f"ordered-{file_hash(Path(trace))[:12]}"
    else:
        layout_id = layout
    encoding = byte_layout_named(byte_layout)
    kind = encoding.isa if byte_layout == "torch_cpu" else byte_layout
    parts = (name.replace("/", "--"), _fingerprint(folder), quant, layout_id, codec, kind.lower().replace(" ", "-"))
    out = home() / "packs" / "-".join(parts)
    if (out / MANIFEST).is_file():  # also where nothing may be written
        return open_kept(out)
    with alone(out.with_name(f"{out.name}.lock")):  # of processes that want it at once one makes it
        if (out / MANIFEST).is_file():
            return open_kept(out)
        print(f"moebench: packing {name} ({quant}, {layout}, codec {codec}) into {out}", file=sys.stderr)
        source = open_source(folder, dense="checkpoint" if byte_layout == "mlx" else "transformers")
        with progress_bar() as bar, torch_threads(1):  # experts are made side by side
            task = bar.add_task("experts", total=None)
            return write_pack(
                out,
                source,
                QuantSpec(quant),
                encoding,
                layout=layout,
                codec=codec,
                order=read_order(trace, source) if trace else None,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )


def open_kept(path: Path) -> Pack:
    """Open a pack that an earlier run left under ``$MOEBENCH_HOME/packs``; a damaged one is said to be in the way."""
    try:
        pack = Pack.open(path)
        forget_journal(path)
        return pack
    except StoreError as error:
        raise MoebenchError(f"{error}; remove {path} and run again to have it made anew") from None


def _fingerprint(folder: Path) -> str:
    """Names, sizes and times of a folder's files: cheap, and enough to notice that a model was replaced."""
    digest = xxhash.xxh3_64()
    for path in sorted(folder.glob("*")):
        if path.suffix in (".safetensors", ".json") and path.is_file():  # a link may lead nowhere
            stat = path.stat()
            digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def read_prompts(path: Path, count: int, seed: int) -> list[str]:
    """``count`` prompts of a JSON-lines file with a ``prompt`` field, evenly over the file, starting at ``seed``."""
    prompts = [item["prompt"] for item in read_jsonl(path) if isinstance(item.get("prompt"), str)]
    if not prompts:
        raise UsageError(f"{path} holds no prompts: each line must be a JSON object with a text field 'prompt'")
    stride = max(1, len(prompts) // count)
    return [prompts[(seed + i * stride) % len(prompts)] for i in range(count)]


def text_hash(texts: Sequence[str]) -> str:
    """A short hash of a list of texts, for the record of a workload."""
    digest = xxhash.xxh3_128()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
