"""``moebench doctor io``: what a disk gives at a model's own read size, and the words that make a run read so.

Knows how experts are measured and printed; the reading itself is that of the engines a run uses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moebench.budget import parse_bytes
from moebench.commands.advice import find_geometry
from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import UsageError, unknown
from moebench.plugins import load_plugins
from moebench.progress import progress_bar
from moebench.scratch import own_folder
from moebench.store.engines import DEPTH, StoreError
from moebench.store.layout import QuantSpec
from moebench.store.pack import MANIFEST, Pack
from moebench.store.steady import Passes, Setting, measure
from moebench.units import GIB, PAGE, align_up, human_bytes

PASSES = 3
CLOSE = 0.95  # of the fastest: what is as good, in a disk's noise, and takes fewer reads in flight
RESERVE_BYTES = GIB  # of the disk, left free beside the experts that are written
COLUMNS = 1024  # of the one matrix that an expert of ``bytes`` is made of


@dataclass(frozen=True)
class IoOptions:
    """Which disk, which read size, and which ways to read."""

    path: str = option(".", "folder on the disk, where random experts are written and removed; or an expert pack")
    model: str = option("", "whose experts: a geometry, tinymoe, or a model folder")
    bytes: str = option("", "size of an expert such as 2MiB, instead of a model's")
    quant: Literal["int4", "int8", "none"] = option("int4", "stored precision of the model's experts")
    layout: Literal["packed", "packed_gate_up", "packed_gate", "scattered", "checkpoint"] = option(
        "packed", "how they lie in the file, as for run"
    )
    gib: float = option(1.0, "size of the file that is written")
    engines: tuple[str, ...] = option(("direct", "uring", "pread"), "read engines to try")
    depths: tuple[int, ...] = option((1, 2, 4, 8, 16), "numbers of experts on their way at a time")
    seconds: float = option(30.0, "time for reading")

    def __post_init__(self) -> None:
        if self.is_pack:
            given = [name for name in ("model", "bytes") if getattr(self, name)]
            given += [
                n for n, usual in (("quant", "int4"), ("layout", "packed"), ("gib", 1.0)) if getattr(self, n) != usual
            ]
            if given:
                raise UsageError(
                    f"doctor io: path={self.path} is a pack, which says what it holds: leave out {given[0]}="
                )
        elif bool(self.model) == bool(self.bytes):
            raise UsageError(
                "doctor io needs model=NAME or bytes=SIZE, the size of reads; or path=PACK, an expert pack"
            )
        elif self.bytes and (self.quant, self.layout) != ("int4", "packed"):
            raise UsageError("doctor io: an expert of bytes= is one piece; quant= and layout= belong to model=")
        if not 0.01 <= self.gib <= 1024 or not 0.1 <= self.seconds <= 3600:
            raise UsageError("doctor io: gib must be 0.01 to 1024 and seconds 0.1 to 3600")
        if not self.engines or not self.depths or not all(1 <= depth <= 256 for depth in self.depths):
            raise UsageError("doctor io: engines and depths name at least one each, and a depth is 1 to 256")
        for name in self.engines:
            if name not in DEPTH:
                raise unknown("engine", name, DEPTH)

    @property
    def is_pack(self) -> bool:
        """Whether ``path`` is an expert pack, whose own experts are read."""
        return (Path(self.path) / MANIFEST).is_file()


def main(words: Sequence[str]) -> int:
    """Measure, print the table and the best words; the last line is one JSON document."""
    options = parse(words, IoOptions, "doctor io")
    if options is None:
        return 0
    settings = [
        Setting(engine, depth) for engine in dict.fromkeys(options.engines) for depth in sorted(set(options.depths))
    ]
    each = options.seconds / (PASSES * len(settings))
    with progress_bar() as bar:
        task = bar.add_task("reading", total=PASSES * len(settings))

        def read(pack: Pack) -> tuple[Pack, dict[Setting, Passes], dict[str, str]]:
            return pack, *measure(pack, settings, each, PASSES, lambda: bar.advance(task))

        pack, found, refused = read(_pack(options.path)) if options.is_pack else _on_random(options, read)
    return report(options, pack, found, refused)


def _pack(path: str) -> Pack:
    try:
        return Pack.open(path)
    except StoreError as error:
        raise UsageError(str(error)) from None


def _on_random(options: IoOptions, read: Callable[[Pack], Any]) -> Any:
    """Write random experts into a folder of their own, read them, and remove them."""
    from moebench.store.writer import write_random_pack

    hidden, intermediate, matrices, quant = _shape(options)
    folder = writable_folder(options.path, "path")
    need, free = int(options.gib * GIB), shutil.disk_usage(folder).free
    if need + RESERVE_BYTES > free:
        raise UsageError(
            f"doctor io writes {human_bytes(need)} to {folder}, which has {human_bytes(free)} free; "
            f"choose another gib= or path="
        )
    with own_folder(folder / ".moebench-io") as place:
        one = write_random_pack(
            place / "one", 1, 1, hidden, intermediate, quant, layout=options.layout, matrices=matrices
        )
        experts = max(2 * max(options.depths), need // one.slot_bytes)
        sizes = (1, experts, hidden, intermediate, quant)
        try:
            return read(write_random_pack(place / "pack", *sizes, layout=options.layout, matrices=matrices))
        except OSError as error:
            raise UsageError(f"path={options.path} cannot be written to: {error.strerror}") from None


def _shape(options: IoOptions) -> tuple[int, int, int, QuantSpec]:
    """Columns, rows and number of an expert's matrices, and their quantisation."""
    if options.bytes:
        pages = align_up(parse_bytes(options.bytes, "bytes")) // PAGE
        return COLUMNS, pages * PAGE // (2 * COLUMNS), 1, QuantSpec("none")
    geometry = replace(find_geometry(options.model, load_plugins()), quant=options.quant)
    return geometry.hidden, geometry.intermediate, geometry.matrices, QuantSpec(geometry.quant, geometry.group)


def best(found: Mapping[Setting, Passes]) -> Setting:
    """The setting with the fewest reads in flight among those that are as good as the fastest; of equals the first."""
    least = CLOSE * max(got.median_gb_s for got in found.values())
    return min((s for s, got in found.items() if got.median_gb_s >= least), key=lambda s: s.depth)


def report(options: IoOptions, pack: Pack, found: Mapping[Setting, Passes], refused: Mapping[str, str]) -> int:
    """The table, what could not be measured, the best words, the document; 1 where nothing could be read."""
    calls, where = len(pack.segments(0)), "its own experts" if options.is_pack else f"random experts in {options.path}"
    whose = options.model or ("a pack" if options.is_pack else "bytes=")
    print(
        f"{human_bytes(pack.mean_stored_bytes)} an expert ({whose}), {calls} read{'s' * (calls > 1)} each; "
        f"{pack.keys} of {where}, {PASSES} passes in turn, hashes checked"
    )
    print(f"{'engine':<8} {'depth':>5} {'GB/s':>7} {'spread':>7} {'p50 ms':>8} {'p99 ms':>8}")
    rows = []
    for setting, got in found.items():
        p50, p99 = got.latency_ms(0.5), got.latency_ms(0.99)
        print(f"{setting.engine:<8} {setting.depth:5} {got.median_gb_s:7.3f} {got.spread:7.0%} {p50:8.2f} {p99:8.2f}")
        rows.append(
            {"engine": setting.engine, "depth": setting.depth, "gb_s": got.median_gb_s, "passes_gb_s": got.gb_s,
             "p50_ms": p50, "p99_ms": p99, "n": len(got.latency_s)}
        )  # fmt: skip
    for engine, why in refused.items():
        print(f"{engine:<8} not measured: {why}")
    document = {"expert_bytes": pack.mean_stored_bytes, "reads": calls, "rows": rows, "not_measured": dict(refused)}
    if found:
        chosen = best(found)
        document["best"] = f"engine={chosen.engine} depth={chosen.depth}"
        print(
            f"best: {document['best']}, the fewest reads in flight within {1 - CLOSE:.0%} of the fastest; "
            f"paste it into 'moebench run'"
        )
    print(json.dumps(document, separators=(",", ":")))
    return 0 if found else 1
