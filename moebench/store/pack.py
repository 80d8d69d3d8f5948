"""An expert pack: an immutable directory of ``manifest.json``, ``experts.bin`` and ``dense.safetensors``.

Knows files, sizes and hashes; knows no kernel that computes with the tensors, and reads no expert during a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from moebench.store.engines import StoreError
from moebench.store.extents import DTYPES, Segment
from moebench.store.manifest import PackManifest
from moebench.store.pages import aligned_buffer
from moebench.units import align_up

MANIFEST, EXPERTS, DENSE, PARTIAL = "manifest.json", "experts.bin", "dense.safetensors", ".partial"
Progress = Callable[[int, int], None]


class Pack:
    """A complete pack. Keys are ``layer * experts + expert``; slot buffers are uint8 of ``slot_bytes`` or more."""

    def __init__(self, path: Path, manifest: PackManifest) -> None:
        self.path, self.manifest = path, manifest
        self.layers, self.experts = manifest.layers, manifest.experts
        self.expert_bytes, self.slot_bytes = manifest.expert_bytes, manifest.slot_bytes
        self.coded = manifest.coded

    @classmethod
    def open(cls, path: str | Path) -> Pack:
        """Check manifest and file sizes (no hashes, see ``verify``); raises ``StoreError`` naming what is wrong."""
        path = Path(path)
        partial = path.with_name(path.name + PARTIAL)
        if path.name.endswith(PARTIAL):
            raise StoreError(f"{path} is an interrupted pack; run the same pack command again to finish it")
        if not path.is_dir():
            hint = f"; {partial} is an interrupted one, run the same pack command again" if partial.is_dir() else ""
            raise StoreError(f"no expert pack at {path}{hint}")
        try:
            manifest = PackManifest.from_json((path / MANIFEST).read_text())
        except FileNotFoundError:
            raise StoreError(f"{path} is not an expert pack: it has no {MANIFEST}") from None
        except UnicodeDecodeError:
            raise StoreError(f"{path / MANIFEST}: not a text file") from None
        except StoreError as error:
            raise StoreError(f"{path / MANIFEST}: {error}") from None
        pack = cls(path, manifest)
        _require_size(pack.file_path, manifest.experts_file_bytes)
        _require_size(pack.dense_path, manifest.dense_bytes)
        return pack

    @property
    def keys(self) -> int:
        """Number of experts of all layers."""
        return self.layers * self.experts

    @property
    def file_path(self) -> Path:
        """The file that holds the experts."""
        return self.path / EXPERTS

    @property
    def dense_path(self) -> Path:
        """The safetensors file of everything but the routed experts."""
        return self.path / DENSE

    def where(self, key: int) -> str:
        """File, expert and offset of ``key``, for messages."""
        layer, expert = divmod(key, self.experts)
        return f"{self.file_path}: layer {layer}, expert {expert}, offset {self.manifest.offsets[key]}"

    def segments(self, key: int) -> list[Segment]:
        """The pieces of expert ``key``, ascending in the file."""
        if not 0 <= key < self.keys:
            raise StoreError(f"{self.path}: no expert {key}; keys are 0 to {self.keys - 1}")
        return self.manifest.extents.segments(key)

    @property
    def landing_bytes(self) -> int:
        """Bytes of a buffer that what is stored of any expert fits in, in whole pages."""
        return align_up(max(self.manifest.lengths)) if self.coded else self.slot_bytes

    def read_bytes(self, key: int) -> int:
        """Bytes that reading expert ``key`` brings, in whole pages."""
        return align_up(self.manifest.lengths[key])

    @property
    def mean_stored_bytes(self) -> float:
        """Bytes that one expert takes in experts.bin, on average."""
        return sum(self.manifest.lengths) / self.keys

    def position(self, keys: np.ndarray) -> np.ndarray:
        """Place of each key's first byte on storage among all experts: int64, 0 to keys-1."""
        return self.manifest.extents.position[keys]

    def decode(self, key: int, landing: np.ndarray, buffer: np.ndarray) -> None:
        """Turn the stored bytes of ``key`` in ``landing`` into those of a slot in ``buffer`` (both uint8), and check.

        For packs with a codec; runs without the interpreter's lock.
        """
        from moebench.store import coded

        try:
            coded.decode(landing[: self.manifest.lengths[key]], buffer[: self.expert_bytes])
        except StoreError as error:
            raise StoreError(f"{self.where(key)}: {error}; the pack is damaged, remove it and pack again") from None
        self.check(key, buffer)

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Tensor parts of the expert in ``buffer`` (uint8) by name, without a copy; bf16 comes as uint16 bits."""
        return {
            spec.name: buffer[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).reshape(spec.shape)
            for spec in self.manifest.tensors
        }

    def check(self, key: int, buffer: np.ndarray) -> None:
        """Raise ``StoreError`` unless ``buffer`` holds exactly the bytes that were packed for ``key``."""
        found = xxhash.xxh3_64_hexdigest(buffer[: self.expert_bytes].data)
        if found != self.manifest.hashes[key]:
            raise StoreError(
                f"{self.where(key)}: wrong bytes, hash {found} instead of {self.manifest.hashes[key]}; "
                f"the pack is damaged, remove it and pack again"
            )

    def read(self, key: int, buffer: np.ndarray) -> None:
        """Read and check one expert the plain way, for tools; runs read through an engine."""
        target = aligned_buffer(self.landing_bytes) if self.coded else buffer
        target[: self.expert_bytes] = 0
        with open(self.file_path, "rb", buffering=0) as file:
            for segment in self.segments(key):
                file.seek(segment.offset)
                if file.readinto(target[segment.dest : segment.dest + segment.nbytes].data) != segment.nbytes:
                    raise StoreError(f"{self.where(key)}: the file ends early")
        if self.coded:
            self.decode(key, target, buffer)
        else:
            self.check(key, buffer)

    def verify(self, progress: Progress | None = None) -> None:
        """Check the hash of the dense file and of every expert; ``progress(done, total)`` counts experts."""
        if (found := file_hash(self.dense_path)) != self.manifest.dense_hash:
            raise StoreError(
                f"{self.dense_path}: wrong bytes, hash {found} instead of {self.manifest.dense_hash}; "
                f"the pack is damaged, remove it and pack again"
            )
        buffer = aligned_buffer(self.slot_bytes)
        for key in range(self.keys):
            self.read(key, buffer)
            if progress:
                progress(key + 1, self.keys)


def file_hash(path: Path) -> str:
    """xxh3_64 of a whole file, in hexadecimal."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _require_size(path: Path, expected: int) -> None:
    actual = path.stat().st_size if path.is_file() else None
    if actual != expected:
        found = "is missing" if actual is None else f"has {actual} bytes"
        raise StoreError(f"{path} {found}, the manifest says {expected} bytes")
