"""What a system declares about itself when it registers: names, honesty and how to build it.

Knows nothing of how a system works; ``make`` returns the plugin object whose hooks the run binds.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebench.geometry import Geometry

if TYPE_CHECKING:
    import numpy as np

    from moebench.backends.base import Adapters, Drafter, Ops
    from moebench.draft import Acceptance
    from moebench.trace.format import Trace

FIDELITIES = ("exact", "advisory", "altered")
SIZINGS = ("budget", "minimal", "full")
SCOPES = ("shared", "per_layer")


@dataclass(frozen=True, eq=False)
class Target:
    """The model that a system is about to serve, as it must know it to choose what it brings.

    ``weights_hash``, ``config`` (of transformers) and ``selection_bias`` belong to a model that computes, ``trace`` to
    a replay. The bias (fp32 [E] by layer, where a family has one) is what its routing law adds to choose by.
    ``number_bytes`` is what one number of a predictor takes where the run is measured, 0 on a modeled machine, which
    holds numbers as they are stored. ``trees``: drafts may branch, which a layer that carries state rules out.
    ``asked`` is what ``model=`` said, empty where it left the choice.
    """

    name: str
    geometry: Geometry
    weights_hash: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    selection_bias: Mapping[int, np.ndarray] = field(default_factory=dict)
    number_bytes: int = 0
    trace: Trace | None = None
    trees: bool = True
    asked: str = ""

    @property
    def word(self) -> str:
        """What ``model=`` takes for this model, in commands that a message recommends."""
        return self.asked or self.name


@dataclass(frozen=True, eq=False)
class Equipment:
    """What a system brings to a run besides its code: fitted files and what follows from them.

    ``held_bytes`` is booked in the ledger, by category; ``adapters`` are served by the backend; ``adapted`` counts the
    projections that have one beside them, in a replay too; ``top_k`` experts run
    per token and layer where that is not the model's own number; ``draft`` is the folder of a dense model of the same
    vocabulary, which a live run loads, books and hands to the system as ``RunContext.drafter``; ``acceptance`` says how
    deep drafts hold in a replay of a trace that has none (there the system books what its draft model would hold);
    ``assumptions`` are printed with the row, ``files`` (name -> hash) stand in its protocol; ``content`` is the
    system's own.
    """

    held_bytes: Mapping[str, int] = field(default_factory=dict)
    adapters: Adapters | None = None
    top_k: int | None = None
    assumptions: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    content: Any = None
    draft: str | Path | None = None
    acceptance: Acceptance | None = None
    adapted: int = 0

    def __post_init__(self) -> None:
        if self.adapters is not None and self.adapted != len(self.adapters.pairs):
            raise ValueError(f"equipment counts {self.adapted} of {len(self.adapters.pairs)} adapters")


@dataclass(frozen=True, eq=False)
class RunContext:
    """What a system may know when it is built, before the first request.

    ``slots`` counts the experts that the fastest tier holds, ``scope`` is ``shared`` or ``per_layer``, ``batch`` the
    sequences that run together. ``future`` is given to oracles only: the demands to come, as (layer, keys) in the order
    of the loop. ``ops`` is the backend's arithmetic where a model computes; ``equipment`` is what the system's own
    ``equip`` returned, ``drafter`` the model that its ``draft`` names, where a model computes. ``request_s(nbytes,
    depth)`` are the seconds of one storage request with so many in flight, by the machine's read curve; None where no
    request can read several experts.
    """

    geometry: Geometry
    slots: int
    scope: str
    seed: int = 0
    future: Sequence[tuple[int, Sequence[int]]] | None = None
    batch: int = 1
    ops: Ops | None = None
    equipment: Equipment = field(default_factory=Equipment)
    drafter: Drafter | None = None
    request_s: Callable[[int, int], float] | None = None


@dataclass(frozen=True)
class Published:
    """Figures that others published for this system, shown beside the row of the same machine and model.

    ``metrics`` maps a metric's name to (value, source), or to the name of a claim of ``configs/claims`` that has both;
    ``setting`` says under which conditions, ``where(knobs, run)`` whether a run's options (of the system, and its
    ``RunConfig``) are those.
    """

    hw: str
    model: str
    metrics: Mapping[str, tuple[float, str] | str]
    setting: str
    where: Callable[[Any, Any], bool] = field(default=lambda knobs, run: True)

    def figures(self) -> dict[str, tuple[float, str]]:
        """Value and source by metric, those of claims looked up."""
        from moebench.claimfiles import figure

        return {name: figure(found, name) if isinstance(found, str) else found for name, found in self.metrics.items()}


@dataclass(frozen=True)
class Preparation:
    """How ``moebench prepare`` fits or imports a system's artefacts.

    ``options`` is a frozen dataclass of the system's own options, a default for each. ``fit(options, folder, name, out,
    progress)`` works on a model folder and returns the path of what it wrote under ``out``; ``convert(options, source,
    folder, name, out)`` takes files that others published. ``progress(text, done, total)``. With ``geometries`` a model
    that only replays will do as well: ``folder`` is then its geometry file. While it fits, torch has as many threads
    as an option ``threads`` says, where there is one.
    """

    options: type
    fit: Callable[[Any, Path, str, Path, Callable[[str, int, int], None]], Path]
    convert: Callable[[Any, Path, Path, str, Path], Path] | None = None
    geometries: bool = False


@dataclass(frozen=True)
class Handling:
    """How the loop holds and moves experts for one configuration of a system.

    ``late_eviction``: the reads of a demand are issued before its victims are chosen, into host slots, or on one memory
    into a slot of each pool that is kept free. ``pool``: so many transfers into the fastest tier at a time at most, the
    buffers that they pin; 0 for no bound. ``whole_reads``: an expert's piece is one storage request, not cut into
    blocks between which demand overtakes a prefetch. ``wave``: so many missing experts of a demand at a time at most,
    those after them when these were computed; 0 for as many as the slots hold. ``host_cache``: host slots keep experts;
    without it they are landing places. ``on_host``: experts may be computed on the host's own processor. ``matrices``:
    cache slots hold single matrices, not whole experts (in replay only). ``relocation_bytes``: so much may be written
    in a run to change the places of experts on storage; 0: they stay where they are, and ``relayout`` is not asked.
    """

    late_eviction: bool = False
    pool: int = 0
    wave: int = 0
    whole_reads: bool = False
    host_cache: bool = True
    on_host: bool = False
    matrices: bool = False
    relocation_bytes: int = 0


@dataclass(frozen=True)
class Rung:
    """One configuration of a system's ablation ladder, and in words what it changes.

    It is one step from the rung at position ``after`` of the ladder; None: from the one before it. ``repairs``: it is
    there to give back what that rung lost, and is asked how much of it does.
    """

    knobs: Any
    name: str = ""
    change: str = ""
    after: int | None = None
    repairs: bool = False


@dataclass(frozen=True)
class NoKnobs:
    """The configuration of a system that has nothing to set."""


def brings_nothing(config: Any, target: Target) -> Equipment:
    """The equipment of most systems."""
    return Equipment()


@dataclass(frozen=True)
class SystemSpec:
    """One registered system.

    ``config`` is a frozen dataclass type with a default for every field; ``make(config, run)`` builds the plugin
    object; ``fidelity(config)`` is ``exact`` (native routing is executed), ``advisory`` (native, predictions only
    prefetch) or ``altered`` (other experts run). ``timing_dependent``: where it alters routing, which experts run
    depends on what is resident or on when reads finish, so that answers may differ from run to run. ``reads_ahead``: it
    reads before a layer asks, so that hits, and where it takes reads back bytes, depend on when reads finish.
    ``needs`` names artefacts or trace channels; ``baseline`` puts the system into every comparison, and so does
    ``oracle``, a bound that no real system reaches; ``foresight(config)``: this configuration of another system is
    given the future too;
    ``engine`` is the read engine used when none is asked for.
    ``equip(config, target)`` returns what the system brings (default: nothing), or raises what a user can mend;
    ``published`` are figures to stand beside the rows, ``prepare`` makes the artefacts. ``ladder(config, target)``: the
    way from a configuration that alters nothing to ``config``, one change at a time; its first rung needs no words, it
    shows what quantisation costs.
    ``sizing`` says how many cache slots it gets: what the ``budget`` holds, the ``minimal`` one layer of one token
    needs, or ``full``, all experts, loaded before the first request; ``scope`` whether layers share them (``shared``)
    or own equal parts (``per_layer``) where the run does not say. ``handling(config)`` is how the loop moves experts
    for it; ``whole_prompt``: a prompt is one pass where the run does not say, so that each expert is read once for it.
    """

    id: str
    title: str
    summary: str
    make: Callable[[Any, Any], object]
    paper: str = ""
    config: type = NoKnobs
    fidelity: Callable[[Any], str] = field(default=lambda config: "exact")
    timing_dependent: bool = False
    reads_ahead: bool = False
    needs: tuple[str, ...] = ()
    baseline: bool = False
    oracle: bool = False
    foresight: Callable[[Any], bool] = field(default=lambda config: False)
    engine: str | None = None
    sizing: str = "budget"
    scope: str = "shared"
    handling: Callable[[Any], Handling] = field(default=lambda config: Handling())
    whole_prompt: bool = False
    equip: Callable[[Any, Target], Equipment] = field(default=brings_nothing)
    published: tuple[Published, ...] = ()
    prepare: Preparation | None = None
    ladder: Callable[[Any, Target], Sequence[Rung]] = field(default=lambda config, target: (Rung(config),))

    def foresees(self, config: Any) -> bool:
        """Whether a run with ``config`` is given the demands to come."""
        return self.oracle or self.foresight(config)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.id):
            raise ValueError(f"system id {self.id!r} must be lower-case letters, digits and underscores")
        if not dataclasses.is_dataclass(self.config):
            raise ValueError(f"system {self.id}: config must be a dataclass type, got {self.config!r}")
        if self.sizing not in SIZINGS:
            raise ValueError(f"system {self.id}: sizing {self.sizing!r} is not one of {', '.join(SIZINGS)}")
        if self.scope not in SCOPES:
            raise ValueError(f"system {self.id}: scope {self.scope!r} is not one of {', '.join(SCOPES)}")
        needy = [
            f.name
            for f in dataclasses.fields(self.config)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if needy:
            raise ValueError(f"system {self.id}: every knob needs a default, missing for {', '.join(needy)}")
        self._check_defaults()

    def _check_defaults(self) -> None:
        """What is declared must hold for the default options, or commands that only list systems would trip over it."""
        if not self.config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise ValueError(f"system {self.id}: config must be frozen: @dataclass(frozen=True)")
        knobs = self.config()
        typing.get_type_hints(self.config)  # a hint that names nothing fails here
        for knob in dataclasses.fields(knobs):
            if not isinstance(value := getattr(knobs, knob.name), str | int | float | tuple | None):
                raise ValueError(
                    f"system {self.id}: option {knob.name} is a {type(value).__name__}; options are text, numbers,"
                    " true or false, or tuples of them"
                )
        if (said := self.fidelity(knobs)) not in FIDELITIES:
            raise ValueError(f"system {self.id}: fidelity {said!r} is not one of {', '.join(FIDELITIES)}")
        if not isinstance(self.handling(knobs), Handling):
            raise ValueError(f"system {self.id}: handling(config) must return a Handling")
