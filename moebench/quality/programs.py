"""Programs that a model wrote, run in a process of their own with limits on time, memory and files, and no network.

The limits keep accidents in; they are no wall against code that means harm. Knows HumanEval's way of scoring.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 3  # of a program, as HumanEval's own scorer gives it
MEMORY = 2**30  # bytes of address space
FILE = 2**20  # bytes of a file

# Reads a word and a program from stdin, limits itself, runs the program and says the word if it came to its end.
RUNNER = f"""
import os, resource, sys
word, program = sys.stdin.readline(), sys.stdin.read()
for limit, value in (("CPU", {SECONDS}), ("AS", {MEMORY}), ("FSIZE", {FILE}), ("CORE", 0), ("NPROC", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
    except (ValueError, OSError):
        pass  # macOS has no limit on the address space
BARRED = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.kill", "os.remove", "os.rename")
def watch(event, arguments):
    writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in BARRED or event.split(".")[0] in ("socket", "subprocess", "ctypes", "shutil"):
        raise PermissionError(event)
say = sys.stdout.write
sys.addaudithook(watch)
exec(compile(program, "program", "exec"), {{"__name__": "__main__"}})
say(word)
"""


def passes(program: str) -> bool:
    """Whether a program runs to its end without an error, within the limits."""
    word = secrets.token_hex()
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-B", "-c", RUNNER], input=f"{word}\n{program}", text=True, capture_output=True,
                cwd=folder, env={}, timeout=2 * SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout.endswith(f"{word}\n")


def score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """HumanEval's pass@1 of one item: prompt and continuation, then the item's tests."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass_at_1": float(passes(program))}
