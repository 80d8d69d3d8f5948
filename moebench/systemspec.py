"""What a system declares about itself when it registers: names, honesty and how to build it.

Knows nothing of how a system works; ``make`` returns the plugin object whose hooks the run binds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FIDELITIES = ("exact", "advisory", "altered")


@dataclass(frozen=True)
class NoKnobs:
    """The configuration of a system that has nothing to set."""


@dataclass(frozen=True)
class SystemSpec:
    """One registered system.

    ``config`` is a frozen dataclass type with a default for every field; ``make(config, run)`` builds the plugin object;
    ``fidelity(config)`` is ``exact`` (native routing is executed), ``advisory`` (native, predictions only prefetch) or
    ``altered`` (other experts run). ``timing_dependent``: decisions depend on when reads finish. ``needs`` names artefacts
    or trace channels; ``oracle`` marks bounds that know the future; ``engine`` is the read engine used when none is asked for.
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
    oracle: bool = False
    engine: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.id):
            raise ValueError(f"system id {self.id!r} must be lower-case letters, digits and underscores")
        if not dataclasses.is_dataclass(self.config):
            raise ValueError(f"system {self.id}: config must be a dataclass type, got {self.config!r}")
        needy = [
            f.name
            for f in dataclasses.fields(self.config)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if needy:
            raise ValueError(f"system {self.id}: every knob needs a default, missing for {', '.join(needy)}")
