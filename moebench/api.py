"""The same from Python: ``moebench.run`` and ``moebench.compare`` take the options of the command line as keywords."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
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


def compare(systems: str | Sequence[str], baselines: bool = True, **options: Any) -> pandas.DataFrame:
    """Run several systems on one cell; one line per row, one column per metric, and ``<metric>.provenance`` beside
    each.

    With ``baselines`` the floor, the baselines and the oracles stand in the table too; ``systems="all"`` takes every
    system. A system that cannot run here keeps its line, with ``status`` failed and the reason in ``error``.
    """
    from moebench import harness
    from moebench.commands import compare as command
    from moebench.commands import compose
    from moebench.plugins import load_plugins

    registry = load_plugins()
    compose.register_groups(registry)
    names = systems.split(",") if isinstance(systems, str) else systems
    chosen = command.CompareOptions(systems=tuple(names), baselines=baselines)
    configs = command.plan(chosen, _words(options), registry)
    arms = harness.arms(configs, registry)
    with closing(harness.run_arms(arms)) as coming:
        found = dict(coming)
    return frame([row for at in range(len(arms)) for row in found[at]])


def frame(rows: Sequence[Row]) -> pandas.DataFrame:
    """Rows as a table: the labels of ``load_results``, then value and provenance of each metric."""
    import pandas

    from moebench.results import labels

    lines = []
    for row in rows:
        line = labels(row)
        for name, number in row.metrics.items():
            line |= {name: number.value, f"{name}.provenance": number.provenance}
        lines.append(line)
    return pandas.DataFrame(lines)


def _words(options: dict[str, Any]) -> list[str]:
    """Keywords as command-line words; the options of a nested mapping become dotted keys."""
    words = []
    for key, value in options.items():
        if isinstance(value, dict):
            words += _words({f"{key}.{name}": nested for name, nested in value.items()})
        else:
            words.append(f"{key}={written(value)}")
    return words


def written(value: Any) -> str:
    """A value in hydra's grammar: text is quoted, and nothing in it is read as a reference to another option."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, int | float):
        return str(value)
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", str(value))
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + (r"\'" if found[2] else ""), text) + "'"
