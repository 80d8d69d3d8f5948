"""A routing trace: which experts each token took in each MoE layer, with optional channels, in one safetensors file.

Knows ids, weights and where rows belong; knows no byte sizes, no caches and no model weights. The hash covers the
arrays and the number of experts, not the metadata and not the file's encoding: two files of one content have one hash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moebench.errors import UsageError
from moebench.scratch import whole_file
from moebench.step import ABSENT, DECODE, PREFILL

SCHEMA = 1  # raised when an older reader would misread a newer file
REQUIRED = ("model", "experts", "top_k", "source")
CHANNELS = "predicted.<name> (int16 [T, L, k']), drafts.<part> ([T, ...]), hidden (float16 or float32 [T, ...])"
HEADER = "moebench.trace"


class TraceError(UsageError):
    """A trace that contradicts itself, or a file that is not a readable trace."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Routing of T tokens through L MoE layers, k experts each; compare two traces by ``hash``.

    Rows of one sequence are contiguous and their positions ascend. ``experts`` stands in router order, -1 is absent.
    ``metadata`` is JSON: ``model``, ``experts`` (per layer), ``top_k`` and ``source`` are required; ``native_top_k``,
    ``licence``, ``seed``, ``generator`` and ``gaps`` say more.
    """

    experts: np.ndarray  # int16 [T, L, k]
    phase: np.ndarray  # int8 [T], 0 prefill, 1 decode
    sequence: np.ndarray  # int32 [T]
    position: np.ndarray  # int32 [T]
    weights: np.ndarray | None = None  # float16 [T, L, k]
    channels: dict[str, np.ndarray] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if missing := [name for name in REQUIRED if name not in self.metadata]:
            raise TraceError(f"trace metadata lacks {', '.join(missing)}; required: {', '.join(REQUIRED)}")
        try:
            json.dumps(self.metadata, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TraceError(f"trace metadata is not JSON: {error}") from None
        _shape("experts", self.experts, np.int16, 3)
        tokens, _, k = self.experts.shape
        for name, dtype in (("phase", np.int8), ("sequence", np.int32), ("position", np.int32)):
            _shape(name, getattr(self, name), dtype, 1, (tokens,))
        if self.metadata["top_k"] != k:
            raise TraceError(f"trace metadata says top_k {self.metadata['top_k']}, the rows hold {k}")
        self._check_experts("experts", self.experts)
        if self.weights is not None:
            _shape("weights", self.weights, np.float16, 3, self.experts.shape)
            bad = ~(np.isfinite(self.weights) & (self.weights >= 0))
            if bad.any():
                token, layer, _ = np.argwhere(bad)[0]
                raise TraceError(f"weights: token {token}, layer {layer} holds a negative or non-finite weight")
        if not np.isin(self.phase, (PREFILL, DECODE)).all():
            raise TraceError("phase: only 0 (prefill) and 1 (decode) are valid")
        self._check_rows()
        self._check_channels()

    def _check_experts(self, name: str, ids: np.ndarray) -> None:
        """Ids within -1..experts-1 and no id twice in a row; errors name token and layer."""
        bad = (ids < ABSENT) | (ids >= self.expert_count)
        if bad.any():
            token, layer, slot = np.argwhere(bad)[0]
            value = ids[token, layer, slot]
            raise TraceError(f"{name}: token {token}, layer {layer} names expert {value} of {self.expert_count}")
        ordered = np.sort(ids, axis=2)
        twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != ABSENT)
        if twice.any():
            token, layer, slot = np.argwhere(twice)[0]
            raise TraceError(f"{name}: token {token}, layer {layer} names expert {ordered[token, layer, slot]} twice")

    def _check_rows(self) -> None:
        """Each sequence is one run of rows with ascending, non-negative positions."""
        starts = self.sequence_starts
        ids, counts = np.unique(self.sequence[starts], return_counts=True)
        if (counts > 1).any():
            raise TraceError(f"sequence {ids[counts > 1][0]} is not contiguous: its rows lie in several runs")
        same = self.sequence[1:] == self.sequence[:-1]
        back = np.flatnonzero(same & (np.diff(self.position) <= 0))
        if len(back):
            raise TraceError(f"position: token {back[0] + 1} does not come after the token before it")
        if (self.position < 0).any():
            raise TraceError("position: negative positions are not valid")

    def _check_channels(self) -> None:
        """Channels have a known kind of name and one row per token."""
        for name, array in self.channels.items():
            if name.startswith("predicted.") and len(name) > len("predicted."):
                _shape(name, array, np.int16, 3)
                if array.shape[:2] != self.experts.shape[:2]:
                    raise TraceError(
                        f"{name}: shape {array.shape} does not match {self.experts.shape[:2]} tokens, layers"
                    )
                self._check_experts(name, array)
            elif name == "hidden" or (name.startswith("drafts.") and len(name) > len("drafts.")):
                if array.ndim < 1 or len(array) != self.tokens:
                    raise TraceError(f"{name}: shape {array.shape} does not start with {self.tokens} tokens")
                if name == "hidden" and array.dtype not in (np.float16, np.float32):
                    raise TraceError(f"hidden: dtype {array.dtype} is not float16 or float32")
            else:
                raise TraceError(f"channel {name!r} is not one of {CHANNELS}")

    @property
    def tokens(self) -> int:
        """Rows of the trace."""
        return self.experts.shape[0]

    @property
    def layers(self) -> int:
        """MoE layers."""
        return self.experts.shape[1]

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return self.experts.shape[2]

    @property
    def expert_count(self) -> int:
        """Experts of one layer."""
        return int(self.metadata["experts"])

    @property
    def sequence_starts(self) -> np.ndarray:
        """Row at which each sequence begins, int64 [sequences]."""
        changes = np.flatnonzero(self.sequence[1:] != self.sequence[:-1]) + 1
        return np.concatenate([np.zeros(min(1, len(self.sequence)), np.int64), changes])

    def take(self, rows: slice) -> Trace:
        """The trace of some rows only, e.g. to fit on one part and test on another."""
        return Trace(
            experts=np.ascontiguousarray(self.experts[rows]),
            phase=np.ascontiguousarray(self.phase[rows]),
            sequence=np.ascontiguousarray(self.sequence[rows]),
            position=np.ascontiguousarray(self.position[rows]),
            weights=None if self.weights is None else np.ascontiguousarray(self.weights[rows]),
            channels={name: np.ascontiguousarray(array[rows]) for name, array in self.channels.items()},
            metadata={**self.metadata, "rows": f"{rows.start or 0}:{self.tokens if rows.stop is None else rows.stop}"},
        )

    def _arrays(self) -> dict[str, np.ndarray]:
        named = {"experts": self.experts, "phase": self.phase, "sequence": self.sequence, "position": self.position}
        if self.weights is not None:
            named["weights"] = self.weights
        named |= {f"channel.{name}": array for name, array in self.channels.items()}
        # safetensors writes memory order, whatever the strides say
        return {name: np.ascontiguousarray(array) for name, array in named.items()}

    @cached_property
    def hash(self) -> str:
        """xxh3-128 over names, dtypes, shapes and little-endian bytes of all arrays, and the number of experts."""
        digest = xxhash.xxh3_128(f"moebench trace, {self.expert_count} experts".encode())
        for name, array in sorted(self._arrays().items()):
            canonical = array.astype(array.dtype.newbyteorder("<"), copy=False)
            digest.update(f"\n{name} {canonical.dtype.kind}{canonical.dtype.itemsize} {canonical.shape}\n".encode())
            digest.update(canonical.tobytes())
        return digest.hexdigest()

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file atomically: it stands complete under its name, or not at all."""
        from safetensors.numpy import save

        path = Path(path)
        header = {"schema": SCHEMA, "hash": self.hash, "metadata": self.metadata}
        payload = save(self._arrays(), metadata={HEADER: json.dumps(header, sort_keys=True)})
        with whole_file(path) as file:
            file.write(payload)
        return path


def load(path: str | Path) -> Trace:
    """Read a trace and check its hash; a missing, foreign, newer or corrupt file is a one-line ``TraceError``."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise TraceError(f"{path}: no such trace file")
    try:
        with safe_open(str(path), framework="numpy") as file:
            header = _header(path, file.metadata())
            arrays: dict[str, np.ndarray] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise TraceError(f"{path}: not a readable safetensors file ({error})") from None
    channels = {name[8:]: arrays.pop(name) for name in list(arrays) if name.startswith("channel.")}
    try:
        trace = Trace(**arrays, channels=channels, metadata=header["metadata"])
    except (TypeError, ValueError, OverflowError) as error:  # what a header may hold in the place of numbers
        raise TraceError(f"{path}: {error}") from None
    if trace.hash != header["hash"]:
        raise TraceError(f"{path}: contents do not match the hash in the header ({trace.hash} != {header['hash']})")
    return trace


def _header(path: str | Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if not metadata or HEADER not in metadata:
        raise TraceError(f"{path}: a safetensors file, but not a moebench trace")
    try:
        header = json.loads(metadata[HEADER])
        schema = int(header["schema"])
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise TraceError(f"{path}: the trace header is damaged") from None
    if schema > SCHEMA:
        raise TraceError(f"{path}: written by a newer moebench (schema {schema}; this one reads up to {SCHEMA})")
    if not isinstance(header.get("metadata"), dict) or not isinstance(header.get("hash"), str):
        raise TraceError(f"{path}: the trace header is damaged")
    return header


def _shape(name: str, array: np.ndarray, dtype: type, ndim: int, shape: tuple[int, ...] | None = None) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
        found = f"{array.dtype} with {array.ndim} axes" if isinstance(array, np.ndarray) else type(array).__name__
        raise TraceError(f"{name}: expected {np.dtype(dtype)} with {ndim} axes, got {found}")
    if shape is not None and array.shape != shape:
        raise TraceError(f"{name}: shape {array.shape} does not match {shape}")
