"""The kinds of failure that the command line tells apart, and how a choice that does not exist is reported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoebenchError(Exception):
    """A run that failed for a reason moebench can name: one line, exit code 1."""


class UsageError(MoebenchError, ValueError):
    """Something the user asked for cannot be: one line that lists the valid choices, exit code 2."""


class PluginError(MoebenchError, ValueError):
    """A plugin broke the contract of a hook: one line that says what it did and what the hook takes."""


def unknown(what: str, given: object, valid: Iterable[str], more: str = "") -> UsageError:
    """The error for a name that is not registered: nearest name first, then all valid ones."""
    names = sorted(valid)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return UsageError(f"unknown {what} {str(given)!r}{hint}; valid: {', '.join(names) or 'none'}{more}")
