"""Result files in, rows or a table out: folders of any depth, several machines' beside each other.

What is no result of this moebench (foreign, corrupt, changed by hand, of a newer schema) is named and either skipped
with a warning or, where leaving it out would mislead, refused. Failed rows are rows. Knows no metric's meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebench.errors import UsageError
from moebench.result import ResultError, Row, load

if TYPE_CHECKING:
    import pandas

VALIDATION = "validation-"
BASELINE = "baseline"  # a folder of this name below the one that is read is a reference of its own
HOW = "make some with 'moebench run system=lru hw=m4pro' or 'moebench compare', which write to results/"

COLUMNS = ("metric", "value", "unit", "higher_is_better", "provenance", "n", "ci_low", "ci_high", "reason", "source")


def warning(text: str) -> None:
    """One line on stderr."""
    print(f"moebench: warning: {text}", file=sys.stderr)


def read(
    path: str | Path | Iterable[str | Path], strict: bool = False, warn: Callable[[str], None] = warning
) -> list[Row]:
    """Rows of a result file, of a folder and what lies below it, or of several of either, each file once, by path.

    Left out are hidden folders and, below a folder that was named, those called ``baseline``. A file that is no result
    costs one call of ``warn``; with ``strict`` it raises ``UsageError``, as does a path that holds no result at all.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    rows, skipped = [], 0
    for file in files(paths):
        try:
            rows.append(load(file))
        except ResultError as error:
            if strict:
                raise UsageError(f"{error}; it was not left out silently: remove it or name other results") from None
            warn(f"{error}; skipped")
            skipped += 1
    if not rows:
        where = ", ".join(map(str, paths)) or "nothing"
        found = f"{skipped} files, none of them a result" if skipped else "no result files"
        raise UsageError(f"{where}: {found}; {HOW}")
    return rows


def files(paths: Sequence[str | Path]) -> list[Path]:
    """The JSON files that ``read`` looks at, each once; a path that does not exist is a ``UsageError``."""
    found: dict[Path, Path] = {}
    for name in paths:
        root = Path(name).expanduser()
        if not root.exists():
            raise UsageError(f"there are no results at {name}; {HOW}")
        for file in sorted(root.rglob("*.json")) if root.is_dir() else [root]:
            between = file.relative_to(root).parts[:-1]
            if file.name.startswith(VALIDATION):  # the document of one, beside its rows
                continue
            if not any(part.startswith(".") or part == BASELINE for part in between):
                found.setdefault(file.resolve(), file)
    return list(found.values())


def labels(row: Row) -> dict[str, Any]:
    """What a row is called in every table of this package's Python side."""
    return {
        "system": row.system,
        "fidelity": row.fidelity,
        "hw": row.hw,
        "model": row.model,
        "workload": row.workload_name,
        "budget": row.config.get("budget"),
        "seed": row.workload["seed"],
        "machine": row.machine,
        "status": row.status,
        "error": row.error,
        "commit": row.environment.get("commit"),
        "finished": row.volatile.get("finished"),
        "id": row.id,
    }


def load_results(path: str | Path | Iterable[str | Path]) -> pandas.DataFrame:
    """Result files as one tidy DataFrame: one line per row and metric, those without a value included.

    Columns are the row's labels, then ``metric``, ``value`` (NaN where there is none, with the ``reason``), ``unit``,
    ``higher_is_better``, ``provenance``, ``n``, ``ci_low``, ``ci_high``, ``reason`` and ``source``. A failed row keeps
    its lines, so that a mean over ``value`` can be checked against ``status``.
    """
    import pandas

    lines = []
    for row in read(path):
        for name, number in row.metrics.items():
            line = {**vars(number), "metric": name}
            line["ci_low"], line["ci_high"] = number.ci or (None, None)
            lines.append(labels(row) | {column: line[column] for column in COLUMNS})
        if not row.metrics:
            lines.append(labels(row) | dict.fromkeys(COLUMNS))
    table = pandas.DataFrame(lines)
    return table.astype({"value": float, "ci_low": float, "ci_high": float, "n": "Int64"})
