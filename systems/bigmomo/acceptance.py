"""How deep drafts hold (p_hat by depth): counted by ``moebench prepare`` and kept as an artefact, assumed in a replay.

The artefact is a folder of one file, ``acceptance.safetensors``; it belongs to one model and one draft, and is refused
for others. Knows files and counts; knows no model and no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moebench.artefact import broken, read, stored, write
from moebench.draft import Acceptance
from moebench.errors import UsageError
from moebench.store.pack import file_hash
from moebench.systemspec import Target

FILE = "acceptance.safetensors"
FIELDS = ("model", "weights_hash", "top_k", "draft", "draft_hash", "places")
NEEDS = (*FIELDS, "branching", "depth", "provenance")
LOOKUP = "lookup"
# 69 % of the tokens of drafts of two accepted (Qwen3.6-35B-A3B on a phone of 12 GB): (p + p^2) / 2 = 0.69
LEVEL = 0.777
RESCUED = 0.27  # of 1486 places tinymoe's own draft has 0.925 right with one guess and 0.945 with two
LEVEL_SOURCE = (
    "first guesses as 69 % of 2 drafts of Qwen3.6-35B-A3B's own MTP head on a phone, as (p + p^2) / 2; "
    "BigMoMo's is not published"
)


@dataclass(frozen=True, eq=False)
class Counted:
    """At ``places`` of a model's own text: ``right[b - 1, d - 1]`` (int64 [B, D]) of the drafts with b continuations of
    each node had their first d levels right. The model ran ``top_k`` experts a token; ``draft`` is a name,
    ``draft_hash`` of its weights, or ``lookup``.
    """

    model: str
    weights_hash: str
    top_k: int
    draft: str
    draft_hash: str
    places: int
    right: np.ndarray
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        right = self.right
        if right.dtype != np.int64 or right.ndim != 2 or not right.size:
            raise UsageError(f"counts of right drafts are int64 [branching, depth], got {right.dtype} {right.shape}")
        if self.places < 1 or right.min() < 0 or right.max() > self.places:
            raise UsageError(f"counts of right drafts must lie within 0 and {self.places} places")
        if (np.diff(right, axis=1) > 0).any() or (np.diff(right, axis=0) < 0).any():
            raise UsageError("counts of right drafts must fall with depth and rise with branching")

    def by_depth(self, depth: int, branching: int) -> tuple[float, ...]:
        """p_hat of the first ``depth`` levels; what was not counted is an error that says how to count it."""
        most_branching, most_depth = self.right.shape
        if depth > most_depth or branching > most_branching:
            raise UsageError(
                f"bigmomo: acceptance of draft {self.draft} was counted to depth {most_depth} and branching "
                f"{most_branching}, not to {depth} and {branching}; count it again with these"
            )
        return tuple(float(n) / self.places for n in self.right[branching - 1, :depth])


def save(counted: Counted, folder: Path) -> Path:
    """Write the folder whole, see ``moebench.artefact``."""
    branching, depth = counted.right.shape
    header = {name: getattr(counted, name) for name in FIELDS}
    header |= {"branching": branching, "depth": depth, "provenance": dict(counted.provenance)}
    return write(folder, {FILE: (header, {"right": counted.right})})


def load(folder: Path) -> Counted:
    """Read and check an artefact; a missing, damaged or foreign file is one line that says what to do."""
    header, arrays = read(folder / FILE, NEEDS)
    try:
        return Counted(*(header[name] for name in FIELDS), arrays["right"], header["provenance"])
    except (UsageError, KeyError, TypeError, AttributeError) as error:
        raise broken(folder / FILE, " ".join(str(error).split())) from None


def check(counted: Counted, target: Target, draft_hash: str) -> None:
    """Refuse what was counted for other weights, of the model or of the draft, or with another number of experts."""
    pairs = {
        "model has weights": (counted.weights_hash, target.weights_hash),
        "model has K": (counted.top_k, target.geometry.top_k),
        "draft has weights": (counted.draft_hash, draft_hash),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UsageError(
                f"bigmomo: acceptance was counted for {counted.model} with draft {counted.draft}, whose {what} "
                f"{ours}; this run's has {theirs}; count it: {command(target, draft_hash)}"
            )


def find(target: Target, draft_hash: str) -> Path:
    """The folder for this model and draft: the user's own first, then the shipped ones."""
    for folder, header in stored("bigmomo", __package__, FILE, NEEDS):
        if (header["weights_hash"], header["draft_hash"]) == (target.weights_hash, draft_hash):
            return folder
    raise UsageError(
        f"bigmomo: how deep drafts hold was not counted for {target.name} and this draft; count it: "
        f"{command(target, draft_hash)}; or verify and move all: system.rho=1"
    )


def command(target: Target, draft_hash: str) -> str:
    """The words that count acceptance for a model."""
    draft = LOOKUP if draft_hash == LOOKUP else "FOLDER"
    return f"moebench prepare system=bigmomo model={target.word} draft={draft}"


def draft_hash_of(folder: Path) -> str:
    """Names and contents of a draft's safetensors files."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}\0{file_hash(path)}\0".encode())
    return digest.hexdigest()


def assumed(depth: int, branching: int, level: float) -> Acceptance:
    """Acceptance of a replay: at each level the first guess is right with probability ``level`` (0: as a phone's drafts
    were), each further one in ``RESCUED`` of the rounds in which those before it were wrong.
    """
    first = level or LEVEL
    ranks = [first, *((1 - first) * (1 - RESCUED) ** r * RESCUED for r in range(branching - 1))]
    source = "first guesses as asked for" if level else LEVEL_SOURCE
    if branching > 1:
        source += f"; each further guess right in {RESCUED} of the rest, as counted for tinymoe's draft"
    return Acceptance(tuple(sum(ranks) ** d for d in range(1, depth + 1)), branching, source, tuple(ranks))
