"""Runs one cell in a fresh Python process, so that no earlier cell's memory or threads are in its numbers.

The process plans the cell again from its configuration: systems are code, which does not travel. Knows no cell's
content.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from moebench.errors import MoebenchError

# Ctrl-C is the parent's to answer, who ends this process; and the search path comes first, since what follows may be a
# plugin's own class
CHILD = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from moebench.harness.isolate import answer
answer()
"""


def isolated(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``work(*arguments)``, a function of a module, in a process of its own.

    A ``MoebenchError`` of the work is raised here; a process that died is one too.
    """
    task = pickle.dumps(sys.path) + pickle.dumps((work, arguments))
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            output, _ = child.communicate(task)
        except BaseException:  # Ctrl-C reaches us alone: see CHILD
            child.kill()
            child.wait()
            raise
    if child.returncode:
        how = f"killed by signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        raise MoebenchError(f"the process of a measured run ended before its result was there ({how})")
    result = pickle.loads(output)
    if isinstance(result, MoebenchError):
        raise result
    return result


def answer() -> None:
    """The other side: read one task from stdin and write what became of it to stdout."""
    result_file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a system prints must not stand between the result's bytes
    work, arguments = pickle.load(sys.stdin.buffer)
    try:
        result = work(*arguments)
    except MoebenchError as error:
        result = error
    with result_file:
        pickle.dump(result, result_file)
