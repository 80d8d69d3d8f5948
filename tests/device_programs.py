"""Programs over a few slots, and what each compute and each use of them must see."""

from __future__ import annotations

SLOTS = 3


def in_order(program):
    """The values seen when all is done as it is said: ("read", host slot, value), ("up", host slot, device slot),
    ("down", device slot, host slot), ("compute", device slot, _), ("use", host slot, _).
    """
    host, card, seen = [0] * SLOTS, [255] * SLOTS, []
    for what, a, b in program:
        if what == "read":
            host[a] = b
        elif what == "up":
            card[b] = host[a]
        elif what == "down":
            host[b] = card[a]
        else:
            seen.append(card[a] if what == "compute" else host[a])
    return seen
