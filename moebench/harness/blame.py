"""Where a run went wrong, in one line: which hook of which plugin, at which pass and layer.

Reads the traceback of an error that was raised, so that a run in which nothing fails pays nothing for it.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from moebench.engine.movement import Movement
from moebench.errors import MoebenchError, PluginError
from moebench.step import PHASES
from moebench.store.engines import StoreError


def reason(error: BaseException) -> str:
    """What went wrong, for people: as the error says it, and where a plugin's hook is to blame, its place."""
    text = " ".join(str(error).split())
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    hook = next(((name, frame) for frame in frames if (name := _hook(frame))), None)
    if hook is not None and (isinstance(error, PluginError) or not isinstance(error, MoebenchError)):
        name, frame = hook
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        at = f" at {place}" if (place := _place(frames)) else ""
        return f"hook {name} of {_owner(frame)} failed{at}: {what} ({_line(error, frame.f_code.co_filename)})"
    if isinstance(error, PluginError):
        return f"{place}: {text}" if (place := _place(frames)) else text
    if not isinstance(error, MoebenchError | StoreError | OSError):  # its text alone may say nothing
        return f"{type(error).__name__}: {text} ({_line(error)})"
    return text


def _line(error: BaseException, file: str = "") -> str:
    """The last line that ran, of one file or of any."""
    lines = [at for at in traceback.extract_tb(error.__traceback__) if file in ("", at.filename)]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else "no traceback"


def _hook(frame: FrameType) -> str:
    """The hook that a frame runs, empty for none."""
    function = getattr(type(frame.f_locals.get("self")), frame.f_code.co_name, None)
    options: Any = getattr(function, "moebench_impl", None)
    return "" if options is None else options["specname"] or frame.f_code.co_name


def _owner(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}.{type(frame.f_locals['self']).__name__}"


def _place(frames: list[FrameType]) -> str:
    """Pass and layer that the loop was at."""
    step, layer = None, None
    for frame in frames:
        if isinstance(loop := frame.f_locals.get("self"), Movement):
            step, layer = loop.step, frame.f_locals.get("layer", layer)
    if step is None:
        return ""
    return f"pass {step.index} ({PHASES[step.phase]})" + (f", layer {layer}" if layer is not None else "")
