"""What BigMoMo brings to a run: a draft, and how deep such drafts hold. Also every figure taken from the paper.

Knows targets and files; knows no hook and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebench.errors import UsageError
from moebench.systems.bigmomo import acceptance as artefacts
from moebench.systemspec import Equipment, Published, Rung, Target
from moebench.trace.drafts import has_drafts

if TYPE_CHECKING:
    from moebench.systems.bigmomo import BigMoMoConfig

BRANCHING = 2
# The paper names no draft model. Qwen3-0.6B is the smallest dense model with the tokenizer of its Qwen3-30B-A3B.
DRAFT_PARAMETERS = 596_049_920
DRAFT_NAME = "Qwen3-0.6B"


@dataclass(frozen=True)
class Content:
    """The window as it is drafted in a run; ``by_depth`` is p_hat, empty where nobody asks for it; ``assumed_bytes``
    are those of a draft model that a replay only supposes.
    """

    depth: int
    branching: int
    by_depth: tuple[float, ...] = ()
    assumed_bytes: int = 0


def equip(config: BigMoMoConfig, target: Target) -> Equipment:
    """The draft and its acceptance; raises one line that says what is wrong or missing."""
    if config.draft == "none":
        return Equipment()
    if config.branching > 1 and not target.trees:
        raise UsageError(
            f"{target.name} has layers that carry state: it verifies chains, so system.branching must be 0 or 1, not "
            f"{config.branching}"
        )
    branching = config.branching or (BRANCHING if target.trees else 1)
    return (_live if target.trace is None else _replayed)(config, target, branching)


def ladder(config: BigMoMoConfig, target: Target) -> list[Rung]:
    """Without dropping experts nothing is altered; with ``tau`` that is the one change."""
    if not config.tau:
        return [Rung(config)]
    exact = replace(config, tau=0.0, artefact=config.artefact if config.rho < 1 else "")
    return [Rung(exact), Rung(config, "experts dropped", f"tau={config.tau:g} of a window's routing impact is dropped")]


def _live(config: BigMoMoConfig, target: Target, branching: int) -> Equipment:
    if config.acceptance:
        raise UsageError(
            "system.acceptance has an effect in a replay only: a model that computes accepts what is right"
        )
    folder = draft_folder(config.draft, target.name)
    notes = [] if target.trees else ["drafts are chains: the model has layers that carry state"]
    who = f"by the model in folder {folder.name}" if folder else "looked up in the text"
    notes.append(f"drafts: {who}, {config.depth} levels, {branching} guesses after each node")
    if config.rho == 1 and not config.tau:
        return Equipment(draft=folder, assumptions=tuple(notes), content=Content(config.depth, branching))
    draft_hash = artefacts.draft_hash_of(folder) if folder else artefacts.LOOKUP
    kept = Path(config.artefact).expanduser() if config.artefact else artefacts.find(target, draft_hash)
    counted = artefacts.load(kept)
    artefacts.check(counted, target, draft_hash)
    content = Content(config.depth, branching, counted.by_depth(config.depth, branching))
    files = {"acceptance": artefacts.file_hash(kept / artefacts.FILE)}
    return Equipment(draft=folder, assumptions=tuple(notes), files=files, content=content)


def draft_folder(draft: str, model: str) -> Path | None:
    """The folder of the draft model that ``draft`` means for a model; None where drafts are looked up in the text."""
    if draft == "auto" and model == "tinymoe":
        return Path(str(resources.files("moebench.models.tinymoe"))) / "draft"
    if draft in ("auto", artefacts.LOOKUP):
        return None
    folder = Path(draft).expanduser()
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"draft={draft} is not one of auto, lookup, none, or the folder of a dense model with config.json"
        )
    return folder


def _replayed(config: BigMoMoConfig, target: Target, branching: int) -> Equipment:
    if config.draft != "auto":
        raise UsageError(f"system.draft={config.draft}: a replay has no text to draft from; it takes auto or none")
    if config.artefact:
        raise UsageError("system.artefact has an effect where a model computes; a replay takes system.acceptance")
    if config.tau and target.trace.weights is None:
        raise UsageError("system.tau weighs experts by their routing weights, and this trace has none")
    made_up = artefacts.assumed(config.depth, branching, config.acceptance)
    nbytes = int(DRAFT_PARAMETERS * target.geometry.bits_per_weight / 8)
    notes = [f"assumed: a draft model of {nbytes / 1e6:.0f} MB, as {DRAFT_NAME} (the paper names none)"]
    if not target.trees:
        notes.append("drafts are chains: the model has layers that carry state")
    if has_drafts(target.trace) and config.acceptance:
        raise UsageError("system.acceptance has no effect on a trace that was recorded with drafts")
    if has_drafts(target.trace) and (config.rho < 1 or config.tau):
        shares = ", ".join(f"{share:.2f}" for share in made_up.by_depth)
        notes.append(f"assumed: nodes valued by acceptance {shares} by depth ({made_up.source})")
    content = Content(config.depth, branching, made_up.by_depth, nbytes)
    return Equipment({"draft": nbytes}, acceptance=made_up, assumptions=tuple(notes), content=content)


def _published(metric: str, claim: str, setting: str, where: Any) -> Published:
    return Published("snapdragon_8_elite_gen5", "qwen3-30b-a3b", {metric: claim}, setting, where)


def _on_demand(knobs: BigMoMoConfig, run: Any) -> bool:
    return knobs.draft != "none" and knobs.reads == "one" and not knobs.reorganise and knobs.tau == 0


def _full(knobs: BigMoMoConfig, run: Any) -> bool:
    window = knobs.draft != "none" and knobs.depth == 2 and knobs.branching in (0, 2)
    return window and knobs.tau > 0 and knobs.rho < 1 and knobs.reads == "window" and knobs.reorganise and (
        knobs.schedule == "stages"
    )  # fmt: skip


# The two figures of the full system cannot be of one configuration: 12.03 ms of draft, 31.51 of experts and 13.62 of
# stall are 57.16 ms a token, and its study of (D, B) gives 304.4 ms a token for (2, 2).
PUBLISHED = (
    _published(
        "stall_ms_per_token", "bigmomo_stall_speculative", "speculation with experts loaded on demand", _on_demand
    ),
    _published(
        "stall_ms_per_token", "bigmomo_stall_full",
        "all mechanisms, D = 2, B = 2, Q4_0; the same table's parts sum to 57.16 ms a token, against 304.4 elsewhere",
        _full,
    ),
    _published(
        "decode_tok_s", "bigmomo_d2b2",
        "sensitivity study, D = 2, B = 2; contradicts the parts of 57.16 ms a token of the table of components",
        _full,
    ),
)  # fmt: skip
