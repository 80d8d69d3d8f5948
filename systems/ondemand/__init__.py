"""No cache: every expert is read when it is needed and forgotten after use. The floor of every comparison."""

from moebench.hookspecs import hookimpl
from moebench.systemspec import SystemSpec


class OnDemand:
    """Keeps nothing: every missing expert gets a temporary slot."""

    @hookimpl
    def admit(self, keys):
        """Nothing stays after its use."""
        return [False] * len(keys)


@hookimpl
def register_systems(register):
    """Register the baseline."""
    register(
        SystemSpec(
            id="ondemand",
            title="On demand, no cache",
            summary="reads each expert when it is needed and keeps none",
            make=lambda config, run: OnDemand(),
            sizing="minimal",
            baseline=True,
        )
    )
