"""One row = one cell = one result file: the schema, its validation, and how it is written, read and put on stdout.

A row says where each number comes from and never holds a zero for something that was not measured. Outside the
``volatile`` block two runs of one deterministic cell give the same bytes. Knows no metric's formula.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moebench.errors import MoebenchError
from moebench.scratch import own_file

# Bump when a field is removed, renamed or changes meaning; a new optional field or a new metric does not bump it.
SCHEMA = 1
PROVENANCES = ("measured", "modeled", "published")
STATUSES = ("ok", "failed")
OPTIONAL = ("quality", "details")  # blocks that stand in a file only where they hold something

# Every metric of the table: name -> (unit, whether more is better; None where neither direction is).
METRICS: dict[str, tuple[str, bool | None]] = {
    "decode_tok_s": ("tok/s", True),
    "ttft_s": ("s", False),
    "tpot_p50_ms": ("ms", False),
    "tpot_p95_ms": ("ms", False),
    "tpot_p99_ms": ("ms", False),
    "peak_active_gib": ("GiB", False),
    "allocator_peak_gib": ("GiB", False),
    "process_peak_gib": ("GiB", False),
    "hit_rate": ("fraction", True),
    "late_rate": ("fraction", False),
    "host_rate": ("fraction", True),
    "ssd_mib_per_token": ("MiB/token", False),
    "reads_per_token": ("1/token", False),
    "storage_requests_per_token": ("1/token", False),
    "stall_ms_per_token": ("ms/token", False),
    "effective_gb_s": ("GB/s", None),
    "accepted_per_round": ("token/round", True),
    "verified_per_token": ("row/token", False),
    "token_agreement": ("fraction", True),
    "kl_median_nats": ("nats", False),
    "kl_p99_nats": ("nats", False),
    "perplexity": ("1", False),
    "quality_delta": ("points", True),
}


class ResultError(MoebenchError, ValueError):
    """A row that breaks the rules of results, or a file that is not a valid one."""


@dataclass(frozen=True)
class Metric:
    """One number. ``value`` None needs a ``reason``; a value needs a ``provenance``, a published one its ``source``.

    ``n`` counts the samples behind the value, ``ci`` is its 95 % interval, ``samples`` stay in the file only.
    """

    value: float | None
    unit: str
    higher_is_better: bool | None
    n: int = 1
    samples: tuple[float, ...] = ()
    ci: tuple[float, float] | None = None
    provenance: str | None = None
    source: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", tuple(self.samples))
        object.__setattr__(self, "ci", None if self.ci is None else tuple(self.ci))
        for number in (self.value, *self.samples, *(self.ci or ())):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
                raise ResultError(f"metric: {number!r} is not a number")
            if number is not None and not math.isfinite(number):
                raise ResultError(f"metric: {number!r} is not finite; use value None and a reason")
        if self.value is None and not self.reason:
            raise ResultError("metric: value None needs a reason")
        if self.value is not None and self.provenance not in PROVENANCES:
            raise ResultError(f"metric: provenance {self.provenance!r} is not one of {', '.join(PROVENANCES)}")
        if self.provenance == "published" and not self.source:
            raise ResultError("metric: a published value needs its source")
        if self.ci is not None and (len(self.ci) != 2 or self.ci[0] > self.ci[1]):
            raise ResultError(f"metric: ci must be (low, high), got {self.ci!r}")
        if self.n < 0:
            raise ResultError(f"metric: n must not be negative, got {self.n}")


def metric(name: str, value: float | None, provenance: str | None, n: int = 1, reason: str = "", **more: Any) -> Metric:
    """A metric of the table with its unit and direction filled in."""
    unit, higher = METRICS[name]
    return Metric(value, unit, higher, n=n, provenance=None if value is None else provenance, reason=reason, **more)


@dataclass(frozen=True)
class Row:
    """One cell and what became of it.

    ``assumptions`` lists every assumed or transferred input in words. ``quality`` holds the scores of each task,
    ``details`` what the report draws: steps, shares of time, a few tokens on a timeline. ``volatile`` (timestamp,
    durations) is the only block that may differ between two runs of a deterministic cell.
    """

    system: str
    fidelity: str
    hw: str
    model: str
    workload_name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    workload: Mapping[str, Any]  # kind, seed, hash
    protocol: Mapping[str, Any]  # warm-up, repeats, page-cache state and how it was set
    metrics: Mapping[str, Metric]
    assumptions: tuple[str, ...] = ()
    status: str = "ok"
    error: str | None = None
    schema: int = SCHEMA
    quality: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    volatile: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        if self.status not in STATUSES:
            raise ResultError(f"row: status {self.status!r} is not one of {', '.join(STATUSES)}")
        if (self.status == "failed") != bool(self.error):
            raise ResultError("row: a failed row needs an error, and only a failed one has it")
        if missing := {"kind", "seed", "hash"} - set(self.workload):
            raise ResultError(f"row: workload lacks {', '.join(sorted(missing))}")

    @property
    def options(self) -> dict[str, Any]:
        """The configuration by dotted name, as options are written on a command line."""
        return _dotted(self.config)

    @property
    def id(self) -> str:
        """Twelve hex digits over everything but the volatile block."""
        return _id(_plain(self))

    @property
    def machine(self) -> str:
        """Six hex digits over processor, card and whole GiB of the machine that was timed; empty on a modeled row."""
        if self.protocol.get("clock") != "wall":
            return ""
        parts = [self.environment.get(name) for name in ("cpu", "gpu")]
        return hashlib.sha256(_dumps([*parts, round(self.environment.get("ram_gib") or 0)]).encode()).hexdigest()[:6]

    @property
    def folder(self) -> Path:
        """``<hw>/<system>__<model>__<workload>`` with path characters made safe; ``<hw>-<machine>`` where one was
        timed, so that the folders of several machines merge.
        """
        place = f"{self.hw}-{self.machine}" if self.machine else self.hw
        return Path(_safe(place)) / "__".join(_safe(part) for part in (self.system, self.model, self.workload_name))


def to_json(row: Row) -> str:
    """The text of a result file: sorted keys, shortest exact floats, the long lists of optional blocks on one line."""
    lines = []
    for name, value in sorted({"id": row.id, **_plain(row)}.items()):
        text = _dumps(value) if name in OPTIONAL else json.dumps(value, sort_keys=True, indent=1, allow_nan=False)
        lines.append(f' "{name}": ' + text.replace("\n", "\n "))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, where: str = "result") -> Row:
    """The inverse of ``to_json``; what is not a valid row is an error that says why."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ResultError(f"{where} is not a result file: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise ResultError(f"{where} is not a result file: it has no schema version")
    if data["schema"] > SCHEMA:
        raise ResultError(
            f"{where} has schema {data['schema']}, newer than this moebench reads ({SCHEMA}); upgrade moebench"
        )
    claimed = data.pop("id", None)
    try:
        content = _id(data)
        metrics = {name: Metric(**_known(Metric, entry)) for name, entry in data.pop("metrics").items()}
        row = Row(metrics=metrics, **_known(Row, data))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ResultError(f"{where} is not a valid result: {error}") from None
    if claimed != content:
        raise ResultError(f"{where} was changed after it was written: its id is {claimed}, its content gives {content}")
    return row


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a later moebench with the same schema are optional ones, and left out."""
    names = {entry.name for entry in dataclasses.fields(cls)}
    return {key: value for key, value in data.items() if key in names}


def write(row: Row, folder: str | Path) -> Path:
    """Write one row as ``<row.folder>/<id>-<n>.json``; never touches an older file.

    The file appears whole or not at all; ``n`` counts runs of the same content.
    """
    target = Path(folder) / row.folder
    target.mkdir(parents=True, exist_ok=True)
    with own_file(target / ".new") as file:
        file.write(to_json(row).encode())
        file.flush()
        os.fsync(file.fileno())
        count = 0
        while True:
            path = target / f"{row.id}-{count}.json"
            try:
                os.link(target / ".new", path)  # fails where the name is taken
                return path
            except FileExistsError:
                count += 1


def load(path: str | Path) -> Row:
    """Read one result file."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"result file {path}: {getattr(error, 'strerror', None) or error}") from None
    return from_json(text, str(path))


def stdout_document(rows: Sequence[Row]) -> str:
    """The last line of a command's output: ``{"schema", "rows"}`` in one compact line, without lists of samples."""
    plain = [{"id": row.id, **_plain(row)} for row in rows]
    for entry in plain:
        entry.pop("details", None)
        for task in entry.get("quality", {}).get("tasks", {}).values():
            for scores in ("scores", "reference_scores"):
                task.pop(scores, None)
        for number in entry["metrics"].values():
            del number["samples"]
    return _dumps({"schema": SCHEMA, "rows": plain})


def _id(data: Mapping[str, Any]) -> str:
    fixed = {key: value for key, value in data.items() if key != "volatile"}
    return hashlib.sha256(_dumps(fixed).encode()).hexdigest()[:12]


def _plain(row: Row) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps(dataclasses.asdict(row), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ResultError(f"row: holds something that JSON cannot: {error}") from None
    return {key: value for key, value in plain.items() if value or key not in OPTIONAL}


def _dotted(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _dumps(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"
