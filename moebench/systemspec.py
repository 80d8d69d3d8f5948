"""What a system declares about itself when it registers: names, honesty and how to build it.

Knows nothing of how a system works; ``make`` returns the plugin object whose hooks the run binds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moebench.geometry import Geometry

FIDELITIES = ("exact", "advisory", "altered")
SIZINGS = ("budget", "minimal", "full")


@dataclass(frozen=True, eq=False)
class RunContext:
    """What a system may know when it is built, before the first request.

    ``slots`` counts the experts that the fastest tier holds, ``scope`` is ``shared`` or ``per_layer``. ``future`` is
    given to oracles only: the demands to come, as (layer, keys) in the order of the loop.
    """

    geometry: Geometry
    slots: int
    scope: str
    seed: int = 0
    future: Sequence[tuple[int, Sequence[int]]] | None = None


@dataclass(frozen=True)
class NoKnobs:
    """The configuration of a system that has nothing to set."""


@dataclass(frozen=True)
class SystemSpec:
    """One registered system.

    ``config`` is a frozen dataclass type with a default for every field; ``make(config, run)`` builds the plugin
    object; ``fidelity(config)`` is ``exact`` (native routing is executed), ``advisory`` (native, predictions only
    prefetch) or ``altered`` (other experts run). ``timing_dependent``: decisions depend on when reads finish. ``needs``
    names artefacts or trace channels; ``baseline`` puts the system into every comparison, and so does ``oracle``, a
    bound that no real system reaches; ``engine`` is the read engine used when none is asked for.
    ``sizing`` says how many cache slots it gets: what the ``budget`` holds, the ``minimal`` one layer of one token
    needs, or ``full``, all experts, loaded before the first request.
    """

    id: str
    title: str
    summary: str
    make: Callable[[Any, Any], object]
    paper: str = ""
    config: type = NoKnobs
    fidelity: Callable[[Any], str] = field(default=lambda config: "exact")
    timing_dependent: bool = False
    needs: tuple[str, ...] = ()
    baseline: bool = False
    oracle: bool = False
    engine: str | None = None
    sizing: str = "budget"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.id):
            raise ValueError(f"system id {self.id!r} must be lower-case letters, digits and underscores")
        if not dataclasses.is_dataclass(self.config):
            raise ValueError(f"system {self.id}: config must be a dataclass type, got {self.config!r}")
        if self.sizing not in SIZINGS:
            raise ValueError(f"system {self.id}: sizing {self.sizing!r} is not one of {', '.join(SIZINGS)}")
        needy = [
            f.name
            for f in dataclasses.fields(self.config)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if needy:
            raise ValueError(f"system {self.id}: every knob needs a default, missing for {', '.join(needy)}")
