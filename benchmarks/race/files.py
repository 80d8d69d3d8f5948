"""The files of the race, of one set of weights: expert packs of two layouts and two routings, and a GGUF file.

Experts lie on the disk once for each form; what differs by routing is the routers alone. A step whose result is there
is not done again. Knows no arm and no clock.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moebench.checkpoint.random_router import router_rows, shares
from moebench.errors import UsageError
from moebench.store.extents import Extents
from moebench.store.pack import DENSE, EXPERTS, MANIFEST, Pack, file_hash
from moebench.store.pages import aligned_buffer
from moebench.store.quant import from_bf16, to_bf16

GEOMETRY = Path(__file__).with_name("geometry.yaml")
LAWS = ("uniform", "zipf")
LAYOUTS = ("packed", "checkpoint")
SEED = 0
ROUTERS = "routers.json"  # where each layer's router begins in the GGUF file
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Files:
    """Paths of the race's files in ``folder``; ``layers`` is the depth of the model."""

    folder: Path
    layers: int

    @property
    def model(self) -> Path:
        """The folder with the configuration; its weights are removed once everything is made of them."""
        return self.folder / "model"

    @property
    def gguf(self) -> Path:
        """The GGUF file, which has the routers of one law at a time."""
        return self.folder / "model.gguf"

    @property
    def offload(self) -> Path:
        """The model that accelerate streams."""
        return self.folder / "offload"

    def pack(self, law: str, layout: str) -> Path:
        """A pack's folder."""
        return self.folder / f"{law}-{layout}"

    def prepare(self, gguf: bool, say: Say) -> None:
        """Make what is not there yet. Peak on the disk: three times the model."""
        self.folder.mkdir(parents=True, exist_ok=True)
        first = self.pack(LAWS[0], LAYOUTS[0])
        if not (first / MANIFEST).is_file():
            self._checkpoint(say)
            say("packing")
            _moebench("pack", f"model={self.model}", f"out={first}", "quant=stored")
        if gguf and not (self.folder / ROUTERS).is_file():
            from race.gguf_file import write_gguf

            self._checkpoint(say)
            say("writing the GGUF file")
            (self.folder / ROUTERS).write_text(json.dumps(write_gguf(self.model, self.gguf)))
        for file in self.model.glob("*.safetensors"):
            file.unlink()
        for law in LAWS:
            for layout in LAYOUTS:
                if not (self.pack(law, layout) / MANIFEST).is_file():
                    say(f"pack of {law} routing, layout {layout}")
                    source = first if law == LAWS[0] else self.pack(LAWS[0], layout)
                    if source == first and layout != LAYOUTS[0]:
                        rearrange(Pack.open(first), layout, self.pack(law, layout))
                    else:
                        reroute(Pack.open(source), law, self.pack(law, layout))

    def _checkpoint(self, say: Say) -> None:
        if any(self.model.glob("*.safetensors")):
            return
        shutil.rmtree(self.model, ignore_errors=True)
        say("random weights")
        words = [f"geometry={GEOMETRY}", f"layers={self.layers}", "quant=int4", f"seed={SEED}"]
        _moebench("model", "random", *words, f"out={self.model}")

    def route_gguf(self, law: str) -> None:
        """Give the GGUF file the routers of ``law``."""
        where = json.loads((self.folder / ROUTERS).read_text())
        with open(self.gguf, "r+b") as file:
            for layer, offset in enumerate(where):
                file.seek(offset)
                file.write(router(law, layer).tobytes())
            file.flush()
            os.fsync(file.fileno())


def router(law: str, layer: int) -> np.ndarray:
    """A layer's router under a law, fp32 [experts, hidden] of bf16 numbers."""
    from moebench import geometry

    shape = geometry.load(GEOMETRY)
    return from_bf16(to_bf16(router_rows(shares(shape.experts, shape.top_k, law), shape.hidden, SEED, layer)))


def rearrange(pack: Pack, layout: str, out: Path) -> None:
    """The same experts in another layout, expert by expert; the dense file is the same file."""
    manifest = pack.manifest
    extents = Extents(layout, pack.layers, pack.experts, manifest.tensors)
    _begin(out)
    buffer = aligned_buffer(pack.slot_bytes)
    with open(out / EXPERTS, "wb", buffering=0) as file:
        file.truncate(extents.file_bytes)
        for key in range(pack.keys):
            pack.read(key, buffer)
            for segment in extents.segments(key):
                os.pwrite(file.fileno(), buffer[segment.dest : segment.dest + segment.nbytes].data, segment.offset)
        os.fsync(file.fileno())
    os.link(pack.dense_path, out / DENSE)
    found = dataclasses.replace(
        manifest,
        layout=layout,
        offsets=tuple(extents.offsets.tolist()),
        lengths=(extents.stored_bytes,) * pack.keys,
        experts_file_bytes=extents.file_bytes,
    )
    (out / MANIFEST).write_text(found.to_json())


def reroute(pack: Pack, law: str, out: Path) -> None:
    """The same experts file under the routers of ``law``."""
    import torch
    from safetensors.torch import load_file, save_file

    _begin(out)
    os.link(pack.file_path, out / EXPERTS)
    dense = load_file(pack.dense_path)
    for layer in range(pack.layers):
        name = f"model.layers.{layer}.mlp.gate.weight"
        dense[name] = torch.from_numpy(router(law, layer)).to(dense[name].dtype)
    save_file(dense, out / DENSE)
    found = file_hash(out / DENSE)
    model = {**pack.manifest.model, "weights_hash": found, "name": f"{pack.manifest.model['name']}-{law}"}
    size = (out / DENSE).stat().st_size
    manifest = dataclasses.replace(pack.manifest, dense_hash=found, dense_bytes=size, model=model)
    (out / MANIFEST).write_text(manifest.to_json())


def _begin(out: Path) -> None:
    """An empty folder; what an interrupted race left of it goes."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()


def _moebench(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moebench.cli", *words], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise UsageError(f"moebench {' '.join(words)} ended with {done.returncode}")
