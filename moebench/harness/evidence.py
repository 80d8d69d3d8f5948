"""Our side of published claims: runs the arms that claims name, each once, and hands back their numbers.

Cells run as those of a comparison do; cache replays, statistics of routing and arithmetic on sizes need no clock and
run in processes beside each other. Knows arms and quantities; judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebench import geometry as geometries
from moebench.claims import Arm
from moebench.config import RunConfig, WorkloadConfig
from moebench.errors import MoebenchError, UsageError, unknown
from moebench.geometry import Geometry
from moebench.harness.compare import Arm as CellArm
from moebench.harness.compare import processors, run_arms
from moebench.harness.isolate import each
from moebench.harness.plan import Cell, plan
from moebench.plugins import Registry, load_plugins
from moebench.quantities import Found, of_row
from moebench.result import Row
from moebench.units import GB, GIB, MIB

OPTIONS = {  # of arms that are no cells
    "cache": ("model", "policy", "rival", "slots", "requests", "prompt_tokens", "new_tokens", "seed"),
    "trace": ("model", "top_k", "tokens", "requests", "prompt_tokens", "new_tokens", "seed"),
    "size": ("model", "top_k", "quant", "reads"),
}
TOKENS = {"requests": 4, "prompt_tokens": 64, "new_tokens": 128, "seed": 0}


def evidence(
    arms: Sequence[Arm], config: Callable[[Arm], RunConfig], registry: Registry, workers: int = 0
) -> Generator[tuple[Arm, Found], None, None]:
    """Arms and what was found, as they come; equal arms run once. ``config`` makes a cell's configuration.

    What cannot be planned raises before anything runs. Close it, and no process is left.
    """
    cells: dict[str, tuple[CellArm, list[Arm]]] = {}
    others: dict[str, list[Arm]] = {}
    for arm in arms:
        if arm.kind == "run":
            made = config(arm)
            cells.setdefault(repr(made.resolved()), (_cell(arm, made, registry), []))[1].append(arm)
        else:
            _check(arm, registry)
            others.setdefault(repr((arm.kind, sorted(arm.options.items()))), []).append(arm)
    groups = list(others.values())
    tasks = [(same[0],) for same in groups]
    for number, got in each(numbers, tasks, min(workers or processors(), len(tasks))):
        found = Found({}, str(got)) if isinstance(got, MoebenchError) else Found(got)
        yield from ((arm, found) for arm in groups[number])
    planned = list(cells.values())
    for number, rows in run_arms([cell for cell, _ in planned], workers):
        row = rows[0]
        found = Found({**of_row(row), **_of_cell(planned[number][0].cell, row)}, row.error or "", row)
        yield from ((arm, found) for arm in planned[number][1])


def _cell(arm: Arm, config: RunConfig, registry: Registry) -> CellArm:
    try:
        found = plan(config, registry)
    except UsageError as error:
        raise UsageError(f"arm {arm.name}: {error}") from None
    if len(found) != 1:
        raise UsageError(f"arm {arm.name}: a claim is about one model; say which with model=")
    return CellArm(config, 0, found[0])


def _of_cell(cell: Cell, row: Row) -> dict[str, float]:
    """What a row's numbers mean for this cell: bytes of slots and of an expert, and the time blocked on loads."""
    shape = cell.geometry
    if shape is None or row.status != "ok":
        return {}
    slots = sum(row.protocol["slots"].values()) * shape.slot_bytes / GIB
    found = {"slots_gib": slots, "expert_mib": shape.expert_bytes / MIB}
    stall, reads = (row.metrics[name].value for name in ("stall_ms_per_token", "reads_per_token"))
    if cell.clock == "virtual" and stall is not None and reads is not None:
        found["blocked_ms"] = stall + reads * cell.profile.constants(_stack(cell)).per_load_ms
        found["blocked_share"] = 100 * found["blocked_ms"] / sum(row.details["split_ms_per_token"].values())
    return found


def _stack(cell: Cell) -> str:
    return "" if cell.config.stack == "auto" else cell.config.stack


def _check(arm: Arm, registry: Registry) -> None:
    for key in arm.options:
        if key not in OPTIONS[arm.kind]:
            raise unknown(f"option of arm {arm.name}, a {arm.kind}", key, OPTIONS[arm.kind])
    registry.model_path(str(arm.options.get("model", "")))


def numbers(arm: Arm) -> dict[str, float]:
    """The numbers of an arm that is no cell, in this process."""
    registry = load_plugins(quiet=True)
    shape = geometries.load(registry.model_path(arm.options["model"]))
    return {"cache": _cache, "trace": _trace, "size": _size}[arm.kind](arm.options, shape, registry)


def _routing(options: Mapping[str, Any], shape: Geometry, registry: Registry) -> Any:
    """The synthetic trace that a cell of this geometry and workload follows."""
    from moebench.harness.cell import load_trace

    workload = WorkloadConfig(**{name: options.get(name, value) for name, value in TOKENS.items()})
    machine = next(iter(registry.hardware))  # routing is the same on any
    config = RunConfig("ondemand", machine, model=shape.name, workload=workload, mode="model", warmup_tokens=0)
    return load_trace(plan(replace(config, knobs=registry.system("ondemand").config()), registry)[0])


def _cache(options: Mapping[str, Any], shape: Geometry, registry: Registry) -> dict[str, float]:
    """A policy with ``slots`` slots in each layer, and how its choices compare with those of a ``rival``."""
    from moebench.residency.agreement import judge
    from moebench.residency.duel import duel
    from moebench.residency.replay import events

    todo = events(_routing(options, shape, registry), 32)
    slots = int(options["slots"]) * shape.layers
    if "rival" in options:
        told = duel(todo, options["policy"], options["rival"], slots)
        return {
            "better_percent": 100 * told.better / max(1, told.differing),
            "differs_percent": 100 * told.differing / max(1, told.decisions),
        }
    done = judge(todo, options["policy"], slots)
    found = {"misses": float(done.misses), "hit_percent": 100 * (done.hit_rate or 0.0), "hit_rate": done.hit_rate}
    return {k: v for k, v in (found | {"refetch_percent": 100 * (done.refetch or 0.0)}).items() if v is not None}


def _trace(options: Mapping[str, Any], shape: Geometry, registry: Registry) -> dict[str, float]:
    """Statistics of routing, of the best ``top_k`` experts where fewer run than the model would."""
    from moebench.trace.stats import overlap, unique_experts

    trace = _routing(options, shape, registry)
    k = int(options.get("top_k", trace.top_k))
    weights = None if trace.weights is None else trace.weights[:, :, :k]
    narrow = replace(trace, experts=trace.experts[:, :, :k], weights=weights, metadata={**trace.metadata, "top_k": k})
    found = {"overlap_percent": 100 * (overlap(narrow, 1) or 0.0)}
    if "tokens" in options:
        found["touched_percent"] = 100 * (unique_experts(narrow, int(options["tokens"])) or 0.0) / shape.experts
    return found


def _size(options: Mapping[str, Any], shape: Geometry, registry: Registry) -> dict[str, float]:
    """Bytes and arithmetic of a geometry; ``top_k`` and ``quant`` where a system runs it otherwise."""
    from moebench.harness.costs import coded_bytes

    shape = replace(shape, quant=options.get("quant", shape.quant), top_k=int(options.get("top_k", shape.top_k)))
    touched = shape.layers * shape.top_k * shape.expert_bytes
    shared = 3 * shape.hidden * shape.shared_intermediate * shape.shared_experts * shape.layers
    dense = 3 * shape.hidden * shape.dense_intermediate * shape.dense_layers
    routed = shape.layers * shape.top_k * shape.expert_parameters
    return {
        "layers": shape.layers,
        "top_k": shape.top_k,
        "touched_mb": touched / 1e6,
        "touched_gb": touched / GB,
        "expert_mib": shape.expert_bytes / MIB,
        "routed_gib": shape.routed_bytes / GIB,
        "routed_ffn_percent": 100 * routed / (routed + shared + dense),
        "coded_saving_percent": 100 * (1 - coded_bytes(shape) / shape.expert_bytes),
        "read_gb_total": int(options.get("reads", 0)) * shape.expert_bytes / GB,
    }
