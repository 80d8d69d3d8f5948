"""Fresh Python processes that run cells, so that no earlier cell's memory or threads are in their numbers.

A process plans its cell again from the configuration: systems are code, which does not travel. Knows no cell's content.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
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

# OpenMP's threads spin while they wait for work, and a read that wants their core then waits for them. The library
# looks at this when it is loaded, so it must stand before torch is imported. What the user has set stays.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}


class Worker:
    """A process of its own that does one task after another: ``send``, then ``receive``. Always ``kill`` it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**WAITING, **os.environ}
        )
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._write(sys.path)

    def fileno(self) -> int:
        """Readable when there is something to ``receive``."""
        return self._from.fileno()

    def send(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Hand over ``work(*arguments)``, a function of a module."""
        self._write((work, arguments))

    def receive(self) -> Any:
        """What the work returned, or the ``MoebenchError`` that it raised; raises one where the process has died."""
        try:
            return pickle.load(self._from)
        except (EOFError, pickle.UnpicklingError):
            code = self._process.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            raise MoebenchError(f"the process of this run ended before its result was there ({how})") from None

    def kill(self) -> None:
        """End it, whatever it is doing."""
        self._process.kill()
        for pipe in (self._to, self._from):
            with suppress(OSError):  # what it never read is lost with it
                pipe.close()
        self._process.wait()

    def _write(self, content: Any) -> None:
        with suppress(BrokenPipeError):  # ``receive`` tells of a process that died
            self._to.write(pickle.dumps(content))
            self._to.flush()


def isolated(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``work(*arguments)``, a function of a module, in a process of its own.

    A ``MoebenchError`` of the work is raised here; a process that died is one too.
    """
    ((_, result),) = each(work, [arguments], 1)
    if isinstance(result, MoebenchError):
        raise result
    return result


def each(work: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], count: int) -> Iterator[tuple[int, Any]]:
    """Do ``work(*task)`` for all tasks in ``count`` processes; yields the number of a task and what became of it.

    They come in the order in which they end. A ``MoebenchError`` is yielded, and so is that of a process that died, in
    whose place the next task finds a new one. However this ends, no process is left.
    """
    todo = list(enumerate(tasks))
    busy: dict[Worker, int] = {}
    idle: list[Worker] = []
    try:
        while todo or busy:
            while todo and len(busy) < count:
                number, task = todo.pop(0)
                worker = idle.pop() if idle else Worker()
                busy[worker] = number
                worker.send(work, *task)
            ready = wait([worker.fileno() for worker in busy])
            for worker in [worker for worker in busy if worker.fileno() in ready]:
                number = busy[worker]
                try:
                    result = worker.receive()
                    idle.append(worker)
                except MoebenchError as error:
                    worker.kill()
                    result = error
                del busy[worker]
                yield number, result
    finally:
        for worker in (*busy, *idle):
            worker.kill()


class Nursery:
    """A process that has loaded what runs need, and gives each of them a child of its own to run in: as fresh as a new
    process, without the seconds that libraries take. ``prepare`` loads, and must start no threads.
    """

    def __init__(self, prepare: Callable[..., Any], *arguments: Any) -> None:
        self._worker = Worker()
        try:
            self._worker.send(prepare, *arguments)
            if isinstance(result := self._worker.receive(), MoebenchError):
                raise result
        except BaseException:
            self._worker.kill()
            raise

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.kill()

    def __call__(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``work(*arguments)``, or the ``MoebenchError`` that came of it."""
        self._worker.send(forked, work, arguments)
        return self._worker.receive()


def forked(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """``work(*arguments)`` in a child of this process, which ends with it."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            _end_with_parent()
            try:
                result = work(*arguments)
            except MoebenchError as error:
                result = error
            with os.fdopen(write_end, "wb") as file:
                pickle.dump(result, file)
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        content = file.read()
    _, status = os.waitpid(child, 0)
    if not content:
        code = os.waitstatus_to_exitcode(status)
        return MoebenchError(f"the process of this run ended before its result was there (status {code})")
    return pickle.loads(content)


def _end_with_parent() -> None:
    """Linux kills this process when its parent ends; elsewhere a run goes on to its end."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def answer() -> None:
    """The other side: read tasks from stdin, and write what became of each to stdout, until there are no more."""
    _end_with_parent()
    result_file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a system prints must not stand between the results' bytes
    with suppress(EOFError, BrokenPipeError):  # the parent is done, or gone
        while True:
            work, arguments = pickle.load(sys.stdin.buffer)
            try:
                result = work(*arguments)
            except MoebenchError as error:
                result = error
            pickle.dump(result, result_file)
            result_file.flush()
