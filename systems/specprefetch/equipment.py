"""What SpecPrefetch brings to a run: adapters for a model that computes, recorded or made-up predictions for a replay.

How well the paper predicts, and what it reports, stands in ``configs/claims``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from moebench.artefact import read_header
from moebench.claimfiles import figure
from moebench.errors import UsageError
from moebench.step import ABSENT, DECODE
from moebench.systems.specprefetch import artefact as artefacts
from moebench.systems.specprefetch.adapters import Shape
from moebench.systems.specprefetch.predictor import Computed, Foreseen, Nothing, Predictor, Previous, Recorded
from moebench.systems.specprefetch.surrogate import LAG_2, predicted
from moebench.systemspec import Equipment, Published, RunContext, Target

if TYPE_CHECKING:
    from moebench.systems.specprefetch import SpecPrefetchConfig

PAPER = "arXiv 2607.24787"
FP16 = 2
RANK = 32  # the paper's second version counts the parameters of rank 32
# Whose recall on GSM8K, the paper's text data, stands for a model: of its adapters, and of FATE, which replays the
# next router.
MEASURED = {"deepseek-vl2-tiny": ("DeepSeek-VL2-Tiny", "deepseek"), "": ("Qwen3-VL-30B-A3B", "qwen3")}


def measured(model: str, kind: str) -> tuple[str, tuple[float, ...]]:
    """Whose recall a surrogate for ``model`` has, and its recall at K/2, K and K+2, of ``kind`` adapter or gate."""
    who, claim = MEASURED.get(model, MEASURED[""])
    name = f"specprefetch_{'fate_' if kind == 'gate' else ''}{claim}"
    return who, tuple(figure(f"{name}_{at}", "")[0] for at in ("half", "k", "k2"))


def _published(claim: str, what: str, where: Callable[[SpecPrefetchConfig, Any], bool]) -> Published:
    setting = f"{what}, experts cold on storage"
    return Published("snapdragon_8_elite", "deepseek-vl2-tiny", {"decode_tok_s": claim}, setting, where)


PUBLISHED = (
    _published(
        "specprefetch_m8_tok_s", "adapters with M_max = 8 (+-0.129)",
        lambda knobs, run: knobs.mode == "adapter" and knobs.m in (0, 8),
    ),
    _published("specprefetch_off_tok_s", "no prefetch", lambda knobs, run: knobs.mode == "off"),
    _published("specprefetch_pred0_tok_s", "predictor alone (-0.53 %)", lambda knobs, run: knobs.mode == "pred0"),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Content:
    """What the plugin is built from: the predictor, the bytes that predicting from each layer streams, and the name of
    the channel that a recording of it gets ("" for what a trace holds anyway).
    """

    predictor: Callable[[RunContext], Predictor]
    streamed: tuple[int, ...]
    channel: str = ""


def channel_name(name: str, lag: int) -> str:
    """A trace's channel for predictions ``lag`` layers ahead."""
    return name if lag == 1 else f"{name}_lag{lag}"


def channel_of(config: SpecPrefetchConfig) -> str:
    """The channel of this predictor: the replayed router, or adapters of one kind on one base."""
    if config.mode == "gate_replay":
        return "specprefetch_gate"
    shared, alone = config.adapters == "shared", config.base == "none"
    return f"specprefetch{'_shared' * shared}{'_none' * alone}"


def terms(config: SpecPrefetchConfig) -> tuple[bool, bool]:
    """Whether the prediction has an adapter's term, and a router's."""
    if config.mode == "gate_replay":
        return False, True
    return True, config.base == "next_gate"


def equip(config: SpecPrefetchConfig, target: Target) -> Equipment:
    """Adapters, channel or surrogate for this model and these options; raises one line that says what is missing."""
    shape = target.geometry
    idle = (0,) * shape.layers
    if config.mode == "off":
        return Equipment(content=Content(lambda run: Nothing(), idle))
    if config.mode == "naive_prev_token":
        return Equipment(content=Content(lambda run: Previous(shape.layers, shape.experts, config.horizon), idle))
    if config.mode == "oracle":
        note = "assumed: the demands to come are known (system.mode=oracle), which no system knows"
        made = Content(lambda run: Foreseen(run.future, shape.experts, config.horizon), idle)
        return Equipment(assumptions=(note,), content=made)
    return _live(config, target) if target.trace is None else _replayed(config, target)


def _equipment(
    config: SpecPrefetchConfig,
    shape: Shape,
    notes: tuple[str, ...],
    make: Callable[[RunContext], Predictor],
    files: Mapping[str, str] = MappingProxyType({}),
) -> Equipment:
    """Book what the prediction holds, each matrix once in fp16, and what it streams at each layer."""
    adapter, gate = terms(config)
    names = {shape.name(layer, lag) for layer, lag in shape.pairs if lag <= config.horizon}
    held = adapter * len(names) * shape.rank * (shape.hidden + shape.experts)
    held += gate * (shape.layers - 1) * shape.hidden * shape.experts
    streamed = tuple(FP16 * shape.streamed(layer, config.horizon, adapter, gate) for layer in range(shape.layers))
    content = Content(make, streamed, channel_of(config))
    return Equipment({"predictor": FP16 * held}, assumptions=notes, files=files, content=content)


def _live(config: SpecPrefetchConfig, target: Target) -> Equipment:
    adapter, gate = terms(config)
    if config.artefact:
        folder = Path(config.artefact).expanduser()
    elif adapter:
        folder = artefacts.find(target, config.adapters, config.base, config.rank, config.horizon)
    else:  # routers are in every artefact
        folder = artefacts.find(target, None, None, 0, 1)
    found = artefacts.load(folder)
    artefacts.check(found, target, config.horizon if adapter else 1)
    asked = {"adapters": (config.adapters, found.shape.kind), "base": (config.base, found.shape.base)}
    asked["rank"] = (config.rank or found.shape.rank, found.shape.rank)
    if adapter and (other := [f"{name}={own}, not {want}" for name, (want, own) in asked.items() if own != want]):
        raise UsageError(f"{folder} holds adapters of {', '.join(other)}; say so with system.NAME=VALUE")
    files = {"adapters": read_header(folder / artefacts.FILE)["digest"]}
    return _equipment(
        config, found.shape, (), lambda run: Computed(found, run.ops, config.horizon, adapter, gate), files
    )


def _replayed(config: SpecPrefetchConfig, target: Target) -> Equipment:
    if config.artefact:
        raise UsageError("system.artefact has no effect in a replay, where nothing computes; choose a model that does")
    geometry, trace = target.geometry, target.trace
    adapter, _ = terms(config)
    rank = config.rank or RANK
    shape = Shape(
        geometry.layers, geometry.experts, geometry.hidden, rank, config.horizon, config.adapters, config.base
    )
    notes = [f"assumed: adapters of rank {rank} ({PAPER}: the parameters of its second version)"] if adapter else []
    channels = {}
    for lag in range(1, config.horizon + 1):
        name = f"predicted.{channel_name(channel_of(config), lag)}"
        if (recorded := trace.channels.get(name)) is None:
            channels[lag], note = _surrogate(config, target, name, lag)
            notes.append(note)
        else:
            channels[lag] = recorded
        said, wanted = channels[lag], min(config.m or trace.top_k + 2, geometry.experts)
        decoded = trace.phase == DECODE
        if decoded.any() and not (said[decoded] != ABSENT).any():
            raise UsageError(f"{name} of the trace predicts nothing")
        if config.mode != "pred0" and wanted > said.shape[2]:
            what = "made-up predictions hold" if recorded is None else f"{name} of the trace holds"
            raise UsageError(f"{what} {said.shape[2]} experts, system.m asks for {wanted}")
    return _equipment(config, shape, tuple(notes), lambda run: Recorded(trace, channels))


def _surrogate(config: SpecPrefetchConfig, target: Target, name: str, lag: int) -> tuple[np.ndarray, str]:
    """Made-up predictions with published recall, and the line that says so."""
    kind = {"specprefetch": "adapter", "specprefetch_gate": "gate"}.get(channel_of(config))
    if kind is None:
        raise UsageError(
            f"nobody published the recall of adapters={config.adapters} base={config.base}; replay a trace that holds"
            f" {name} (moebench trace record system=specprefetch)"
        )
    who, recalls = measured(target.geometry.name, kind)
    recall = tuple(value * (1.0 if lag == 1 else LAG_2) for value in recalls)
    source = f"{PAPER}: {'its adapters' if kind == 'adapter' else 'FATE, which replays the router'}, {who}, GSM8K"
    if lag > 1:
        source += f"; times {LAG_2:.3f} two layers ahead (DimitriChrysafis/moe-prefetch)"
    shares = "/".join(f"{value:.3f}" for value in recall)
    made = predicted(target.trace, recall, seed=lag)
    return made, f"assumed: predictions from a surrogate of recall {shares} at K/2, K, K+2 ({source})"
