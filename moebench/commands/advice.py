"""``moebench doctor model=...``: which system to start with for a model on a machine, by arithmetic and short replays.

Knows no system by name: what it says comes from what the systems do on the machine's profile, in about a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moebench.checkpoint.hub import find_model, model_name
from moebench.config import QualityConfig, RunConfig, WorkloadConfig
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.hardware import HardwareProfile
from moebench.plugins import Registry
from moebench.result import Row
from moebench.units import GIB

USABLE = 0.9  # of the room that dense weights leave; the rest is for state, activations and staging
WORKLOAD = WorkloadConfig(requests=1, prompt_tokens=32, new_tokens=192)
WARMUP = 96  # tokens: a cache that is still empty says nothing of what it will keep
MODEL_FITS = "every expert fits into memory: nothing has to be streamed, and resident, or any runtime, is right"


@dataclass(frozen=True)
class Room:
    """What a machine has for a model, in bytes: of the fastest memory, and of all memory that experts may lie in."""

    fastest_bytes: int
    all_bytes: int

    def holds(self, geometry: Geometry) -> float:
        """The share of the routed experts that fits beside the dense weights, 0 to 1."""
        return min(1.0, max(0, self.all_bytes - geometry.dense_bytes) / geometry.routed_bytes)


def room(profile: HardwareProfile) -> Room:
    """Memory without what system and others use of RAM; a device's own is the fastest and comes on top."""
    ram = int((profile.ram_gib - profile.reserve_gib) * GIB)
    device = 0 if profile.unified else int(profile.device_gib * GIB)
    return Room(device or ram, ram + device)


def find_geometry(model: str, registry: Registry) -> Geometry:
    """The geometry of a model that is named as for ``run``: a folder, the embedded one or a registered geometry."""
    from moebench import geometry as geometries
    from moebench.harness.assets import folder_geometry
    from moebench.harness.plan import EMBEDDED, embedded_folder

    if model == EMBEDDED:
        return folder_geometry(embedded_folder(), EMBEDDED, "int4")
    if model in registry.models:
        return geometries.load(registry.model_path(model))
    if "/" in model or Path(model).expanduser().is_dir():
        folder = find_model(model)
        return folder_geometry(folder, model_name(folder), "int4")
    valid = ", ".join([EMBEDDED, *registry.models])
    raise UsageError(f"model {model!r} is not known; valid: {valid}; or a folder with config.json")


def advise(
    geometry: Geometry, word: str, profile: HardwareProfile, registry: Registry, say: Callable[[str], None]
) -> tuple[list[str], list[Row]]:
    """Lines of advice for a reader, and the rows behind them (empty where no replay was needed).

    ``word`` is the model as the user wrote it, for the command to go on with.
    """
    found = room(profile)
    fits = found.holds(geometry)
    lines = [
        f"{geometry.name} as int4: {geometry.routed_bytes / GIB:.3g} GiB of routed experts, "
        f"{geometry.dense_bytes / GIB:.3g} GiB that every token needs",
        f"{profile.id}: {found.all_bytes / GIB:.3g} GiB for a model"
        + ("" if profile.unified else f", {found.fastest_bytes / GIB:.3g} of them on the device")
        + f"; {_share(fits)}",
    ]
    if geometry.dense_bytes >= found.fastest_bytes:
        return [*lines, "what every token needs does not fit: no system here can run this model on this machine"], []
    if fits * USABLE >= 1 or geometry.dense_bytes + geometry.routed_bytes <= USABLE * found.fastest_bytes:
        return [*lines, MODEL_FITS], []
    budget = _fraction(fits * USABLE)
    rows = replays(geometry, profile, registry, budget, say)
    lines.append(
        f"short replays at budget={budget} (modeled on {profile.id}; synthetic routing, one request of "
        f"{WORKLOAD.new_tokens} tokens), tok/s:"
    )
    return [*lines, *ranking(rows, registry), f"next: moebench compare systems=all hw={profile.id} model={word} "
            f"budget={budget}"], rows  # fmt: skip


def replays(
    geometry: Geometry, profile: HardwareProfile, registry: Registry, budget: str, say: Callable[[str], None]
) -> list[Row]:
    """One short modeled replay for each system that could serve; oracles know the future and are left out."""
    from moebench.harness.plan import plan
    from moebench.harness.run import attempt

    rows = []
    stand_in = next(iter(registry.models))  # a name that plans; the geometry takes its place
    for spec in registry.systems.values():
        if spec.oracle or spec.sizing == "full":
            continue
        say(spec.id)
        config = RunConfig(
            spec.id, profile.id, spec.config(), model=stand_in, workload=WORKLOAD, budget=budget, mode="model",
            quality=QualityConfig("none"), warmup_tokens=WARMUP,
        )  # fmt: skip
        cell = replace(plan(config, registry)[0], geometry=replace(geometry, quant=config.quant))
        rows.append(attempt(cell, registry, strict=False, quiet=True))
    return rows


def ranking(rows: Sequence[Row], registry: Registry) -> list[str]:
    """Systems by modeled speed, those that leave the routing alone apart from those that change it; what cannot run."""
    ran = [row for row in rows if row.status == "ok" and row.metrics["decode_tok_s"].value is not None]
    ran.sort(key=lambda row: -(row.metrics["decode_tok_s"].value or 0.0))
    lines = []
    groups = {
        "same answers as the model": [row for row in ran if row.fidelity != "altered"],
        "other answers, look at quality": [row for row in ran if row.fidelity == "altered"],
    }
    for name, group in groups.items():
        if group:
            speeds = ", ".join(f"{row.system} {row.metrics['decode_tok_s'].value:.3g}" for row in group)
            lines.append(f"  {name}: {speeds}")
    lines += [f"  {row.system} does not run: {row.error}" for row in rows if row.status == "failed"]
    exact = groups["same answers as the model"]
    if exact:
        best, simple = exact[0], [row for row in exact if registry.system(row.system).baseline]
        lines.append(f"advice: start with system={best.system}{_gain(best, simple)}")
        lines += [f"  {best.system} here: {text}" for text in best.assumptions if not text.startswith("transferred")]
    return lines


def _gain(best: Row, simple: Sequence[Row]) -> str:
    """What the best has over the best classic cache, in words."""
    speed = best.metrics["decode_tok_s"].value or 0.0
    if not simple or best is simple[0]:  # both are sorted by speed
        return ": nothing cleverer was faster here" if simple else ""
    base = simple[0].metrics["decode_tok_s"].value or 0.0
    return f", {speed / base:.2f} times the best classic cache ({simple[0].system})"


def _fraction(value: float) -> str:
    """Two significant digits, rounded down: a budget must not exceed what there is room for."""
    scale = 10 ** (1 - math.floor(math.log10(value)))
    return repr(math.floor(value * scale) / scale)


def _share(fits: float) -> str:
    """The share of the experts that fits, in words."""
    return f"{fits:.1%} of the experts fit" if fits < 1 else "all experts fit, with nothing to spare for long contexts"
