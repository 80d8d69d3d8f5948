"""``moebench report``: one HTML page from result files, the same tables as Markdown and CSV, a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moebench import hardware
from moebench.commands.places import writable_folder
from moebench.commands.words import parse
from moebench.config import option
from moebench.errors import MoebenchError
from moebench.plugins import Registry
from moebench.result import Row
from moebench.scratch import whole_file

TABLES = "report.tables"


@dataclass(frozen=True)
class ReportOptions:
    """Which results are reported, and where the report goes."""

    results: tuple[str, ...] = option(("results",), "folders or files of results")
    out: str = option("reports", "folder that the report is written to; report.html there is replaced")


def main(words: Sequence[str]) -> int:
    """Read, build and write; the last line on stdout is the document."""
    from moebench import results
    from moebench.commands.command_line import command
    from moebench.forecast import told
    from moebench.machine import detect
    from moebench.plugins import home, load_plugins
    from moebench.report import build as report
    from moebench.report.groups import newest

    options = parse(words, ReportOptions, "report")
    if options is None:
        return 0
    left: list[str] = []

    def warn(text: str) -> None:
        left.append(text)
        results.warning(text)

    found, older = newest(results.read(options.results, warn=warn))
    registry = load_plugins()
    rows = [*found, *published(found, registry)]
    profiles, unknown = _profiles(rows, registry)
    sources = report.Sources(
        roles={name: registry.role(name) for name in registry.systems},
        commands={row.id: command(row, registry) for row in found},
        profiles=profiles,
        unknown=unknown,
        forecasts=told(rows, home(), detect()),
        left_out=[*left, *older],
    )
    files = report.build(rows, sources)
    written = _write(files, writable_folder(options.out))
    failed = sum(row.status == "failed" for row in found)
    print(
        f"{len(found)} rows ({failed} failed), {len(rows) - len(found)} published beside them, "
        f"{len(sources.left_out)} left out"
    )
    for path in written:
        if path.suffix != ".csv":
            print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
    print(f"{Path(options.out) / TABLES}  {sum(path.suffix == '.csv' for path in written)} tables as CSV")
    document = {"report": str(written[0]), "files": [str(path) for path in written], "rows": len(found)}
    print(json.dumps({**document, "failed": failed, "left_out": sources.left_out}, separators=(",", ":")))
    return 0


def published(rows: Sequence[Row], registry: Registry) -> list[Row]:
    """Figures of others that belong beside these rows, each once; none beside a row whose options are unknown here."""
    from moebench.commands.compose import typed
    from moebench.harness.rows import published_rows

    found: dict[str, Row] = {}
    for row in rows:
        spec = registry.systems.get(row.system)
        if spec is None or not any((one.hw, one.model) == (row.hw, row.model) for one in spec.published):
            continue
        with suppress(MoebenchError):
            found |= {one.id: one for one in published_rows(spec, typed(row.config, registry), row.model)}
    return list(found.values())


def _profiles(rows: Sequence[Row], registry: Registry) -> tuple[dict[str, hardware.HardwareProfile], dict[str, str]]:
    """The machines' profiles, and why one is not known here."""
    profiles, unknown = {}, {}
    for name in sorted({row.hw for row in rows}):
        try:
            profiles[name] = hardware.load(registry.hardware_path(name))
        except MoebenchError as error:
            unknown[name] = str(error)
    return profiles, unknown


def _write(files: dict[str, str], out: Path) -> list[Path]:
    """Write all files, and take away tables of an older report; a file appears whole or not at all."""
    tables = out / TABLES
    tables.mkdir(exist_ok=True)
    for old in tables.glob("*.csv"):
        if f"{TABLES}/{old.name}" not in files:
            old.unlink()
    written = []
    for name, text in files.items():
        path = out / name
        with whole_file(path) as file:
            file.write(text.encode())
        written.append(path)
    return written
