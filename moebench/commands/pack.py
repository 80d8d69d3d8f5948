"""``moebench pack model=FOLDER out=DIR``: turn a model folder into an expert pack; an interrupted one resumes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moebench.checkpoint.hub import find_model
from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError
from moebench.harness.order import read_order
from moebench.progress import progress_bar
from moebench.store.layout import QuantSpec
from moebench.units import human_bytes


@dataclass(frozen=True)
class PackOptions:
    """What to pack and how its experts are stored."""

    model: str = dataclasses.field(
        metadata={"help": "folder with config.json and safetensors, or org/name (hub cache)"}
    )
    out: str = dataclasses.field(metadata={"help": "folder of the pack"})
    quant: Literal["int4", "int8", "none", "stored"] = option(
        "int4", "stored precision of expert weights; stored: as a quantised checkpoint has them"
    )
    group: Literal["32", "64", "128"] = option("64", "weights that share a scale and a bias, int4 only")
    byte_layout: Literal["torch_cpu", "mlx", "plain"] = option(
        "torch_cpu", "bytes as torch's CPU kernels or MLX's want them, or in plain order"
    )
    codec: Literal["none", "rans"] = option("none", "entropy coding (rANS) of each expert; layouts packed and ordered")
    layout: Literal["packed", "packed_gate_up", "packed_gate", "scattered", "checkpoint", "ordered"] = option(
        "packed", "one extent per expert, scattered tensors as downloaded, or extents in the order of a trace"
    )
    trace: str = option("", "trace whose most used experts come first in each layer; layout=ordered only")

    def __post_init__(self) -> None:
        if (self.layout == "ordered") != bool(self.trace):
            raise UsageError("pack: layout=ordered and trace=FILE belong together")
        if self.group != "64" and self.quant != "int4":
            raise UsageError(f"pack: group={self.group} has an effect with quant=int4 only")


def main(words: Sequence[str]) -> int:
    """Write the pack with a progress bar on stderr; the last line is one JSON document."""
    options = parse(words, PackOptions, "pack")
    if options is None:
        return 0
    folder = find_model(options.model)
    from moebench.backends.torch_threads import torch_threads
    from moebench.checkpoint.open import open_source
    from moebench.harness.assets import byte_layout_named
    from moebench.store.pack import MANIFEST
    from moebench.store.writer import write_pack

    writable_folder(Path(options.out).parent, f"out={options.out}: folder")
    quant, stood = QuantSpec(options.quant, int(options.group)), (Path(options.out) / MANIFEST).is_file()
    with progress_bar() as bar, torch_threads(1):  # experts are made side by side
        task = bar.add_task("experts", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        source = open_source(folder, dense="checkpoint" if options.byte_layout == "mlx" else "transformers")
        pack = write_pack(
            options.out,
            source,
            quant,
            byte_layout_named(options.byte_layout),
            layout=options.layout,
            codec=options.codec,
            order=read_order(options.trace, source) if options.trace else None,
            progress=progress,
        )
        if stood:  # it was not written now, so nothing is known of its bytes
            pack.verify(progress)
    nbytes = sum(file.stat().st_size for file in Path(options.out).iterdir())
    coded = ""
    if pack.coded:
        share = sum(pack.manifest.lengths) / (pack.keys * pack.expert_bytes)
        whole = pack.manifest.experts_file_bytes / (pack.keys * pack.slot_bytes)
        coded = f"; experts coded to {share:.3f} of their bytes, in whole pages {whole:.3f}"
    print(f"{options.out}: {source.layers} layers x {source.experts} experts, {human_bytes(nbytes)}{coded}")
    logical = pack.manifest.logical_hash
    print(json.dumps({"pack": options.out, "bytes": nbytes, "logical_hash": logical}, separators=(",", ":")))
    return 0
