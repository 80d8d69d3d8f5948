"""The file that storage is measured on, packs of any expert size over its bytes, and how fast it is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import xxhash

from moebench.probes.samples import Samples
from moebench.store.engines import StoreError
from moebench.store.extents import Extents
from moebench.store.layout import QuantSpec, TensorSpec
from moebench.store.manifest import PackManifest
from moebench.store.pack import EXPERTS, Pack
from moebench.store.pages import drop_page_cache
from moebench.units import GB, MIB

BLOCK, SYNCED = 16 * MIB, 128 * MIB
MOST_EXPERTS = 1 << 15  # of a pack: more say nothing new of a drive, and take time to hash


class ProbeFile:
    """Random bytes in ``folder``; a drive or a file system may store zeros for nothing."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self.path, self.nbytes = folder, folder / EXPERTS, nbytes
        self._packs: dict[int, Pack] = {}

    def write(self) -> Samples:
        """Fill the file and sync after each 128 MiB; GB/s of each part."""
        block, found = np.random.default_rng(0).bytes(BLOCK), []
        with self.path.open("wb") as file:
            while file.tell() < self.nbytes:
                start, begun = file.tell(), time.perf_counter()
                while (at := file.tell()) < min(self.nbytes, start + SYNCED):
                    file.write(block[: self.nbytes - at])
                file.flush()
                os.fsync(file.fileno())
                found.append((file.tell() - start) / (time.perf_counter() - begun) / GB)
        return Samples(tuple(found))

    def drop(self) -> None:
        """Empty the page cache of the file; ``StoreError`` where the system does not let go of it."""
        done, how = drop_page_cache(self.path)
        if not done:
            raise StoreError(how)

    def pack(self, size: int) -> Pack:
        """Experts of ``size`` bytes, whole pages, spread evenly over the file; made once."""
        if size not in self._packs:
            count = min(self.nbytes // size, MOST_EXPERTS)
            bytes_of = np.memmap(self.path, np.uint8, "r")
            hashes = [xxhash.xxh3_64_hexdigest(bytes_of[key * size : (key + 1) * size].data) for key in range(count)]
            del bytes_of
            self._packs[size] = Pack(self.folder, _manifest(size, tuple(hashes)))
        return self._packs[size]


def _manifest(size: int, hashes: tuple[str, ...]) -> PackManifest:
    """A pack of one layer, whose experts are nothing but bytes."""
    tensors = (TensorSpec("bytes", (size,), "U8", 0, size),)
    extents = Extents("packed", 1, len(hashes), tensors)
    return PackManifest(
        model={"name": "calibration"}, layers=1, experts=len(hashes), quant=QuantSpec("none"), byte_layout="random",
        isa="any", layout="packed", codec="none", order=None, weights=(), tensors=tensors, expert_bytes=size,
        slot_bytes=extents.slot_bytes, offsets=tuple(extents.offsets.tolist()), lengths=(size,) * len(hashes),
        hashes=hashes, logical_hash="0" * 32, experts_file_bytes=extents.file_bytes, dense_bytes=1,
        dense_hash="0" * 16, created_by="moebench calibrate",
    )  # fmt: skip
