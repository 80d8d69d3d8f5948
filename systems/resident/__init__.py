"""All experts in memory before the first request: the ceiling that no cache can beat."""

from moebench.hookspecs import hookimpl
from moebench.systemspec import SystemSpec


class Resident:
    """Needs no hook: every request is a hit."""


@hookimpl
def register_systems(register):
    """Register the baseline."""
    register(
        SystemSpec(
            id="resident",
            title="All resident",
            summary="every expert in memory, loaded before the first request; ignores budget",
            make=lambda config, run: Resident(),
            sizing="full",
            baseline=True,
        )
    )
