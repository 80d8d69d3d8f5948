"""Numbers and curves of a hardware profile as its file gives them: each with unit and source; what was measured, with
spread and date.

Knows what an entry must look like; knows no machine and no names of numbers.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from typing import Any

from moebench.curves import CURVES, RATE, TimeCurve
from moebench.errors import UsageError
from moebench.read_curve import Points, ReadCurve, Table
from moebench.spread import Spread

SOURCES = ("datasheet", "paper", "measured", "estimate")
RATES = ("GB/s", "TFLOP/s", "share")  # what seconds are divided by
NEEDED, ALLOWED = {"value", "unit", "source"}, {"machine", "spread", "date"}


class HardwareError(UsageError):
    """A profile that is incomplete, contradicts itself or gives a number without unit and source."""


@dataclass(frozen=True)
class Quantity:
    """One number with its unit and where it comes from: ``kind`` is one of SOURCES, ``text`` says which and how.

    ``machine`` names another profile that it was taken on; such a number is *transferred*. ``date`` is the day of the
    measurement, YYYY-MM-DD, where one was made here.
    """

    value: float
    unit: str
    kind: str
    text: str
    machine: str = ""
    spread: Spread[float] | None = None
    date: str = ""

    def describe(self) -> str:
        """Value, source, and how it scattered, for people."""
        between = f", {self.spread.low:g} to {self.spread.high:g}, n {self.spread.n}" if self.spread else ""
        moved = f" (transferred from {self.machine})" if self.machine else ""
        day = f", {self.date}" if self.date else ""
        return f"{self.value:g} {self.unit}{moved}  {self.kind}: {self.text}{between}{day}"


def is_number(value: Any) -> bool:
    """Whether a file's value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def numbers(values: Any, where: str) -> tuple[float, ...]:
    """A list of finite numbers, as a file gives it."""
    if not isinstance(values, list) or not all(map(is_number, values)):
        raise HardwareError(f"{where} must be a list of numbers, got {values!r}")
    return tuple(map(float, values))


def quantity(entry: Any, unit: str, where: str) -> Quantity:
    """One number of a profile, which must be in ``unit``."""
    if not isinstance(entry, dict) or not NEEDED <= set(entry) <= NEEDED | ALLOWED:
        raise HardwareError(
            f"{where} must be {{value, unit, source}} (and machine, where it was taken on another; spread and date, "
            f"where it was measured), got {entry!r}"
        )
    if entry["unit"] != unit:
        raise HardwareError(f"{where} must be in {unit}, got {entry['unit']!r}")
    value = entry["value"]
    if not is_number(value) or value < 0:
        raise HardwareError(f"{where}: value must be a number of at least 0, got {value!r}")
    if not value and unit in RATES:
        raise HardwareError(f"{where}: a rate in {unit} must be larger than 0")
    kind, text = source(entry["source"], where)
    spread = None
    if "spread" in entry:
        given = entry["spread"]
        if not isinstance(given, dict) or set(given) != {"low", "high", "n"} or not all(map(is_number, given.values())):
            raise HardwareError(f"{where}: spread must be {{low, high, n}}, got {given!r}")
        spread = Spread(float(given["low"]), float(given["high"]), _count(given["n"], where))
        if not spread.low <= value <= spread.high:
            raise HardwareError(f"{where}: value {value} lies outside its spread, {spread.low} to {spread.high}")
    return Quantity(float(value), unit, kind, text, str(entry.get("machine", "")), spread, _date(entry, where))


def source(given: Any, where: str) -> tuple[str, str]:
    """Kind and text of a source."""
    kind, _, text = str(given).partition(":")
    if kind not in SOURCES or not text.strip():
        raise HardwareError(
            f"{where}: source must read KIND: TEXT with KIND one of {', '.join(SOURCES)}, got {given!r}"
        )
    return kind, " ".join(text.split())


def read_curve(body: Any, where: str) -> ReadCurve:
    """The read curve that every profile has."""
    found = _curve(body, (RATE, "sizes_kib", "depths"), where)
    assert isinstance(found, ReadCurve)
    return found


def curves(given: Any, where: str) -> dict[str, Points]:
    """The curves that a profile may have, by name."""
    if not isinstance(given, dict):
        raise HardwareError(f"{where}: curves must be a mapping of curves, got {given!r}")
    if extra := set(given) - set(CURVES):
        raise HardwareError(f"{where}: unknown curve {', '.join(sorted(map(str, extra)))}; valid: {', '.join(CURVES)}")
    return {name: _curve(body, CURVES[name][:3], f"{where}: curves.{name}") for name, body in given.items()}


def _curve(body: Any, form: tuple[str, str, str], where: str) -> Points:
    unit, *axes = form
    where = where if "curves." in where else f"{where}: read_curve"
    keys, scatter = {"unit", "source", *axes, "rows"}, {"low", "high", "n"}
    if not isinstance(body, dict) or not keys <= set(body) <= keys | scatter | {"date"} or body["unit"] != unit:
        raise HardwareError(f"{where} must give {', '.join(sorted(keys))}, in {unit} (and low, high, n, date)")
    kind, text = source(body["source"], where)
    xs, ys = (numbers(body[axis], f"{where}.{axis}") for axis in axes)
    for name, axis in zip(axes, (xs, ys), strict=True):
        if not axis or axis[0] <= 0 or list(axis) != sorted(set(axis)):
            raise HardwareError(f"{where}.{name} must be positive and ascending")
    rows = _table(body["rows"], len(xs), len(ys), f"{where}.rows")
    spread: Table | None = None
    if scatter & set(body):
        if not scatter <= set(body):
            raise HardwareError(f"{where} gives a spread in part: low, high and n belong together")
        low, high = (_table(body[key], len(xs), len(ys), f"{where}.{key}") for key in ("low", "high"))
        spread = Spread(low, high, _count(body["n"], where))
    make = ReadCurve if unit == RATE else TimeCurve
    return make(xs, ys, rows, kind, text, spread, _date(body, where))


def _table(given: Any, height: int, width: int, where: str) -> tuple[tuple[float, ...], ...]:
    if not isinstance(given, list):
        raise HardwareError(f"{where} must be a list of rows, got {given!r}")
    rows = tuple(numbers(row, where) for row in given)
    if len(rows) != height or any(len(row) != width or min(row) <= 0 for row in rows):
        raise HardwareError(f"{where} must be {height} rows of {width} positive numbers")
    return rows


def _count(given: Any, where: str) -> int:
    if type(given) is not int or given < 1:
        raise HardwareError(f"{where}: n must be a whole number of at least 1, got {given!r}")
    return given


def _date(entry: dict[str, Any], where: str) -> str:
    if "date" not in entry:
        return ""
    try:
        return datetime.date.fromisoformat(str(entry["date"])).isoformat()
    except ValueError:
        raise HardwareError(f"{where}: date must be YYYY-MM-DD, got {entry['date']!r}") from None
