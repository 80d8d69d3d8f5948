"""Commands that are killed, starved or stopped, shared by the tests of faults.

``MOEBENCH_FAULTS=N`` (``make faults``) injects N times as many; every test says what it did to ``tally``, and what is
said is printed, and kept in ``build/faults.txt``, by the long form.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

TIMES = int(os.environ.get("MOEBENCH_FAULTS", "1"))
SERVER = Path(__file__).with_name("fault_server.py")


@dataclass(frozen=True)
class Outcome:
    """What became of a child: exit code (negative: the signal that ended it), its words, and changes it made."""

    code: int
    out: str
    err: str
    killed: bool
    operations: int
    s: float

    @property
    def error(self) -> str:
        """Its one line of error, or that of its failed row; there is no traceback."""
        lines = [line for line in self.err.splitlines() if line.startswith("moebench: error: ")]
        assert "Traceback" not in self.err + self.out, self.err
        if not lines and '"status":"failed"' in self.out:
            lines = [line for line in self.out.splitlines() if line.startswith("failed ")]
        assert len(lines) == 1, (self.code, self.err)
        return lines[0]


class Server:
    """Runs work in children of a process that has imported what they need."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder, self._numbers = folder, itertools.count()
        os.mkfifo(answers := folder / "answers")
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MOEBENCH_PLUGINS": "", "MOEBENCH_HOME": str(folder / "home")}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(answers), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environ,
            text=True,
        )
        self._answers = open(answers)  # noqa: SIM115 - until close

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._answers.close()

    def do(self, work: str, *arguments, root: Path | None = None, limit: float = 120, **order) -> Outcome:
        """``work`` is ``module:function``; ``seconds`` says when a ``signal`` comes, ``die_at`` at which change of a
        file under ``root`` the child kills itself. A child that takes longer than ``limit`` hangs, and fails.
        """
        number = next(self._numbers)
        files = {name: str(self.folder / f"{number}.{name}") for name in ("stdout", "stderr")}
        for file in files.values():
            Path(file).touch()  # a child may be killed before it opens them
        order |= {"work": work, "arguments": arguments, "limit": limit, "root": str(root or self.folder), **files}
        self._process.stdin.write(json.dumps({"cwd": str(self.folder), **order}) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._answers.readline())
        if order.get("warm"):
            return Outcome(out="", err="", **found)
        out, err = (Path(file).read_text() for file in files.values())
        for file in files.values():
            os.unlink(file)
        assert not (found["killed"] and order.get("seconds") is None), f"no end after {limit} s: {work} {arguments}"
        assert found["s"] < limit, f"{work} {arguments}: {found['s']:.0f} s"
        return Outcome(out=out, err=err, **found)

    def moebench(self, *words: str, **order) -> Outcome:
        """A command of the command line."""
        return self.do("moebench.cli:main", [str(word) for word in words], **order)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that knows the command line and torch."""
    made = Server(tmp_path_factory.mktemp("faults"), "moebench.cli", "torch", "transformers")
    yield made
    made.close()


def jumping(words: list[str]) -> int:
    """A command under a wall clock that jumps by up to a year, back and forth, whenever somebody looks."""
    import random
    import time

    from moebench.cli import main

    real, draw = time.time, random.Random(0)
    time.time = lambda: real() + draw.uniform(-3e7, 3e7)
    time.time_ns = lambda: int(time.time() * 1e9)
    return main(words)


def measured(options: dict) -> int:
    """A measured cell, in this process; prints its counters, and its error where it failed."""
    from moebench.commands.compose import typed
    from moebench.harness.run import planned
    from moebench.plugins import load_plugins

    row = planned(typed(options, load_plugins(quiet=True)), 0, True, quiet=True)
    print(json.dumps({"error": row.error, "counters": row.protocol.get("counters")}))
    return int(row.status == "failed")


def listing(folder: Path) -> dict[str, str]:
    """Every file and folder below ``folder``, hidden ones too, with the hash of what it holds."""
    return {
        str(path.relative_to(folder)): "" if path.is_dir() else xxhash.xxh3_64_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def tally(fault: str, where: str, injected: int, what: str) -> None:
    """Say what a test injected and what came of it."""
    if TIMES > 1:
        (folder := Path("build")).mkdir(exist_ok=True)
        with open(folder / "faults.txt", "a") as out:
            out.write(f"{fault:<22} {where:<40} {injected:>7}  {what}\n")
