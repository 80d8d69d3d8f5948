"""The system under test: which one, with which options. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moebench.commands.words import build
from moebench.config import RunConfig, WorkloadConfig
from moebench.errors import UsageError
from moebench.plugins import Registry
from moebench.systemspec import SystemSpec

HW = "m4pro"  # whose modeled clock replays run on: one memory
HW_TIERS = "rtx5090_32gb"  # and a device with memory of its own


@dataclass(frozen=True, eq=False)
class Subject:
    """One system with its options. ``origin`` is the package that registered it."""

    spec: SystemSpec
    knobs: Any
    origin: str

    @property
    def name(self) -> str:
        """The system's id."""
        return self.spec.id

    @property
    def fidelity(self) -> str:
        """What it declares."""
        return self.spec.fidelity(self.knobs)

    @property
    def native(self) -> bool:
        """Whether it declares that the router's choice is what runs."""
        return self.fidelity != "altered"

    @property
    def dependent(self) -> bool:
        """Whether it declares that which experts run depends on what is resident or on when reads finish."""
        return not self.native and self.spec.timing_dependent

    @property
    def foresees(self) -> bool:
        """Whether it is given the future."""
        return self.spec.foresees(self.knobs)

    @property
    def split(self) -> bool:
        """Whether these options are about a host tier, so that a run with one memory would be refused."""
        handling = self.spec.handling(self.knobs)
        return handling.on_host or not handling.host_cache

    @property
    def hw(self) -> str:
        """The machine whose clock its runs are modeled on."""
        return HW_TIERS if self.split else HW

    def config(self, hw: str = HW, batch: int = 1, **options: Any) -> RunConfig:
        """A run's configuration; ``workload`` counts sequences of a batch only."""
        base = {"model": "tinymoe", "workload": WorkloadConfig(batch=batch), "mode": "model"}
        return RunConfig(self.name, hw, self.knobs, **{**base, **options})  # type: ignore[arg-type]


def subjects(wanted: str, options: Sequence[str], registry: Registry) -> list[Subject]:
    """The systems that ``--system`` and ``--system-option`` mean; raises ``UsageError`` of one line."""
    names = list(registry.systems) if wanted == "all" else [name.strip() for name in wanted.split(",") if name.strip()]
    values: dict[str, str] = {}
    for word in options:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--system-option {word!r} is not NAME=VALUE")
        values[name] = value
    found = []
    for name in dict.fromkeys(names):
        spec = registry.system(name)
        knobs: Any = build(spec.config, values, f"system {name}")
        found.append(Subject(spec, knobs, registry.origin[f"systems/{name}"]))
    if not found:
        raise UsageError(f"--system names no system; valid: all, {', '.join(sorted(registry.systems))}")
    return found
