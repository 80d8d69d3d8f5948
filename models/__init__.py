"""Model geometries, one YAML file each, registered through the hook that others use; and the embedded model."""

from pathlib import Path

from moebench.hookspecs import hookimpl


@hookimpl
def register_models(register):
    """Register every geometry of this folder."""
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        register(path)
