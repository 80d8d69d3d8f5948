"""Writes expert packs: quantise, encode, place, hash; resumes an interrupted pack, never overwrites a complete one.

Knows logical tensors and byte layouts through their contracts only; where weights come from is the source's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from moebench.store.engines import StoreError
from moebench.store.extents import Extents, place_parts
from moebench.store.layout import ByteLayout, ExpertSource, QuantSpec, TensorSpec
from moebench.store.manifest import (
    REQUEST_FIELDS,
    SCHEMA,
    PackManifest,
    WeightSpec,
    differences,
    plain_json,
    require_count,
)
from moebench.store.pack import DENSE, MANIFEST, Pack, Progress, file_hash
from moebench.store.pages import aligned_buffer
from moebench.store.partial import PartialPack
from moebench.store.quant import expert_digest, logical_hash, quantize
from moebench.version import __version__


class Encoded(NamedTuple):
    """One expert, ready to be placed."""

    parts: dict[str, np.ndarray]
    weights: tuple[WeightSpec, ...]
    digest: bytes  # of the logical content


Encode = Callable[[int, int], Encoded]


def write_pack(
    out_dir: str | Path,
    source: ExpertSource,
    quant: QuantSpec,
    byte_layout: ByteLayout,
    *,
    layout: str = "packed",
    order: Sequence[int] | np.ndarray | None = None,
    progress: Progress | None = None,
) -> Pack:
    """Write ``source`` as a pack, resume an interrupted one, or return the complete one of the same request.

    ``order`` lists the expert keys by disk position (layout ``ordered`` only). ``progress(done, total)`` counts
    experts. Raises ``StoreError`` where something else stands at ``out_dir`` or the disk is full.
    """

    def encode(layer: int, expert: int) -> Encoded:
        tensors = [quantize(name, weights, quant) for name, weights in source.expert(layer, expert).items()]
        parts = {name: part for tensor in tensors for name, part in byte_layout.encode(tensor).items()}
        return Encoded(parts, tuple(WeightSpec(t.name, t.kind, t.shape) for t in tensors), expert_digest(tensors))

    order = None if order is None else tuple(int(key) for key in order)
    values = (
        dict(source.model),
        source.layers,
        source.experts,
        quant,
        byte_layout.name,
        byte_layout.isa,
        layout,
        "none",
    )
    return _write(Path(out_dir), (*values, order, SCHEMA), encode, source.write_dense, progress)


def write_random_pack(
    out_dir: str | Path,
    layers: int,
    experts: int,
    expert_bytes: int,
    seed: int = 0,
    *,
    progress: Progress | None = None,
) -> Pack:
    """Write experts of ``expert_bytes`` random bytes and no dense weights: real I/O of any geometry."""

    def encode(layer: int, expert: int) -> Encoded:
        bytes_ = np.random.Generator(np.random.SFC64([seed, layer, expert])).bytes(expert_bytes)
        return Encoded({"bytes": np.frombuffer(bytes_, np.uint8)}, (), xxhash.xxh3_128_digest(bytes_))

    model = {"name": "random", "seed": seed, "expert_bytes": expert_bytes}
    values = (model, layers, experts, QuantSpec("none"), "random", "any", "packed", "none", None, SCHEMA)
    return _write(Path(out_dir), values, encode, _write_no_dense, progress)


def _write_no_dense(path: Path) -> int:
    from safetensors.numpy import save_file

    save_file({}, path)
    return path.stat().st_size


def _write(
    out: Path, values: tuple[Any, ...], encode: Encode, write_dense: Callable[[Path], int], progress: Progress | None
) -> Pack:
    fields = dict(zip(REQUEST_FIELDS, values, strict=True))
    request = plain_json(fields)
    if (found := _existing(out, request)) is not None:
        return found
    for name in ("layers", "experts"):
        require_count(name, fields[name])
    first = encode(0, 0)
    specs = place_parts(first.parts)
    extents = Extents(fields["layout"], fields["layers"], fields["experts"], specs, fields["order"])
    require_count("expert_bytes", extents.expert_bytes)
    partial = PartialPack(out, request)
    with partial.guarded(extents.file_bytes):
        partial.allocate(extents.file_bytes)
        dense = partial.dense
        if dense is None:
            dense = {"nbytes": write_dense(partial.path / DENSE), "hash": file_hash(partial.path / DENSE)}
            partial.record_dense(dense)
        for layer in range(extents.layers):
            if layer not in partial.layers:
                partial.record_layer(
                    layer, _write_layer(partial, layer, extents, first, encode=encode, progress=progress)
                )
        done = [partial.layers[layer] for layer in range(extents.layers)]
        manifest = PackManifest(
            **fields,
            weights=first.weights,
            tensors=specs,
            expert_bytes=extents.expert_bytes,
            slot_bytes=extents.slot_bytes,
            offsets=tuple(extents.offsets.tolist()),
            lengths=(extents.stored_bytes,) * extents.keys,
            hashes=tuple(value for facts in done for value in facts["hashes"]),
            logical_hash=logical_hash([bytes.fromhex(value) for facts in done for value in facts["digests"]]),
            experts_file_bytes=extents.file_bytes,
            dense_bytes=dense["nbytes"],
            dense_hash=dense["hash"],
            created_by=f"moebench {__version__}",
        )
        partial.finish(manifest)
    return Pack.open(out)


def _existing(out: Path, request: dict[str, Any]) -> Pack | None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / MANIFEST).is_file():
        raise StoreError(f"{out} exists and is not an expert pack; remove it or choose another out=")
    try:
        pack = Pack.open(out)
    except StoreError as error:
        raise StoreError(f"{error}; the pack is damaged, remove {out} and pack again") from None
    if found := differences(request, pack.manifest.request):
        raise StoreError(f"{out} exists with another {found}; remove it or choose another out=")
    return pack


def _write_layer(
    partial: PartialPack, layer: int, extents: Extents, first: Encoded, *, encode: Encode, progress: Progress | None
) -> dict[str, Any]:
    buffer = aligned_buffer(extents.slot_bytes)
    hashes, digests = [], []
    for expert in range(extents.experts):
        encoded = encode(layer, expert)
        if place_parts(encoded.parts) != extents.tensors or encoded.weights != first.weights:
            raise StoreError(
                f"layer {layer}, expert {expert}: tensors differ in name, shape or dtype from those of the first"
            )
        for spec in extents.tensors:
            buffer[spec.offset : spec.offset + spec.nbytes] = _as_bytes(encoded.parts[spec.name], spec)
        key = layer * extents.experts + expert
        partial.write(extents.segments(key), buffer)
        hashes.append(xxhash.xxh3_64_hexdigest(buffer[: extents.expert_bytes].data))
        digests.append(encoded.digest.hex())
        if progress:
            progress(key + 1, extents.keys)
    return {"hashes": hashes, "digests": digests}


def _as_bytes(part: np.ndarray, spec: TensorSpec) -> np.ndarray:
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).reshape(spec.nbytes)
