"""A declared machine: memory, storage, links and compute, every number with its unit and its source.

Loads ``hardware_profiles/*.yaml``, the user's own files and what ``moebench calibrate`` wrote. Knows no time and no
experts: the virtual timeline turns these numbers into seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from moebench.machine import Machine
from moebench.read_curve import Points, ReadCurve
from moebench.sourced import SOURCES, HardwareError, Quantity, curves, numbers, quantity, read_curve
from moebench.yamlfile import read_yaml

__all__ = ["NUMBERS", "SOURCES", "HardwareError", "HardwareProfile", "Quantity", "ReadCurve", "Stack", "load"]
# name -> (unit, which machines must give it): all, those with a device of its own memory, or none: a run that needs a
# number its machine does not give is refused. page_fault_us is one major fault of one page with its read; bandwidths
# are what is reached, not the bus's peak; limit_gb_s is a limit that stands before the drive, as a control group or a
# cloud volume has it, on the mean over a tenth of a second. map_us makes one expert's pages visible to the
# accelerator; on_chip_* is the memory inside it that its copies fill, tile_rows the rows it multiplies at a time at
# the least; rans_gb_s counts decoded bytes where the decoder runs; cpu_tflops is arithmetic on expert weights by the
# host's processor. stream_gb_s only reads; durable writes are 256 KiB each, on the drive before the next one. A share
# is what is left of a rate: of reads beside writes, expert kernels or whole layers of a small model, of these beside
# direct reads or copies, of compute after a time under load.
NUMBERS = {
    "memory.ram_gib": ("GiB", "all"),
    "memory.reserve_gib": ("GiB", "all"),
    "memory.device_gib": ("GiB", "device"),
    "memory.on_chip_mib": ("MiB", "none"),
    "storage.write_gb_s": ("GB/s", "all"),
    "storage.durable_write_gb_s": ("GB/s", "none"),
    "storage.write_beside_reads_gb_s": ("GB/s", "none"),
    "storage.read_beside_writes": ("share", "none"),
    "storage.read_beside_compute": ("share", "none"),
    "storage.read_beside_layers": ("share", "none"),
    "storage.page_fault_us": ("us", "all"),
    "storage.page_kib": ("KiB", "all"),
    "storage.readahead_kib": ("KiB", "all"),
    "storage.map_us": ("us", "none"),
    "storage.limit_gb_s": ("GB/s", "none"),
    "bandwidth.dram_gb_s": ("GB/s", "all"),
    "bandwidth.stream_gb_s": ("GB/s", "none"),
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
    "compute.beside_reads": ("share", "none"),
    "compute.beside_copies": ("share", "none"),
    "compute.sustained": ("share", "none"),
}
STACK_NUMBERS = {"per_load_ms": "ms", "host_sync_us": "us", "layer_floor_us": "us"}
SECTIONS = ("memory", "storage", "bandwidth", "compute")
KEYS = {"id", "title", "match", "model", "engine", "stack", "unified", "read_curve", "stacks", *SECTIONS}
MORE = {"curves", "hooks", "live_hooks", "unmeasured"}  # what a measured profile has besides


@dataclass(frozen=True)
class Stack:
    """What a software stack adds on this machine: per expert load, per layer at the least, per read-back by the host.

    What was measured of moebench's own besides, 0 where it was not. The loop takes ``step_us`` for a pass, ``layer_us``
    for a layer, ``request_us`` for an expert that is resident, ``hook_us`` for a hook that is called; waiting in a
    layer adds ``wait_us``: it goes on with cold caches, as it does where a model computes between its parts: there it
    takes ``live_layer_us`` more for a layer and ``live_load_us`` more for an expert that is loaded. The library takes
    ``pass_us`` for a pass beside its layers (masks, embedding, head), ``expert_us`` for each expert beside its kernels
    in a pass of one row, ``gather_us`` in one of several, ``adapter_us`` for each low-rank adapter, ``cold_us`` after
    the first wait in a layer, ``again_us`` after each further one, ``beside_us`` for each read that lands while it
    computes.
    """

    name: str
    per_load_ms: float
    host_sync_us: float
    layer_floor_us: float
    quantities: dict[str, Quantity]
    step_us: float = 0.0
    layer_us: float = 0.0
    request_us: float = 0.0
    hook_us: float = 0.0
    wait_us: float = 0.0
    live_layer_us: float = 0.0
    live_load_us: float = 0.0
    pass_us: float = 0.0
    expert_us: float = 0.0
    gather_us: float = 0.0
    adapter_us: float = 0.0
    cold_us: float = 0.0
    again_us: float = 0.0
    beside_us: float = 0.0

    @property
    def transferred(self) -> dict[str, str]:
        """Constants that were taken on another machine, with that machine's id."""
        return {name: q.machine for name, q in self.quantities.items() if q.machine}


LOOP_NUMBERS = {one.name: "us" for one in fields(Stack) if one.default is not MISSING}


@dataclass(frozen=True)
class HardwareProfile:
    """One machine. ``number(name)`` is a plain float; ``quantities`` holds each with unit and source, ``curves`` what
    was measured over two axes (names: ``moebench.curves``), ``hooks`` what one hook of a system takes, by the system's
    id, ``live_hooks`` what it takes where a model computes and that differs, ``unmeasured`` what could not be, with the
    reason.
    """

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
    curves: dict[str, Points] = field(default_factory=dict)
    hooks: dict[str, Quantity] = field(default_factory=dict)
    live_hooks: dict[str, Quantity] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)

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
        values = {name: quantity.value for name, quantity in self.quantities.items()}
        values |= {f"{name}.{key}": q.value for name in stacks for key, q in self.stacks[name].quantities.items()}
        content = [self.unified, self.engine, self.stack, values, curve.xs, curve.ys, curve.rows]
        content += [[name, c.xs, c.ys, c.rows] for name, c in sorted(self.curves.items())]
        content += [[name, self.hooks[name].value] for name in sorted(self.hooks)]
        content += [["live", name, self.live_hooks[name].value] for name in sorted(self.live_hooks)]
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
    if extra := set(data) - KEYS - MORE:
        raise HardwareError(
            f"{where}: unknown key {', '.join(sorted(map(str, extra)))}; valid: {', '.join(sorted(KEYS | MORE))}"
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
            quantities[name] = quantity(data[section][key], unit, f"{where}: {name}")
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
    return HardwareProfile(
        **named, unified=data["unified"], match=_match(data["match"], where), quantities=quantities,
        read_curve=read_curve(data["read_curve"], where), stacks=stacks, curves=curves(data.get("curves", {}), where),
        hooks=_hooks(data, "hooks", where), live_hooks=_hooks(data, "live_hooks", where),
        unmeasured=_unmeasured(data.get("unmeasured", {}), where),
    )  # fmt: skip


def _hooks(data: Mapping[str, Any], key: str, where: str) -> dict[str, Quantity]:
    """What one hook of each system takes."""
    given = data.get(key, {})
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise HardwareError(f"{where}: {key} must be a mapping of systems to numbers, got {given!r}")
    return {name: quantity(entry, "us", f"{where}: {key}.{name}") for name, entry in given.items()}


def _unmeasured(given: Any, where: str) -> dict[str, str]:
    """What a calibration could not measure, with the reason."""
    if not isinstance(given, dict) or not all(isinstance(text, str) and text for text in (*given, *given.values())):
        raise HardwareError(f"{where}: unmeasured must be a mapping of names to reasons, got {given!r}")
    return given


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
    if "ram_gib" in rule and len(numbers(rule["ram_gib"], f"{where}: match.ram_gib")) != 2:
        raise HardwareError(f"{where}: match.ram_gib must be [low, high], got {rule['ram_gib']!r}")
    return rule


def _stack(name: str, body: Any, where: str) -> Stack:
    if not isinstance(body, dict) or not set(STACK_NUMBERS) <= set(body) <= set(STACK_NUMBERS) | set(LOOP_NUMBERS):
        raise HardwareError(
            f"{where}: stack {name} must give exactly {', '.join(STACK_NUMBERS)} (and {', '.join(LOOP_NUMBERS)}, "
            f"where they were measured)"
        )
    units = {**STACK_NUMBERS, **LOOP_NUMBERS}
    found = {key: quantity(body[key], units[key], f"{where}: stacks.{name}.{key}") for key in units if key in body}
    return Stack(name, **{key: q.value for key, q in found.items()}, quantities=found)
