"""``manifest.json``: everything that a pack says about itself, checked when it is built and when it is read.

Knows names, sizes and hashes; opens no other file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import xxhash

from moebench.store.engines import StoreError
from moebench.store.extents import DTYPES, PART_ALIGNMENT, Extents
from moebench.store.layout import KINDS, QuantSpec, TensorSpec

# Bump by one whenever a field is added, removed or changes its meaning, or the bytes of experts.bin do; a reader
# accepts exactly its own schema, and an older pack is written again from its source.
SCHEMA = 2
CODECS = ("none", "rans")  # how each expert is stored: as it lies in a slot, or by moebench.store.coded
REQUEST_FIELDS = ("model", "layers", "experts", "quant", "byte_layout", "isa", "layout", "codec", "order", "schema")


@dataclass(frozen=True)
class WeightSpec:
    """One logical tensor of every expert: its name, how it is quantised, and its shape before any packing."""

    name: str
    kind: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise StoreError(f"manifest: weight {self.name!r} is of kind {self.kind!r}, not one of {', '.join(KINDS)}")


@dataclass(frozen=True, eq=False)
class PackManifest:
    """A pack's description. ``model`` is free-form; per-expert arrays are in order of key."""

    model: dict[str, Any]  # name, config, weights hash
    layers: int
    experts: int
    quant: QuantSpec
    byte_layout: str
    isa: str
    layout: str  # one of DISK_LAYOUTS
    codec: str
    order: tuple[int, ...] | None  # keys by disk position (layout ordered)
    weights: tuple[WeightSpec, ...]  # logical content; empty for random bytes
    tensors: tuple[TensorSpec, ...]
    expert_bytes: int
    slot_bytes: int
    offsets: tuple[int, ...]  # of the expert's first byte in experts.bin
    lengths: tuple[int, ...]  # bytes stored, over all segments; under a codec each expert has its own
    hashes: tuple[str, ...]  # xxh3_64 of the expert_bytes bytes in a slot buffer, decoded
    logical_hash: str
    experts_file_bytes: int
    dense_bytes: int
    dense_hash: str  # xxh3_64 of dense.safetensors
    created_by: str
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise StoreError(
                f"manifest: schema {self.schema!r} is not the one this version reads ({SCHEMA}); pack again"
            )
        if not isinstance(self.model, dict):
            raise StoreError("manifest: model is not a mapping")
        for name in ("byte_layout", "isa", "created_by"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise StoreError(f"manifest: {name} is not a name: {getattr(self, name)!r}")
        if self.codec not in CODECS:
            raise StoreError(f"manifest: codec {self.codec!r} is not one of {', '.join(CODECS)}")
        for name in ("layers", "experts", "expert_bytes", "slot_bytes", "experts_file_bytes", "dense_bytes"):
            require_count(name, getattr(self, name))
        for name, digits in (("logical_hash", 32), ("dense_hash", 16)):
            _require_hex(name, getattr(self, name), digits)
        _check_tensors(self.tensors)
        self._check_extents()

    def _check_extents(self) -> None:
        keys = self.layers * self.experts
        for name in ("offsets", "lengths", "hashes"):
            if len(getattr(self, name)) != keys:
                raise StoreError(f"manifest: {name} has {len(getattr(self, name))} entries for {keys} experts")
        for nbytes in self.lengths:
            require_count("lengths", nbytes)
        if self.coded:
            from moebench.store.coded import longest  # compiled code, which packs without a codec do without

            if max(self.lengths) > (limit := longest(self.tensors)):
                raise StoreError(f"manifest: lengths holds {max(self.lengths)}, coded experts have {limit} at most")
        extents = self.extents
        expected = {
            "expert_bytes": extents.expert_bytes,
            "slot_bytes": extents.slot_bytes,
            "experts_file_bytes": extents.file_bytes,
            "offsets": tuple(extents.offsets.tolist()),
            "lengths": self.lengths if self.coded else (extents.stored_bytes,) * keys,
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise StoreError(f"manifest: {name} does not follow from layout {self.layout} and the tensor parts")
        for value in self.hashes:
            _require_hex("hashes", value, 16)

    @cached_property
    def extents(self) -> Extents:
        """Where each expert's bytes stand."""
        lengths = self.lengths if self.coded else None
        return Extents(self.layout, self.layers, self.experts, self.tensors, self.order, lengths)

    @property
    def coded(self) -> bool:
        """Whether stored bytes are not those of a slot."""
        return self.codec != "none"

    @property
    def request(self) -> dict[str, Any]:
        """What was asked of the writer, as plain JSON: packs of equal request are interchangeable."""
        return plain_json({name: getattr(self, name) for name in REQUEST_FIELDS})

    def to_json(self) -> str:
        """One top-level field a line, with a checksum over all of them."""
        body = plain_json({field.name: getattr(self, field.name) for field in fields(self)})
        lines = [f"{json.dumps(k)}: {_compact(v)}" for k, v in {**body, "checksum": _checksum(body)}.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> PackManifest:
        """Parse and check; ``StoreError`` of one line for anything that ``to_json`` did not write."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"manifest: not JSON ({error})") from None
        if not isinstance(body, dict):
            raise StoreError("manifest: not a mapping of fields")
        if body.get("schema") != SCHEMA:
            found = body.get("schema")
            raise StoreError(f"manifest: schema {found!r} is not the one this version reads ({SCHEMA}); pack again")
        checksum = body.pop("checksum", None)
        if checksum != _checksum(body):
            raise StoreError("manifest: the checksum does not match; the file was changed or is damaged")
        known = {field.name for field in fields(cls)}
        if set(body) != known:
            raise StoreError(f"manifest: unknown or missing fields: {', '.join(sorted(set(body) ^ known))}")
        try:
            body["quant"] = QuantSpec(**body["quant"])
            body["weights"] = tuple(WeightSpec(**{**w, "shape": tuple(w["shape"])}) for w in body["weights"])
            body["tensors"] = tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in body["tensors"])
            for name in ("offsets", "lengths", "hashes"):
                body[name] = tuple(body[name])
            body["order"] = None if body["order"] is None else tuple(body["order"])
            return cls(**body)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise StoreError(f"manifest: a field has the wrong form ({error})") from None


def plain_json(value: Any) -> Any:
    """``value`` as it comes back from JSON (tuples become lists, dataclasses mappings); anything else is an error."""
    try:
        return json.loads(_compact(value))
    except (TypeError, ValueError) as error:
        raise StoreError(f"manifest: facts about a model must be plain JSON ({error})") from None


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The names of the fields in which two requests differ."""
    return ", ".join(name for name in REQUEST_FIELDS if mine.get(name) != other.get(name))


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=_fields_of)


def _fields_of(value: Any) -> Any:
    if isinstance(value, QuantSpec | WeightSpec | TensorSpec):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _checksum(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def require_count(name: str, value: Any) -> None:
    """Raise ``StoreError`` unless ``value`` is a whole number from 1 up."""
    if type(value) is not int or not 1 <= value < 2**62:
        raise StoreError(f"pack: {name} is not a positive whole number: {value!r}")


def _require_hex(name: str, value: Any, digits: int) -> None:
    if not isinstance(value, str) or len(value) != digits or set(value) - set("0123456789abcdef"):
        raise StoreError(f"manifest: {name} holds {value!r}, which is not {digits} hexadecimal digits")


def _check_tensors(tensors: tuple[TensorSpec, ...]) -> None:
    if not tensors:
        raise StoreError("manifest: tensors is empty")
    end, seen = 0, set()
    for spec in tensors:
        if not isinstance(spec.name, str) or spec.name in seen or spec.dtype not in DTYPES:
            raise StoreError(
                f"manifest: tensor part {spec.name!r} is named twice or of an unknown dtype {spec.dtype!r}"
            )
        seen.add(spec.name)
        for length in (*spec.shape, spec.nbytes):
            require_count(f"tensor part {spec.name}", length)
        _check_place(spec, end)
        end = spec.offset + spec.nbytes


def _check_place(spec: TensorSpec, end: int) -> None:
    size = DTYPES[spec.dtype].itemsize * math.prod(spec.shape)
    if type(spec.offset) is not int or spec.offset % PART_ALIGNMENT or not end <= spec.offset < end + PART_ALIGNMENT:
        raise StoreError(
            f"manifest: tensor part {spec.name} does not start at the first 64-byte boundary after the last"
        )
    if spec.nbytes != size:
        raise StoreError(f"manifest: tensor part {spec.name} has {spec.nbytes} bytes, its shape and dtype need {size}")
