"""The way from the unmodified model to Edge0, one change at a time: smaller K, replaced routing, recovery adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebench.systems.edge0.equipment import served_top_k
from moebench.systemspec import Rung, Target

if TYPE_CHECKING:
    from moebench.systems.edge0 import Edge0Config


def ladder(config: Edge0Config, target: Target) -> list[Rung]:
    """Rungs up to ``config``, and where it has both heads and adapters, the adapters without the heads."""
    own, k = target.geometry.top_k, served_top_k(config, target)
    fresh = type(config)()
    bare = {"prerouter": False, "fill": fresh.fill, "first_token": fresh.first_token}
    off = replace(config, **bare, lora=False, artefact="", k=own)
    rungs = [Rung(off)]
    if k < own:
        rungs.append(Rung(replace(off, k=config.k), "smaller K", f"the router's best {k} of {own} experts"))
    native = len(rungs) - 1
    if config.prerouter:
        rungs.append(Rung(replace(config, lora=False), "replaced routing", "what the heads predict is the routing"))
    if config.lora:
        rungs.append(Rung(config, "adapters", "recovery adapters beside the dense weights", repairs=True))
    if config.lora and config.prerouter:
        control = replace(config, **bare)
        rungs.append(Rung(control, "adapters, native routing", "the same adapters under the router's choice", native))
    return rungs
