"""Memory-mapped weights: no cache of its own, page faults do the I/O and the operating system's page cache does the
keeping.
"""

from moebench.hookspecs import hookimpl
from moebench.systems.ondemand import OnDemand
from moebench.systemspec import SystemSpec


@hookimpl
def register_systems(register):
    """Register the baseline."""
    register(
        SystemSpec(
            id="mmap",
            title="Memory map",
            summary="maps the weights and leaves caching to the operating system, as llama.cpp does by default",
            make=lambda config, run: OnDemand(),
            engine="mmap",
            sizing="minimal",
        )
    )
