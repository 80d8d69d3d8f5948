"""The read engines that ship with moebench, registered through the hook that others use."""

from __future__ import annotations

from moebench.hookspecs import hookimpl
from moebench.store.engines import ENGINES, open_engine


@hookimpl
def register_io(register):
    """Register mmap, pread, direct and faulty; an engine's module is imported when it is opened."""
    for name in ENGINES:
        register(name, lambda pack, _name=name, **options: open_engine(_name, pack, **options))
