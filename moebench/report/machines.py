"""Hardware profiles as tables: every number with its unit, its source and, where it is another's, that machine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moebench.hardware import HardwareProfile, Quantity
from moebench.report.grid import Cell, Column, Grid
from moebench.report.table import number

HEAD = (Column("number"), Column("value", "number"), Column("unit"), Column("kind"), Column("source"))


def profile_tables(profiles: Mapping[str, HardwareProfile]) -> list[Grid]:
    """For each machine its declared numbers, and the curve of its random reads."""
    found = []
    for name, profile in profiles.items():
        slug = "hardware." + re.sub(r"[^a-z0-9]+", "-", name.lower())
        declared = [_line(key, quantity) for key, quantity in profile.quantities.items()]
        for stack in profile.stacks.values():
            own = " (its own)" if stack.name == profile.stack else ""
            declared += [_line(f"stack {stack.name}{own}: {key}", q) for key, q in stack.quantities.items()]
        curve = profile.read_curve
        caption = (
            f"Default engine {profile.engine}, {'one memory' if profile.unified else 'a device with its own memory'}."
        )
        found.append(Grid(slug, f"{name}: {profile.title}", HEAD, tuple(declared), caption))
        depths = tuple(Column(f"depth {depth:g}", "number") for depth in curve.ys)
        rows = tuple(
            (Cell(f"{size:g} KiB"), *(Cell(number(value), value) for value in row))
            for size, row in zip(curve.xs, curve.rows, strict=True)
        )
        source = f"Source: {curve.kind}: {curve.text}"
        found.append(Grid(f"{slug}-reads", f"{name}: random reads, GB/s", (Column("size"), *depths), rows, source))
    return found


def _line(name: str, quantity: Quantity) -> tuple[Cell, ...]:
    source = quantity.text + (f" (transferred: taken on {quantity.machine})" if quantity.machine else "")
    return (
        Cell(name),
        Cell(number(quantity.value), quantity.value),
        Cell(quantity.unit),
        Cell(quantity.kind),
        Cell(source),
    )
