"""How far forecasts were off on machines where ``moebench validate`` compared them with measurements.

One file holds the errors of every machine: the user's own, and one that ships with moebench. Knows numbers and names of
machines; runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from moebench.errors import MoebenchError
from moebench.machine import Machine
from moebench.result import Row
from moebench.scratch import whole_file
from moebench.validation import quantile

SCHEMA = 1
FILE = "forecast.json"
SHOWN = {"decode_tok_s": "decode tok/s", "stall_ms_per_token": "stall"}
UNKNOWN = "not validated on this machine"


@dataclass(frozen=True)
class Record:
    """What one machine's forecasts were off by: ``errors[metric][workload]`` are relative, modeled - measured over
    measured, one for each cell. ``profile`` is the digest of the profile that was validated, ``date`` the day.
    """

    hw: str
    cpu: str
    ram_gib: float
    date: str
    profile: str
    errors: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    def sizes(self, metric: str) -> list[float]:
        """Absolute errors of a metric over all workloads."""
        return [abs(value) for values in self.errors.get(metric, {}).values() for value in values]

    @property
    def band(self) -> str:
        """The errors in words: of each metric the median, and what 95 % of the cells do not exceed."""
        said = []
        for metric, name in SHOWN.items():
            if sizes := self.sizes(metric):
                said.append(f"{name} median {median(sizes):.1%}, 95 % {quantile(sizes, 0.95):.1%}")
        count = len(self.sizes("decode_tok_s"))
        return f"{'; '.join(said)} over {count} cells, validated on {self.cpu}, {self.ram_gib:.1f} GiB, {self.date}"

    def is_of(self, hw: str, machine: Machine) -> bool:
        """Whether it speaks of profile ``hw``; ``host`` is the machine that runs this, and no other of that name."""
        same = (self.cpu, round(self.ram_gib)) == (machine.cpu, round(machine.ram_gib))
        return self.hw == hw and (not hw.startswith("host") or same)

    def joined(self, later: Record) -> Record:
        """This record with the workloads of a ``later`` one of the same profile in place of its own."""
        if self.profile != later.profile:
            return later
        merged = {
            metric: {**self.errors.get(metric, {}), **later.errors.get(metric, {})}
            for metric in (*self.errors, *later.errors)
        }
        return Record(later.hw, later.cpu, later.ram_gib, later.date, later.profile, merged)


def shipped() -> list[Record]:
    """The records that come with moebench."""
    return _parsed(resources.files("moebench.configs").joinpath(FILE).read_text(), FILE)


def read(home: Path) -> list[Record]:
    """The user's own records, from ``home``; none where nothing was validated."""
    path = home / FILE
    return _parsed(path.read_text(), str(path)) if path.is_file() else []


def write(path: Path, record: Record) -> None:
    """Put ``record`` in place of that of the same profile name and machine; the file appears whole or not at all."""
    machine = Machine(record.cpu, "", record.ram_gib)
    known = _parsed(path.read_text(), str(path)) if path.is_file() else []
    others = [one for one in known if not one.is_of(record.hw, machine)]
    before = [one for one in known if one.is_of(record.hw, machine)]
    records = [*others, before[0].joined(record) if before else record]
    text = json.dumps({"schema": SCHEMA, "machines": [vars(one) for one in records]}, sort_keys=True)
    with whole_file(path) as file:
        file.write(f"{text}\n".encode())


def told(rows: Iterable[Row], home: Path, machine: Machine) -> dict[str, str]:
    """For each machine that ``rows`` model a line on what its forecasts were off by."""
    names = dict.fromkeys(row.hw for row in rows if row.protocol.get("clock") == "virtual")
    return {hw: _told(hw, read(home), machine) for hw in names}


def _told(hw: str, own: Sequence[Record], machine: Machine) -> str:
    known = shipped()
    for record in (*own, *known):
        if record.is_of(hw, machine):
            return f"modeled on {hw}: forecast error of {record.band}"
    others = "".join(f"; this model of time elsewhere: {record.band}" for record in (*own, *known)[:1])
    return f"modeled on {hw}: {UNKNOWN}{others}"


def _parsed(text: str, where: str) -> list[Record]:
    try:
        data: Any = json.loads(text)
        if data["schema"] > SCHEMA:
            raise MoebenchError(f"{where} has schema {data['schema']}, newer than this moebench reads ({SCHEMA})")
        return [Record(**{name: entry[name] for name in Record.__dataclass_fields__}) for entry in data["machines"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MoebenchError(f"{where} is no file of forecast errors ({error}); remove it") from None
