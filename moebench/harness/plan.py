"""From a configuration to cells: which models run live, which geometry replays, and on which clock.

Decides before anything runs, so that what cannot be is one line of text and not half a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moebench import geometry as geometries
from moebench import hardware, machine
from moebench.budget import parse_budget
from moebench.checkpoint.hub import find_model, model_name
from moebench.config import RunConfig
from moebench.errors import UsageError, unknown
from moebench.geometry import EMBEDDED, Geometry, embedded_folder
from moebench.hardware import HardwareProfile
from moebench.harness.backend import require_backend, require_device
from moebench.plugins import Registry
from moebench.store.engines import DEPTH
from moebench.systemspec import SystemSpec

MODELED = ("direct", "uring", "pread", "mmap")  # engines whose time the virtual clock knows
WHOLE_PROMPT = 1 << 20  # tokens of a prefill pass that no prompt exceeds


@dataclass(frozen=True)
class Cell:
    """One run of one system on one machine with one model.

    ``clock`` is ``wall`` (measured) or ``virtual`` (modeled) and ``why`` says what chose it; ``folder`` is a model that
    computes (live), ``geometry`` one that only routes (replay). ``engine`` reads the experts.
    """

    config: RunConfig
    spec: SystemSpec
    profile: HardwareProfile
    clock: str
    why: str
    engine: str
    folder: Path | None = None
    geometry: Geometry | None = None

    @property
    def live(self) -> bool:
        """Whether a real model computes."""
        return self.folder is not None

    @property
    def computes(self) -> bool:
        """Whether compute is done or modeled; a replay on a measured clock only reads, and so does the model of one."""
        return self.live or (self.clock == "virtual" and self.config.mode != "model_io")

    @property
    def threads(self) -> int:
        """Processor threads that compute: one where time is modeled, so that cells can run side by side."""
        return self.config.threads or (max(1, machine.cores() - 1) if self.clock == "wall" else 1)

    @property
    def model(self) -> str:
        """The model's name in tables."""
        return self.folder_name if self.folder is not None else self.geometry.name

    @property
    def folder_name(self) -> str:
        """A live model's name: the embedded one's, its name on the hub, or its folder's."""
        return EMBEDDED if self.folder == embedded_folder() else model_name(self.folder)


def plan(config: RunConfig, registry: Registry) -> list[Cell]:
    """The cells of one configuration. ``model=auto`` is the embedded model, and the profile's reference geometry if it
    names one.
    """
    spec = registry.system(config.system)
    if config.scope == "auto":
        config = replace(config, scope=spec.scope)
    if not config.chunk:
        config = replace(config, chunk=WHOLE_PROMPT if spec.whole_prompt else 32)
    asked = config.workload
    if asked.kind != "trace" and asked.batch > asked.requests:
        raise UsageError(f"workload.batch={asked.batch} is more than workload.requests={asked.requests}, all there are")
    profile = hardware.load(registry.hardware_path(config.hw))
    clock, why = _clock(config, profile)
    engine = config.engine if config.engine != "auto" else spec.engine or profile.engine
    registry.engine(engine)
    if spec.engine is not None and engine != spec.engine:
        raise UsageError(f"system {spec.id} is its engine: it reads with {spec.engine}, not with {engine}")
    if spec.engine == "mmap":
        for name, off in (("codec", "none"), ("device_budget", "auto")):
            if (value := getattr(config, name)) != off:
                raise UsageError(f"system {spec.id} computes on what is stored: {name}={value} has no meaning for it")
    if config.stack != "auto":
        profile.constants(config.stack)  # an unknown stack lists the valid ones
        if clock == "wall":
            raise UsageError("stack= chooses constants of the modeled clock; this run is measured")
    if clock == "virtual" and engine not in MODELED:
        raise UsageError(f"engine {engine} has no model of its time; modeled runs take {', '.join(MODELED)}")
    common = {"config": config, "spec": spec, "profile": profile, "clock": clock, "why": why, "engine": engine}
    if config.model == "auto":
        cells = [Cell(**common, folder=embedded_folder())]
        if profile.model and clock == "virtual":
            reference = _replay(common, registry.model_path(profile.model))
            # The small model gets the same fraction: a size that fits the large one would hold the small one whole.
            fraction = parse_budget(config.budget, reference.geometry.routed_bytes) / reference.geometry.routed_bytes
            small = replace(config, budget=repr(min(1.0, fraction)))
            cells = [replace(cells[0], config=small), reference]
    elif config.model == EMBEDDED:
        cells = [_of_folder(common, embedded_folder(), EMBEDDED)]
    elif config.model in registry.models:
        cells = [_replay(common, registry.model_path(config.model))]
    elif "/" in config.model or Path(config.model).is_dir():
        folder = find_model(config.model)
        cells = [_of_folder(common, folder, model_name(folder))]
    else:
        valid = [EMBEDDED, "auto", *registry.models]
        raise unknown("model", config.model, valid, "; or a model folder, or org/name in the hub cache")
    require_backend(config.backend)
    require_device(config, profile, clock)
    for name, usual in (("backend", "torch"), ("device", "cpu")):
        if (value := getattr(config, name)) != usual and not any(cell.live for cell in cells):
            raise UsageError(f"{name}={value} chooses what computes, and a replay computes nothing")
    if config.mode == "model_io" and any(cell.live for cell in cells):
        raise UsageError(
            "mode=model_io models a measured replay, and this run computes; choose workload=trace, or model="
        )
    if config.depth and (clock == "virtual" or engine not in DEPTH):
        where = "in a measured run" if clock == "virtual" else f"with engine={', '.join(DEPTH)}, not {engine}"
        raise UsageError(f"depth= says how many experts are read at a time {where}")
    if config.threads and (clock == "virtual" or config.backend != "torch" or not any(cell.live for cell in cells)):
        raise UsageError("threads= says how many processor threads compute where torch runs a model in a measured run")
    for cell in cells:
        if cell.live and spec.handling(config.knobs).matrices:
            raise UsageError(f"{spec.id}: slots of single matrices are for replays; choose a geometry with model=NAME")
        if config.workload.kind == "prompts" and not cell.live and config.model != "auto":
            raise UsageError(
                f"workload=prompts needs a model that computes; {cell.model} is a geometry, use workload=synthetic"
            )
    return cells


def _of_folder(common: dict, folder: Path, name: str) -> Cell:
    """A cell that computes; where a trace is followed, one that replays it in the geometry of the folder's model."""
    if common["config"].workload.kind != "trace":
        return Cell(**common, folder=folder)
    from moebench.harness.assets import folder_geometry

    return Cell(**common, geometry=folder_geometry(folder, name, common["config"].quant))


def _replay(common: dict, path: Path) -> Cell:
    geometry = geometries.load(path)
    return Cell(**common, geometry=replace(geometry, quant=common["config"].quant))


def _clock(config: RunConfig, profile: HardwareProfile) -> tuple[str, str]:
    """Measure where the profile is this machine, model elsewhere, unless told otherwise."""
    here = profile.matches(machine.detect())
    if profile.id == "host" and not here:
        raise UsageError("hw=host was measured on another machine or with other memory: run 'moebench calibrate' again")
    if config.mode == "model_io":
        return "virtual", "mode=model_io"
    if config.mode == "measure":
        if not here:
            raise UsageError(
                f"mode=measure needs the machine itself, and this one is not {profile.title}; use hw=host or mode=model"
            )
        return "wall", "mode=measure"
    if config.mode == "model":
        return "virtual", "mode=model"
    if here:
        return "wall", f"this machine matches {profile.id}"
    return "virtual", f"this machine does not match {profile.id}"
