"""What hooks return, checked before the loop acts on it: one line that names the hook and says what it may return.

Knows shapes and ranges; knows no slots and no system.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moebench.errors import PluginError
from moebench.step import ABSENT, Routing


def keys_of(hook: str, answer: Any, count: int) -> list[int]:
    """Expert keys below ``count``, in the order given."""
    if type(answer) is list and all(type(key) is int for key in answer):
        keys = answer
    else:
        found = _array(answer)
        if (found.ndim != 1 or found.dtype.kind not in "iu") and found.shape != (0,):
            raise PluginError(
                f"{hook} returned {_short(answer)}: a list or array of expert keys (whole numbers), or None"
            )
        keys = found.tolist()
    if not keys:
        return []
    if min(keys) < 0 or max(keys) >= count:
        odd = next(key for key in keys if not 0 <= key < count)
        raise PluginError(f"{hook} returned expert {odd}; keys are layer * experts + expert, here 0 to {count - 1}")
    return keys


def mask_of(hook: str, answer: Any, count: int) -> list[bool]:
    """A bool for each of ``count`` keys."""
    if type(answer) is list and len(answer) == count and all(type(stays) is bool for stays in answer):
        return answer
    found = _array(answer)
    if found.shape != (count,) or found.dtype.kind != "b":
        raise PluginError(f"{hook} returned {_short(answer)}: a bool for each of the {count} keys it is given, or None")
    mask: list[bool] = found.tolist()
    return mask


def routing_of(answer: Any, rows: int, experts: int) -> Routing:
    """A routing of ``rows`` rows among ``experts`` experts of a layer."""
    if not isinstance(answer, Routing):
        raise PluginError(f"route returned {_short(answer)}: a Routing, or None to keep the router's own")
    ids = answer.experts
    if not isinstance(ids, np.ndarray) or ids.ndim != 2 or len(ids) != rows or ids.dtype.kind not in "iu":
        raise PluginError(f"route returned experts {_short(ids)}: a whole number [{rows}, k] for each row of the pass")
    if ids.min(initial=0) < ABSENT or ids.max(initial=0) >= experts:
        raise PluginError(f"route returned experts {ids.min()} to {ids.max()}; here 0 to {experts - 1}, -1 for none")
    return answer


def _array(answer: Any) -> np.ndarray:
    try:
        return np.asarray(answer)
    except ValueError:  # rows of unequal length
        return np.array(None)


def _short(answer: Any) -> str:
    """An answer for people: arrays by shape and type, the rest cut."""
    if isinstance(answer, np.ndarray):
        return f"an array of {answer.dtype} {list(answer.shape)}"
    text = " ".join(repr(answer).split())
    return text if len(text) <= 60 else text[:57] + "..."
