"""A process that has imported what commands import and forks a child for every piece of work, to be killed in it.

Reads one JSON order a line from stdin and writes one JSON outcome to the file it was given; ``fault_fixtures`` talks to
it. In a child every operation on a file below ``root`` that changes the disk is counted, and before the ``die_at``-th
(inside it, where it is a write) the child kills itself.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from contextlib import suppress

EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.chmod")


def main(answers: str, modules: list[str]) -> None:
    """Serve until stdin ends."""
    for module in modules:
        importlib.import_module(module)
    sys.path[:0] = [os.path.dirname(__file__)]
    with open(answers, "w", buffering=1) as out:
        for line in sys.stdin:
            out.write(json.dumps(serve(json.loads(line))) + "\n")


def serve(order: dict) -> dict:
    """Fork, let work, kill where the order says so; returns what became of it. ``warm`` work is done without a fork, so
    that later children find everything imported.
    """
    if order.get("warm"):
        os.chdir(order["cwd"])
        return {"code": called(order), "killed": False, "operations": 0, "s": 0.0}
    shared = mmap.mmap(-1, 9)  # changes that were counted, and whether the work has begun
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    started = time.monotonic()
    if not (pid := os.fork()):
        os._exit(work(order, shared))
    with suppress(OSError):  # it has done so itself
        os.setpgid(pid, pid)
    while order.get("signal", signal.SIGKILL) != signal.SIGKILL and not shared[8]:
        time.sleep(0.001)  # who is asked to stop must have begun
    ends = time.monotonic() + (order.get("seconds") if order.get("seconds") is not None else order["limit"])
    while (done := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
        time.sleep(0.001)
    killed = False
    if done[0] == 0:
        killed = True
        number = order.get("signal", signal.SIGKILL) if order.get("seconds") is not None else signal.SIGKILL
        (os.kill if number == signal.SIGTERM else os.killpg)(pid, number)
        last = time.monotonic() + order["limit"]
        while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
            time.sleep(0.001)
            if time.monotonic() > last:
                os.killpg(pid, signal.SIGKILL)
                done = os.waitpid(pid, 0)
                break
    code = os.waitstatus_to_exitcode(done[1])
    return {
        "code": code,
        "killed": killed,
        "operations": struct.unpack_from("q", shared)[0],
        "s": time.monotonic() - started,
    }


def work(order: dict, shared: mmap.mmap) -> int:
    """In the child: the work and its exit code."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    os.environ.update(order.get("environ", {}))
    for name in ("stdout", "stderr"):
        fd = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1 if name == "stdout" else 2)
        os.close(fd)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for the life of the process
    for name, limit in order.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    count_operations(shared, order["root"], order.get("die_at"))
    shared[8] = 1
    try:
        return called(order)
    except BaseException:  # a child that leaves the loop would serve orders
        traceback.print_exc()
        sys.stderr.flush()
        return 99


def called(order: dict) -> int:
    """Do the work; returns the exit code of a command."""
    module, _, function = order["work"].partition(":")
    code = getattr(importlib.import_module(module), function)(*order["arguments"])
    sys.stdout.flush()
    return int(code or 0)


def count_operations(shared: mmap.mmap, root: str, die_at: int | None) -> None:
    """Count what changes files below ``root``; die before, or amid, the ``die_at``-th change."""
    own = os.getpid()

    def happens(half=lambda: None) -> None:
        (count,) = struct.unpack_from("q", shared)
        shared[:8] = struct.pack("q", count + 1)
        if count + 1 == die_at:
            half()
            os.kill(own, signal.SIGKILL)

    def audit(event: str, arguments: tuple) -> None:
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (opens or event in EVENTS) and os.getpid() == own:
            path = arguments[0]
            if isinstance(path, int) or os.path.abspath(os.fsdecode(path)).startswith(root):
                happens()

    sys.addaudithook(audit)
    write, syncs = os.pwrite, {name: getattr(os, name) for name in ("fsync", "fdatasync", "ftruncate")}

    def pwrite(fd, data, offset):
        happens(lambda: write(fd, data[: len(data) // 2], offset))
        return write(fd, data, offset)

    os.pwrite = pwrite
    for name, real in syncs.items():
        setattr(os, name, lambda *arguments, real=real: (happens(), real(*arguments))[1])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
