"""What Edge0 brings to a run: trained files for a model that computes, a recorded or surrogate prediction for a replay.

Also what the paper serves; what it reports stands in ``configs/claims``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebench.artefact import read_header
from moebench.errors import UsageError
from moebench.geometry import Geometry
from moebench.routing import RoutingLaw, law_of_config
from moebench.systems.edge0 import artefact as artefacts
from moebench.systems.edge0.heads import Plan, consumers_from, head_parameters
from moebench.systems.edge0.predictor import Heads, Predictor, Recorded
from moebench.systems.edge0.surrogate import predicted
from moebench.systemspec import Equipment, Published, Target

if TYPE_CHECKING:
    from moebench.systems.edge0 import Edge0Config

PAPER = "arXiv 2609.18063"
CHANNEL = "predicted.edge0"
FP16 = 2
FIRST_SHARE = 7 / 40  # of the layers keep their router before the first consumer: the 35B tier's share
OVERLAP = 0.6  # predicted and router top-4 share 2.2 to 2.6 of 4 (the project's notes on the 35B tier)
RANK = 16


@dataclass(frozen=True)
class Tier:
    """How the paper serves one model; layers are MoE layers from 0. ``adapter_bytes`` of its LoRA file, beside so many
    projections (``adapted``).
    """

    top_k: int
    consumers: tuple[int, ...]
    first_token: str
    adapter_bytes: int
    adapted: int
    source: str


TIERS = {
    "qwen3.6-35b-a3b": Tier(
        4, consumers_from(7, 40), "gate", 42_000_000, 310,
        PAPER,
    ),
    # Its first layer is dense: model layers 8..23 are MoE layers 7..22. The LoRA's size goes by its modules.
    "ling-3.0-tiny-8b": Tier(
        8, consumers_from(7, 23, last=True), "heads", 20_700_000, 153,
        f"{PAPER}; the LoRA's size by its modules",
    ),
}  # fmt: skip


def published_setting(config: Edge0Config, run: Any) -> bool:
    """Whether options are those that the paper's figures were taken with."""
    return config.prerouter and config.lora and config.k in (0, 4) and run.quant == "int4"


PUBLISHED = (
    Published(
        "m4pro",
        "qwen3.6-35b-a3b",
        {
            "decode_tok_s": "edge0_m4pro_tok_s",
            "allocator_peak_gib": "edge0_m4pro_allocator",
            "quality_delta": "edge0_m4pro_quality",
        },
        "K=4 with prerouter and LoRA, page cache holding the model, 64 expert slots beside the staged ones",
        published_setting,
    ),
    Published(
        "m2_16gb",
        "qwen3.6-35b-a3b",
        {
            "decode_tok_s": "edge0_m2_k4_on_tok_s",
            "allocator_peak_gib": "edge0_m2_k4_on_allocator",
            "stall_ms_per_token": "edge0_m2_k4_on_stall",
            "ssd_mib_per_token": "edge0_m2_k4_on_mib",
        },
        "K=4, replayed tokens, checkpoint larger than memory; blocked time includes the host's time per load; prerouter"
        " off: 3.5 tok/s, 244.0 ms blocked",
        published_setting,
    ),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Content:
    """What the plugin is built from. ``predictor`` makes one, given the backend's arithmetic."""

    law: RoutingLaw | None
    plan: Plan | None
    head_bytes: int  # of one head as stored
    predictor: Callable[[Any], Predictor] | None


def equip(config: Edge0Config, target: Target) -> Equipment:
    """Files or channel for this model and these options; raises one line that says what is missing."""
    return _replayed(config, target) if target.trace is not None else _live(config, target)


def served_top_k(config: Edge0Config, target: Target) -> int:
    """Experts per token: asked for, else the paper's for this model, else half of the model's own."""
    tier = TIERS.get(target.name)
    k = config.k or (tier.top_k if tier else max(1, target.geometry.top_k // 2))
    if k > target.geometry.top_k:
        raise UsageError(f"system.k={k} exceeds the {target.geometry.top_k} experts that {target.name} routes to")
    return k


def _live(config: Edge0Config, target: Target) -> Equipment:
    k = served_top_k(config, target)
    law = law_of_config(target.config) if config.prerouter or k < target.geometry.top_k else None
    if not (config.prerouter or config.lora):
        return Equipment(top_k=k, content=Content(law, None, 0, None))
    folder = Path(config.artefact) if config.artefact else artefacts.find(target, k)
    found = artefacts.load(folder, adapters=config.lora)
    artefacts.check(found, target, k)
    first_token = found.plan.first_token if config.first_token == "auto" else config.first_token
    held, files, adapted = {}, {}, 0
    if config.prerouter:
        held["predictor"] = found.nbytes * (target.number_bytes or FP16) // FP16
        files["prerouter"] = read_header(folder / artefacts.PREROUTER)["digest"]
    if config.lora:
        if found.adapters is None:
            raise UsageError(f"{folder} has no adapters; set system.lora=false")
        held["adapters"], adapted = found.adapters.nbytes, len(found.adapters.pairs)
        files["lora"] = read_header(folder / artefacts.LORA)["digest"]

    def heads(ops: Any) -> Predictor:
        bias = target.selection_bias
        return Heads(found.plan, found.heads, target.geometry.experts, law, ops, first_token, bias)

    one = held.get("predictor", 0) // len(found.heads)
    content = Content(law, found.plan if config.prerouter else None, one, heads)
    shipped = Path(str(resources.files(__package__))) in folder.resolve().parents
    notes = () if shipped else (f"fitted files: {folder.name} of one's own, not the shipped ones",)
    return Equipment(held, found.adapters if config.lora else None, k, notes, files, content, adapted=adapted)


def _replayed(config: Edge0Config, target: Target) -> Equipment:
    geometry, trace = target.geometry, target.trace
    if config.artefact and not Path(config.artefact).is_dir():
        raise UsageError(f"system.artefact={config.artefact} is no folder; it serves the model that computes")
    channel = trace.channels.get(CHANNEL) if config.prerouter else None
    k = channel.shape[2] if channel is not None and not config.k else served_top_k(config, target)
    if k > trace.top_k:
        where = f"{CHANNEL} holds" if channel is not None and not config.k else "system.k asks for"
        raise UsageError(f"{where} {k} experts for each token, the trace's router chose {trace.top_k}")
    tier = TIERS.get(geometry.name) or _assumed_tier(geometry)
    held, notes, adapted = {}, [], 0
    if config.lora:
        held["adapters"], adapted = tier.adapter_bytes, tier.adapted
        notes.append(f"assumed: adapters of {tier.adapter_bytes / 1e6:.1f} MB ({tier.source})")
    if not config.prerouter:
        return Equipment(held, None, k, tuple(notes), content=Content(None, None, 0, None), adapted=adapted)
    plan = Plan(geometry.layers, k, tier.consumers, tier.first_token)
    if channel is not None:
        if channel.shape[2] != k:
            raise UsageError(f"the trace's {CHANNEL} holds {channel.shape[2]} experts for each token, not system.k={k}")
        said = tuple(int(layer) for layer in range(1, geometry.layers) if (channel[:, layer] >= 0).any())
        if not said:
            raise UsageError(f"the trace's {CHANNEL} predicts nothing; set system.prerouter=false to replay it")
        plan = replace(plan, consumers=said, first_token="heads")  # the channel itself says where nothing was said
    else:
        channel = predicted(trace, k, plan.consumers, OVERLAP, seed=0)
        shared = f"shares {OVERLAP:g} of the router's top {k} ({PAPER}: 2.2 to 2.6 of 4)"
        notes.append(f"assumed: predicted routing from a surrogate that {shared}")
        notes.append(f"assumed: heads of layers {plan.owners[0]} to {plan.owners[-1]} ({tier.source})")
    first_token = plan.first_token if config.first_token == "auto" else config.first_token
    one = FP16 * head_parameters(geometry.hidden, geometry.experts)
    held["predictor"] = one * len(plan.owners)
    content = Content(None, plan, one, lambda ops: Recorded(trace, channel, first_token))
    return Equipment(held, None, k, tuple(notes), content=content, adapted=adapted)


def _assumed_tier(geometry: Geometry) -> Tier:
    """For a model the paper does not serve: its 35B tier's shares, and a LoRA on four square projections a layer."""
    first = max(1, math.ceil(FIRST_SHARE * geometry.layers))
    adapted = 4 * geometry.layers
    size = adapted * RANK * 2 * geometry.hidden * FP16
    text = "the shares of the paper's 35B model"
    return Tier(max(1, geometry.top_k // 2), consumers_from(first, geometry.layers), "gate", size, adapted, text)
