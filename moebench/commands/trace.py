"""``moebench trace import|record|stats|synth``: routing traces in and out of moebench's one format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moebench import geometry
from moebench.checkpoint.hub import find_model
from moebench.commands.places import writable_file
from moebench.commands.trace_stats import stats
from moebench.commands.words import build, describe, parse
from moebench.config import option
from moebench.errors import UsageError, unknown
from moebench.plugins import load_plugins
from moebench.progress import progress_bar
from moebench.trace.format import Trace


@dataclass(frozen=True)
class ImportOptions:
    """A recording made by another tool."""

    path: str = dataclasses.field(metadata={"help": "recording to read"})
    out: str = dataclasses.field(metadata={"help": "trace file to write"})
    format: Literal["npz", "csv", "jsonl"] = option(
        "npz", "npz has meta.json beside it; csv and jsonl have a row per token and layer and may be gzipped"
    )
    experts: int = option(0, "experts per layer, needed for csv and jsonl")
    model: str = option("", "name of the model that was recorded, needed for csv and jsonl")
    source: str = option("", "where the recording comes from, kept in the trace")
    native_top_k: int = option(0, "experts that the model itself takes per token, where the rows may hold fewer")
    layers: int = option(0, "MoE layers of the model; layers without rows then stay absent, else they have no place")
    first_layer: int = option(-1, "id of the first MoE layer, where it has no rows itself")

    def __post_init__(self) -> None:
        given = {
            "experts=N": self.experts > 0,
            "model=NAME": bool(self.model),
            "source=TEXT": bool(self.source),
            "native_top_k=N": self.native_top_k > 0,
            "layers=N": self.layers > 0,
            "first_layer=N": self.first_layer >= 0,
        }
        if self.format == "npz" and any(given.values()):
            named = ", ".join(name for name, is_given in given.items() if is_given)
            raise UsageError(f"trace import: format=npz takes {named} from its meta.json")
        if self.format != "npz" and not (given["experts=N"] and given["model=NAME"]):
            raise UsageError(f"trace import: format={self.format} needs experts=N and model=NAME, which no row says")


@dataclass(frozen=True)
class SynthOptions:
    """Where a synthetic trace goes and whose shape it has."""

    out: str = dataclasses.field(metadata={"help": "trace file to write"})
    model: str | None = option(None, "take the shape and the fitted parameters of this geometry")


def main(words: Sequence[str]) -> int:
    """Dispatch to one subcommand; each prints one JSON line last."""
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: moebench trace {'|'.join(SUBCOMMANDS)} KEY=VALUE ...")
        return 0 if words else 2
    if words[0] not in SUBCOMMANDS:
        raise unknown("trace subcommand", words[0], SUBCOMMANDS)
    return SUBCOMMANDS[words[0]](words[1:])


def _import(words: Sequence[str]) -> int:
    options = parse(words, ImportOptions, "trace import")
    if options is None:
        return 0
    from moebench.trace import importers, rows

    writable_file(options.out)
    if options.format == "npz":
        return _save(importers.import_npz(options.path), options.out)
    read = rows.import_csv if options.format == "csv" else rows.import_jsonl
    known = {"model": options.model, "source": options.source or Path(options.path).name}
    shape = rows.Shape(options.experts, options.native_top_k, options.layers, options.first_layer)
    return _save(read(options.path, shape, known), options.out)


def _synth(words: Sequence[str]) -> int:
    from moebench.trace import fits
    from moebench.trace.synthetic import SyntheticSpec, synthesize

    own = [word for word in words if word.partition("=")[0] in ("out", "model", "-h", "--help")]
    options = parse(own, SynthOptions, "trace synth")
    if options is None:
        print(describe(SyntheticSpec, "trace synth"), end="")
        return 0
    spec = parse([word for word in words if word not in own], SyntheticSpec, "trace synth")
    assert spec is not None  # help was answered above
    given = {word.partition("=")[0] for word in words if word not in own} & {f.name for f in dataclasses.fields(spec)}
    asked = {name: getattr(spec, name) for name in given}
    writable_file(options.out)
    if not options.model:
        return _save(synthesize(spec), options.out)
    chosen = geometry.load(load_plugins().model_path(options.model))
    shape = {"layers": chosen.layers, "experts": chosen.experts, "top_k": chosen.top_k}
    if clash := given & set(shape):
        raise UsageError(f"trace synth: {', '.join(sorted(clash))} is given by model={options.model}")
    if given & set(fits.LAWS):
        fit = fits.of_model(chosen.name)
        laws = dict(fit.parameters) if fit else {}
        return _save(synthesize(build(SyntheticSpec, {**laws, **shape, **asked}, "trace synth")), options.out)
    return _save(fits.synthetic(chosen.name, **shape, **asked), options.out)


def _record(words: Sequence[str]) -> int:
    from moebench.commands.record import RecordOptions, record

    of_system = [word for word in words if word.startswith("system.")]
    options = parse([word for word in words if word not in of_system], RecordOptions, "trace record")
    if options is None:
        return 0
    if of_system and not options.system:
        raise UsageError(f"trace record: {of_system[0]} needs system=NAME")
    spec = load_plugins().system(options.system) if options.system else None
    knobs = parse([w.removeprefix("system.") for w in of_system], spec.config, f"system {spec.id}") if spec else None
    if options.requests < 1 or options.new_tokens < 2:
        raise UsageError("trace record: requests must be at least 1 and new_tokens at least 2")
    if options.model != "tinymoe":
        find_model(options.model)  # refused before anything is written
    writable_file(options.out)
    with progress_bar() as bar:
        task = bar.add_task("requests", total=options.requests)
        trace = record(options, spec, knobs, lambda: bar.advance(task))
    return _save(trace, options.out)


def _save(trace: Trace, out: str) -> int:
    path = trace.save(Path(out).expanduser())
    shape = {"tokens": trace.tokens, "layers": trace.layers, "experts": trace.expert_count, "top_k": trace.top_k}
    print(f"wrote {path}: {', '.join(f'{value} {name}' for name, value in shape.items())}")
    gaps = list(trace.metadata.get("gaps", []))
    for gap in gaps:
        print(f"gap: {gap}")
    print(json.dumps({"path": str(path), "hash": trace.hash, **shape, "gaps": gaps}, separators=(",", ":")))
    return 0


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "import": _import,
    "record": _record,
    "stats": stats,
    "synth": _synth,
}
