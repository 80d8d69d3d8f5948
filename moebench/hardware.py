"""A declared machine: memory, storage, links and compute, every number with its unit and its source.

Loads ``hardware_profiles/*.yaml``, the user's own files and what ``moebench calibrate`` wrote. Knows no time and no
experts: the virtual timeline turns these numbers into seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from moebench.errors import UsageError
from moebench.machine import Machine
from moebench.read_curve import ReadCurve
from moebench.yamlfile import read_yaml

SOURCES = ("datasheet", "paper", "measured", "estimate")
# name -> (unit, which machines must give it): all, those with a device of its own memory, or none: a run that needs a
# number its machine does not give is refused. page_fault_us is one major fault of one page with its read; bandwidths
# are what is reached, not the bus's peak. map_us makes one expert's pages visible to the accelerator; on_chip_* is the
# memory inside it that its copies fill, tile_rows the rows it multiplies at a time at the least; rans_gb_s counts
# decoded bytes where the decoder runs; cpu_tflops is arithmetic on expert weights by the host's processor.
NUMBERS = {
    "memory.ram_gib": ("GiB", "all"),
    "memory.reserve_gib": ("GiB", "all"),
    "memory.device_gib": ("GiB", "device"),
    "memory.on_chip_mib": ("MiB", "none"),
    "storage.write_gb_s": ("GB/s", "all"),
    "storage.page_fault_us": ("us", "all"),
    "storage.page_kib": ("KiB", "all"),
    "storage.readahead_kib": ("KiB", "all"),
    "storage.map_us": ("us", "none"),
    "bandwidth.dram_gb_s": ("GB/s", "all"),
    "bandwidth.device_gb_s": ("GB/s", "all"),
    "bandwidth.h2d_gb_s": ("GB/s", "device"),
    "bandwidth.d2h_gb_s": ("GB/s", "device"),
    "bandwidth.link_latency_us": ("us", "device"),
    "bandwidth.on_chip_gb_s": ("GB/s", "none"),
    "compute.bf16_tflops": ("TFLOP/s", "all"),
    "compute.int4_tflops": ("TFLOP/s", "all"),
    "compute.tile_rows": ("rows", "none"),
    "compute.cpu_tflops": ("TFLOP/s", "none"),
    "compute.rans_gb_s": ("GB/s", "none"),
}
RATES = ("GB/s", "TFLOP/s")  # what seconds are divided by
STACK_NUMBERS = {"per_load_ms": "ms", "host_sync_us": "us", "layer_floor_us": "us"}
SECTIONS = ("memory", "storage", "bandwidth", "compute")
KEYS = {"id", "title", "match", "model", "engine", "stack", "unified", "read_curve", "stacks", *SECTIONS}


class HardwareError(UsageError):
    """A profile that is incomplete, contradicts itself or gives a number without unit and source."""


@dataclass(frozen=True)
class Quantity:
    """One number with its unit and where it comes from: ``kind`` is one of SOURCES, ``text`` says which and how.

    ``machine`` names another profile that it was taken on; such a number is *transferred*.
    """

    value: float
    unit: str
    kind: str
    text: str
    machine: str = ""


@dataclass(frozen=True)
class Stack:
    """What a software stack adds on this machine: per expert load, per layer at the least, and per read-back by the
    host.
    """

    name: str
    per_load_ms: float
    host_sync_us: float
    layer_floor_us: float
    quantities: dict[str, Quantity]

    @property
    def transferred(self) -> dict[str, str]:
        """Constants that were taken on another machine, with that machine's id."""
        return {name: q.machine for name, q in self.quantities.items() if q.machine}


@dataclass(frozen=True)
class HardwareProfile:
    """One machine. ``number(name)`` is a plain float; ``quantities`` holds each with unit and source."""

    id: str
    title: str
    unified: bool
    model: str
    engine: str
    stack: str
    match: dict[str, Any]
    quantities: dict[str, Quantity]
    read_curve: ReadCurve
    stacks: dict[str, Stack] = field(default_factory=dict)

    def number(self, name: str) -> float:
        """A declared number by dotted name, such as ``bandwidth.dram_gb_s``; one not declared is an error that says
        what to do.
        """
        if name not in NUMBERS:
            raise HardwareError(f"no number {name!r} is known of hardware; valid: {', '.join(NUMBERS)}")
        if name not in self.quantities:
            raise HardwareError(
                f"hardware {self.id} declares no {name}, which this run needs; add it to the profile, in "
                f"{NUMBERS[name][0]} and with its source, or choose a machine that does: {', '.join(_shipped(name))}"
            )
        return self.quantities[name].value

    def declares(self, name: str) -> bool:
        """Whether the profile gives an optional number, by dotted name."""
        return name in self.quantities

    @property
    def digest(self) -> str:
        """Twelve hex digits over what a modeled run computes with; titles and the wording of sources are left out."""
        curve, stacks = self.read_curve, sorted(self.stacks)
        numbers = {name: quantity.value for name, quantity in self.quantities.items()}
        numbers |= {f"{name}.{key}": getattr(self.stacks[name], key) for name in stacks for key in STACK_NUMBERS}
        content = [self.unified, self.engine, self.stack, numbers, curve.sizes_kib, curve.depths, curve.rows]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def __getattr__(self, name: str) -> float:
        """Plain floats under their short names: ``profile.ram_gib``, ``profile.dram_gb_s``."""
        for section in SECTIONS:
            if f"{section}.{name}" in NUMBERS:
                return self.number(f"{section}.{name}")
        raise AttributeError(name)

    def read_gb_s(self, nbytes: float, depth: float) -> float:
        """Random-read throughput in GB/s for requests of ``nbytes`` with ``depth`` in flight."""
        return self.read_curve.gb_s(nbytes, depth)

    def read_latency_s(self, nbytes: float, depth: float = 1) -> float:
        """Seconds from submission to completion of one read when ``depth`` are in flight (Little's law)."""
        return depth * nbytes / (self.read_gb_s(nbytes, depth) * 1e9)

    def constants(self, name: str = "") -> Stack:
        """The constants of a software stack; the profile's own when none is named."""
        name = name or self.stack
        if name not in self.stacks:
            raise HardwareError(f"hardware {self.id} has no stack {name!r}; valid: {', '.join(sorted(self.stacks))}")
        return self.stacks[name]

    def matches(self, machine: Machine) -> bool:
        """Whether ``machine`` is the one that this profile declares; a profile without a rule matches nothing."""
        rule = self.match
        low, high = rule.get("ram_gib", (0, math.inf))
        named = [
            re.search(rule[part], getattr(machine, part), re.IGNORECASE) for part in ("cpu", "gpu") if part in rule
        ]
        return bool(named) and all(named) and low <= machine.ram_gib <= high


def load(path: str | Path) -> HardwareProfile:
    """Read one profile; a missing, unknown, unsourced or misdimensioned number is an error that names it."""
    try:
        data = read_yaml(path)
    except ValueError as error:
        raise HardwareError(f"hardware file {error}") from None
    return from_dict(data, str(path))


def _shipped(name: str) -> list[str]:
    """Profiles that ship and declare an optional number."""
    section, key = name.split(".")
    files = [file for file in resources.files("moebench.hardware_profiles").iterdir() if file.name.endswith(".yaml")]
    return sorted(Path(file.name).stem for file in files if key in read_yaml(str(file))[section]) or ["none"]


def from_dict(data: Any, where: str) -> HardwareProfile:
    """Build a profile from parsed YAML."""
    if not isinstance(data, dict):
        raise HardwareError(f"{where}: expected a mapping with {', '.join(sorted(KEYS))}")
    if extra := set(data) - KEYS:
        raise HardwareError(
            f"{where}: unknown key {', '.join(sorted(map(str, extra)))}; valid: {', '.join(sorted(KEYS))}"
        )
    if missing := KEYS - set(data):
        raise HardwareError(f"{where}: missing {', '.join(sorted(missing))}")
    if not isinstance(data["unified"], bool):
        raise HardwareError(f"{where}: unified must be true or false")
    for key in (*SECTIONS, "stacks"):
        if not isinstance(data[key], dict):
            raise HardwareError(f"{where}: {key} must be a mapping of numbers, got {data[key]!r}")
    named = {key: data[key] for key in ("id", "title", "model", "engine", "stack")}
    for key, value in named.items():
        if not isinstance(value, str):
            raise HardwareError(f"{where}: {key} must be text, got {value!r}")
    quantities = {}
    for name, (unit, needed) in NUMBERS.items():
        section, key = name.split(".")
        if key in data[section]:
            quantities[name] = _quantity(data[section][key], unit, f"{where}: {name}")
        elif needed == "all" or (needed == "device" and not data["unified"]):
            raise HardwareError(f"{where}: {name} is missing")
    for section in SECTIONS:
        known = [name.split(".")[1] for name in NUMBERS if name.startswith(section + ".")]
        if extra := set(data[section]) - set(known):
            raise HardwareError(
                f"{where}: unknown {section} number {', '.join(sorted(map(str, extra)))}; valid: {', '.join(known)}"
            )
    stacks = {name: _stack(name, body, where) for name, body in data["stacks"].items()}
    if data["stack"] not in stacks:
        raise HardwareError(f"{where}: stack {data['stack']!r} is not one of {', '.join(sorted(stacks))}")
    curve = _curve(data["read_curve"], where)
    rule = _match(data["match"], where)
    return HardwareProfile(
        **named, unified=data["unified"], match=rule, quantities=quantities, read_curve=curve, stacks=stacks
    )


def _match(rule: Any, where: str) -> dict[str, Any]:
    """How a machine is recognised: patterns for its cpu and gpu, and bounds of its memory."""
    rule = {} if rule is None else rule
    if not isinstance(rule, dict) or not set(rule) <= {"cpu", "gpu", "ram_gib"}:
        raise HardwareError(f"{where}: match must be a mapping with cpu, gpu and ram_gib, or empty, got {rule!r}")
    for part in {"cpu", "gpu"} & set(rule):
        try:
            re.compile(rule[part])
        except (TypeError, re.error) as error:
            raise HardwareError(f"{where}: match.{part} {rule[part]!r} is not a pattern: {error}") from None
    if "ram_gib" in rule and len(_numbers(rule["ram_gib"], f"{where}: match.ram_gib")) != 2:
        raise HardwareError(f"{where}: match.ram_gib must be [low, high], got {rule['ram_gib']!r}")
    return rule


def _numbers(values: Any, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise HardwareError(f"{where} must be a list of numbers, got {values!r}")
    return tuple(map(float, values))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _quantity(entry: Any, unit: str, where: str) -> Quantity:
    if not isinstance(entry, dict) or not {"value", "unit", "source"} <= set(entry) <= {
        "value",
        "unit",
        "source",
        "machine",
    }:
        raise HardwareError(
            f"{where} must be {{value, unit, source}} (and machine, where it was taken on another), got {entry!r}"
        )
    if entry["unit"] != unit:
        raise HardwareError(f"{where} must be in {unit}, got {entry['unit']!r}")
    value = entry["value"]
    if not _is_number(value) or value < 0:
        raise HardwareError(f"{where}: value must be a number of at least 0, got {value!r}")
    if not value and unit in RATES:
        raise HardwareError(f"{where}: a rate in {unit} must be larger than 0")
    kind, text = _source(entry["source"], where)
    return Quantity(float(value), unit, kind, text, str(entry.get("machine", "")))


def _source(source: Any, where: str) -> tuple[str, str]:
    kind, _, text = str(source).partition(":")
    if kind not in SOURCES or not text.strip():
        raise HardwareError(
            f"{where}: source must read KIND: TEXT with KIND one of {', '.join(SOURCES)}, got {source!r}"
        )
    return kind, " ".join(text.split())


def _stack(name: str, body: Any, where: str) -> Stack:
    if not isinstance(body, dict) or set(body) != set(STACK_NUMBERS):
        raise HardwareError(f"{where}: stack {name} must give exactly {', '.join(STACK_NUMBERS)}")
    found = {key: _quantity(body[key], unit, f"{where}: stacks.{name}.{key}") for key, unit in STACK_NUMBERS.items()}
    return Stack(name, **{key: q.value for key, q in found.items()}, quantities=found)


def _curve(body: Any, where: str) -> ReadCurve:
    keys = {"unit", "source", "sizes_kib", "depths", "rows"}
    if not isinstance(body, dict) or set(body) != keys or body["unit"] != "GB/s":
        raise HardwareError(f"{where}: read_curve must give {', '.join(sorted(keys))}, in GB/s")
    kind, text = _source(body["source"], f"{where}: read_curve")
    sizes, depths = (_numbers(body[key], f"{where}: read_curve.{key}") for key in ("sizes_kib", "depths"))
    if not isinstance(body["rows"], list):
        raise HardwareError(f"{where}: read_curve.rows must be a list of rows, got {body['rows']!r}")
    rows = tuple(_numbers(row, f"{where}: read_curve.rows") for row in body["rows"])
    for name, axis in (("sizes_kib", sizes), ("depths", depths)):
        if not axis or axis[0] <= 0 or list(axis) != sorted(set(axis)):
            raise HardwareError(f"{where}: read_curve.{name} must be positive and ascending")
    if len(rows) != len(sizes) or any(len(row) != len(depths) or min(row) <= 0 for row in rows):
        raise HardwareError(f"{where}: read_curve.rows must be {len(sizes)} rows of {len(depths)} positive numbers")
    return ReadCurve(sizes, depths, rows, kind, text)
