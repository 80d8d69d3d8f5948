"""Where a command writes: made and tried before anything runs, so that no result is lost for want of a place.

Knows no formats: only whether a folder or a file of that name can be written.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from moebench.errors import UsageError


def writable_folder(path: str | Path, what: str = "out") -> Path:
    """Make the folder and try to write in it; raises ``UsageError``, one line, where that cannot be."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(f"{what}={path} cannot be written to: {getattr(error, 'strerror', None) or error}") from None
    return folder


def writable_file(path: str | Path, what: str = "out") -> Path:
    """Check that a file of this name can be written, replacing one that stands there; creates nothing."""
    file = Path(path).expanduser()
    if not str(path) or file.is_dir():
        raise UsageError(f"{what}={path} is not the name of a file")
    if not file.parent.is_dir():
        raise UsageError(f"{what}={path}: there is no folder {file.parent}; make it first")
    writable_folder(file.parent, f"{what}={path}: folder")
    return file
