"""The read engines that ship with moebench, registered through the hook that others use."""

from __future__ import annotations

from functools import partial

from moebench.hookspecs import hookimpl
from moebench.store.engines import ENGINES, open_engine


@hookimpl
def register_io(register):
    """Register every engine of ``ENGINES``; an engine's module is imported when it is opened."""
    for name, (_, _, line) in ENGINES.items():
        factory = partial(open_engine, name)
        factory.__doc__ = line
        register(name, factory)
