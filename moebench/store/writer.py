"""Writes expert packs: quantise, encode, place, hash; resumes an interrupted pack, never overwrites a complete one.

Knows logical tensors and byte layouts through their contracts only; where weights come from is the source's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from moebench.errors import UsageError
from moebench.store.ahead import in_order, workers_for
from moebench.store.coded import encode as encode_expert
from moebench.store.coded import longest
from moebench.store.engines import StoreError
from moebench.store.extents import Extents, Segment, place_parts
from moebench.store.layout import ByteLayout, ExpertSource, LogicalTensor, QuantSpec, TensorSpec
from moebench.store.manifest import (
    CODECS,
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
from moebench.store.partial import PartialPack, forget_journal
from moebench.store.quant import expert_digest, logical_hash, quantize
from moebench.store.random_parts import LAW, RandomParts
from moebench.units import align_up
from moebench.version import __version__

BATCH_FACTS = ("lengths", "hashes", "digests")  # of each expert, as the journal keeps them


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
    codec: str = "none",
    order: Sequence[int] | np.ndarray | None = None,
    progress: Progress | None = None,
) -> Pack:
    """Write ``source`` as a pack, resume an interrupted one, or return the complete one of the same request.

    ``order`` lists the expert keys by disk position (layout ``ordered`` only). ``progress(done, total)`` counts
    experts. Raises ``StoreError`` where something else stands at ``out_dir`` or the disk is full, ``UsageError`` where
    a quantised source would have to be quantised again.
    """

    quant = agreed(source, quant)

    def encode(layer: int, expert: int) -> Encoded:
        found = source.expert(layer, expert)
        tensors = [w if isinstance(w, LogicalTensor) else quantize(name, w, quant) for name, w in found.items()]
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
        codec,
    )
    return _write(Path(out_dir), (*values, order, SCHEMA), encode, source.write_dense, progress)


def write_random_pack(
    out_dir: str | Path,
    layers: int,
    experts: int,
    hidden: int,
    intermediate: int,
    quant: QuantSpec | None = None,
    seed: int = 0,
    *,
    layout: str = "packed",
    codec: str = "none",
    matrices: int = 3,
    progress: Progress | None = None,
) -> Pack:
    """Write experts of random bytes with the frequencies of Gaussian weights: real I/O of any geometry.

    Each is three matrices [intermediate, hidden] (gate, up) and [hidden, intermediate] (down) under ``quant``, or with
    ``matrices`` 1 the first alone; there are no dense weights.
    """
    quant = quant or QuantSpec()
    draws = RandomParts(hidden, intermediate, quant, matrices)

    def encode(layer: int, expert: int) -> Encoded:
        parts = draws.draw(np.random.Generator(np.random.SFC64([seed, layer, expert])))
        digest = xxhash.xxh3_128()
        for part in parts.values():
            digest.update(part.data)
        return Encoded(parts, (), digest.digest())

    model = {"name": "random", "seed": seed, "hidden": hidden, "intermediate": intermediate, "bytes": LAW}
    values = (model, layers, experts, quant, "random", "any", layout, codec, None, SCHEMA)
    return _write(Path(out_dir), values, encode, _write_no_dense, progress)


def agreed(source: ExpertSource, quant: QuantSpec) -> QuantSpec:
    """What a pack's experts are: as asked for, or as the source holds them; no source is quantised twice."""
    stored, name = getattr(source, "stored", None), source.model["name"]
    if stored is None and quant.kind == "stored":
        raise UsageError(
            f"quant=stored keeps the codes of a checkpoint that MLX quantised; {name} is none: say int4, int8 or none"
        )
    if stored is not None and quant.kind != "stored" and quant != stored:
        how = f"int4 in groups of {stored.group}" if stored.kind == "int4" else "in a way of its own"
        raise UsageError(f"quant={quant.kind}: {name} is quantised already, {how}; keep it so with quant=stored")
    return stored or quant


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
    if fields["codec"] not in CODECS:
        raise StoreError(f"codec {fields['codec']!r} is not one of {', '.join(CODECS)}")
    first = encode(0, 0)
    specs = place_parts(first.parts)
    # Until they are written, coded experts count as long as one can be; they may only stand in a layout of whole ones.
    lengths = (longest(specs),) * (fields["layers"] * fields["experts"]) if fields["codec"] != "none" else None
    extents = Extents(fields["layout"], fields["layers"], fields["experts"], specs, fields["order"], lengths)
    require_count("expert_bytes", extents.expert_bytes)
    partial = PartialPack(out, request)
    with partial.guarded(extents.file_bytes):
        partial.require_room(extents.file_bytes)
        dense = partial.dense
        if dense is None:
            dense = {"nbytes": write_dense(partial.path / DENSE), "hash": file_hash(partial.path / DENSE)}
            partial.record_dense(dense)
        keys = np.argsort(extents.position)
        for batch in np.array_split(keys, extents.layers)[len(partial.batches) :]:
            partial.record_batch(_write_batch(partial, batch.tolist(), extents, first, encode, progress))
        facts = {
            name: [value for _, value in sorted(zip(keys, chain(*(b[name] for b in partial.batches)), strict=True))]
            for name in BATCH_FACTS
        }
        if lengths is not None:
            extents = replace(extents, lengths=tuple(facts["lengths"]))
        manifest = PackManifest(
            **fields,
            weights=first.weights,
            tensors=specs,
            expert_bytes=extents.expert_bytes,
            slot_bytes=extents.slot_bytes,
            offsets=tuple(extents.offsets.tolist()),
            lengths=tuple(facts["lengths"]),
            hashes=tuple(facts["hashes"]),
            logical_hash=logical_hash([bytes.fromhex(value) for value in facts["digests"]]),
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
    forget_journal(out)
    return pack


def _write_batch(
    partial: PartialPack,
    keys: Sequence[int],
    extents: Extents,
    first: Encoded,
    encode: Encode,
    progress: Progress | None,
) -> dict[str, list[Any]]:
    """Write experts that follow one another on storage; returns their facts in that order."""
    buffer = aligned_buffer(extents.slot_bytes)
    done = [length for batch in partial.batches for length in batch["lengths"]]
    end = sum(map(align_up, done))
    facts: dict[str, list[Any]] = {name: [] for name in BATCH_FACTS}
    # Weights in fp32, their codes and their bytes are in memory together while an expert is in the making.
    workers = workers_for(2 * sum(4 * math.prod(spec.shape) for spec in first.weights))
    made = in_order(lambda key: encode(*divmod(key, extents.experts)), keys, workers)
    for key, encoded in zip(keys, made, strict=True):
        layer, expert = divmod(key, extents.experts)
        if place_parts(encoded.parts) != extents.tensors or encoded.weights != first.weights:
            raise StoreError(
                f"layer {layer}, expert {expert}: tensors differ in name, shape or dtype from those of the first"
            )
        for spec in extents.tensors:
            buffer[spec.offset : spec.offset + spec.nbytes] = _as_bytes(encoded.parts[spec.name], spec)
        if extents.lengths is None:
            partial.write(extents.segments(key), buffer)
            length = extents.stored_bytes
        else:
            stored = encode_expert(extents.tensors, buffer)
            length = stored.size
            partial.write([Segment(end, length, 0)], stored)
            end += align_up(length)
        facts["lengths"].append(length)
        facts["hashes"].append(xxhash.xxh3_64_hexdigest(buffer[: extents.expert_bytes].data))
        facts["digests"].append(encoded.digest.hex())
        if progress:
            progress(len(done) + len(facts["lengths"]), extents.keys)
    return facts


def _as_bytes(part: np.ndarray, spec: TensorSpec) -> np.ndarray:
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).reshape(spec.nbytes)
