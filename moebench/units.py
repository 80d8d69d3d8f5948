"""Units and the flat expert key that every layer below the loop speaks."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9
PAGE = 4096


def align_up(nbytes: int, alignment: int = PAGE) -> int:
    """The smallest multiple of ``alignment`` that holds ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def human_bytes(nbytes: float) -> str:
    """A short binary size for people: ``1.69 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
