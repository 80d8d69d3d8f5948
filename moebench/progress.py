"""The progress bar of long commands: on stderr, only where a person can see it."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import Progress


def progress_bar() -> Progress:
    """A bar that vanishes when done, and prints nothing at all into a file or a pipe."""
    return Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
