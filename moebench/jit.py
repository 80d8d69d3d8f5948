"""Compiles plain functions at their first use, so that nobody waits for numba who does not need it; knows no more.

numba keeps machine code on disk and watches the file of the function that is compiled, not those of what it calls:
functions that call each other stand in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def compile_all(functions: Sequence[Callable], inner: Sequence[Callable] = ()) -> dict[str, Callable[..., Any]]:
    """Each function by its name, in machine code and free of the interpreter's lock; ``inner`` are what they call."""
    from numba import njit
    from numba.extending import register_jitable

    for function in inner:
        register_jitable(function)
    try:
        return {function.__name__: njit(nogil=True, cache=True)(function) for function in functions}
    except RuntimeError:  # neither their folder nor the user's own may be written: compiled anew by each process
        return {function.__name__: njit(nogil=True)(function) for function in functions}
