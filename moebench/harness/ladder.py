"""A system's ablation ladder: one run configuration for each rung, from the quantised model up to what was asked for.

Knows no system: what a rung changes the system says itself (``SystemSpec.ladder``). Runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moebench.config import RunConfig
from moebench.errors import UsageError
from moebench.harness.assets import load_live
from moebench.harness.plan import EMBEDDED, plan
from moebench.plugins import Registry
from moebench.systemspec import Rung, Target

STORED = {
    "none": "experts as they are, streamed",
    "int4": "experts in 4 bits",
    "int8": "experts in 8 bits",
    "stored": "experts as the checkpoint holds them",
}


@dataclass(frozen=True)
class Planned:
    """A rung and how to run it; ``after`` is the position of the rung below, None where that is the unmodified
    model.
    """

    name: str
    change: str
    config: RunConfig
    after: int | None
    repairs: bool


def rungs_of(config: RunConfig, registry: Registry) -> list[Planned]:
    """The ladder up to ``config``; one line where there is no model that answers."""
    config = replace(config, model=EMBEDDED) if config.model == "auto" else config
    (cell,) = plan(config, registry)
    if not cell.live:
        raise UsageError(f"a ladder needs a model that answers; {cell.model} is a geometry: model=tinymoe or a folder")
    packed = (config.quant, config.layout, config.order, config.codec)
    model = load_live(cell.folder, cell.model, *packed, config.backend, config.device)
    target = Target(cell.model, model.geometry, model.pack.manifest.model["weights_hash"], model.config)
    first, *others = cell.spec.ladder(config.knobs, target)
    name = "streamed" if config.quant == "none" else f"{config.quant} experts"
    steps = [Planned(name, STORED[config.quant], replace(config, knobs=first.knobs), None, False)]
    for number, rung in enumerate(others, 1):
        after = _below(rung, number, cell.spec.id)
        steps.append(Planned(rung.name, rung.change, replace(config, knobs=rung.knobs), after, rung.repairs))
    return steps


def _below(rung: Rung, number: int, system: str) -> int:
    after = number - 1 if rung.after is None else rung.after
    if not 0 <= after < number:
        raise UsageError(f"{system}: rung {rung.name!r} of its ladder is after {after}, which does not come before it")
    return after
