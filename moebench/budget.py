"""Sizes as people write them: bytes with a unit, or a fraction of the routed experts. One parser for the whole tool."""

from __future__ import annotations

import re

from moebench.errors import UsageError
from moebench.units import GB, GIB, KIB, MIB

UNITS = {"b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": GB}


def parse_bytes(text: str, what: str = "size") -> int:
    """Bytes of ``3GiB``, ``512 MiB`` or ``4096B``; a number without a unit is an error."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", str(text))
    if not match or match[2].lower() not in UNITS:
        raise UsageError(
            f"{what} {text!r} is not a size; write a number and a unit of B, KiB, MiB, GiB, MB, GB, such as 3GiB"
        )
    nbytes = float(match[1]) * UNITS[match[2].lower()]
    if not 1 <= nbytes < 1 << 63:
        shown = text if len(text) < 40 else f"{text[:20]}..."
        raise UsageError(f"{what} {shown!r} must be at least one byte and less than 8 EiB")
    return int(nbytes)


def parse_budget(text: str, whole_bytes: int, what: str = "budget", of: str = "the routed experts' bytes") -> int:
    """Bytes of a part: ``0.15`` is that fraction of ``whole_bytes`` (said to be ``of``), ``3GiB`` is itself."""
    try:
        fraction = float(text)
    except ValueError:
        return parse_bytes(text, what)
    if not 0.0 < fraction <= 1.0:
        raise UsageError(f"{what} {text!r} is a fraction of {of}: above 0, at most 1, or a size such as 3GiB")
    return int(fraction * whole_bytes)
