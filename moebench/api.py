"""The same from Python: ``moebench.run`` and ``moebench.compare`` take the options of the command line as keywords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from moebench.result import Row


def run(**options: Any) -> list[Row]:
    """Run one configuration and return its rows; nothing is written.

    Options are those of ``moebench run`` (``system="lru"``, ``hw="m4pro"``, ``**{"workload.requests": 2}``).
    Raises ``UsageError``, one line that lists the valid choices, for what cannot be.
    """
    from moebench import harness
    from moebench.commands import compose
    from moebench.plugins import load_plugins

    registry = load_plugins()
    compose.register_groups(registry)
    (job,) = compose.jobs(_words(options), registry, sweep=False)
    return harness.run(compose.resolve(job, registry))


def compare(systems: Sequence[str], baselines: bool = True, **options: Any) -> pandas.DataFrame:
    """Run several systems on one cell; one line per row, one column per metric, and ``<metric>.provenance`` beside
    each.

    With ``baselines`` the floor, the baselines and the oracles stand in the table too.
    """
    from moebench import harness
    from moebench.commands import compare as command
    from moebench.commands import compose
    from moebench.plugins import load_plugins

    registry = load_plugins()
    compose.register_groups(registry)
    chosen = command.CompareOptions(systems=tuple(systems), baselines=baselines)
    return frame([row for config in command.plan(chosen, _words(options), registry) for row in harness.run(config)])


def frame(rows: Sequence[Row]) -> pandas.DataFrame:
    """Rows as a table: labels, then value and provenance of each metric."""
    import pandas

    lines = []
    for row in rows:
        line = {"system": row.system, "fidelity": row.fidelity, "hw": row.hw, "model": row.model}
        line |= {"workload": row.workload_name, "status": row.status, "error": row.error}
        for name, number in row.metrics.items():
            line |= {name: number.value, f"{name}.provenance": number.provenance}
        lines.append(line)
    return pandas.DataFrame(lines)


def _words(options: dict[str, Any]) -> list[str]:
    """Keywords as command-line words; text is quoted where hydra's grammar needs it."""
    words = []
    for key, value in options.items():
        text = (
            {True: "true", False: "false", None: "null"}.get(value, value) if isinstance(value, bool | None) else value
        )
        quoted = f"'{text}'" if isinstance(text, str) and not text.replace(".", "").replace("_", "").isalnum() else text
        words.append(f"{key}={quoted}")
    return words
