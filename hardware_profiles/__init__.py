"""Hardware profiles, one YAML file each, registered through the hook that others use."""

from pathlib import Path

from moebench.hookspecs import hookimpl


@hookimpl
def register_hardware(register):
    """Register every profile of this folder."""
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        register(path)
